"""What became of one request: its times, its tokens and what follows from both. Knows no HTTP."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

Outcome = Literal["ok", "rejected", "failed"]


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds from the start of its round."""

    index: int
    question_id: str
    due: float
    """When it was to be sent; `max_concurrency` may have kept it."""
    start: float = 0.0
    end: float = 0.0
    """Of the last chunk with a choice; of a request that was refused or failed, when that was known."""
    outcome: Outcome = "failed"
    error: str | None = None
    """One line on what went wrong."""
    times: list[float] = field(default_factory=list)
    """Of chunks that carry text."""
    sizes: list[float] = field(default_factory=list)
    """Tokens of these chunks if the server tells, else characters."""
    sizes_are_tokens: bool = False
    text: str = ""
    finish_reason: str | None = None
    num_input: int = 0
    num_output: int = 0
    num_accepted: int | None = None
    """None: the server does not tell."""
    num_rejected: int | None = None
    has_usage: bool = False
    """Whether the server counted the tokens; else a chunk counts as one."""

    @property
    def ttft(self) -> float:
        """Time to the first token that can be seen."""
        return (self.times[0] if self.times else self.end) - self.start

    @property
    def e2e(self) -> float:
        """Time to the end."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token but the first; None for one token or none."""
        return (self.e2e - self.ttft) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Times between chunks: the inter-token latency as vLLM takes it."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def token_gaps(self) -> list[tuple[float, float]]:
        """(seconds per token, tokens) of every chunk but the first.

        Where the server does not say how many tokens a chunk has, the answer's are shared out by characters.
        """
        total = sum(self.sizes)
        scale = 1.0 if self.sizes_are_tokens or not total else self.num_output / total
        counts = [max(size * scale, 1e-9) for size in self.sizes[1:]]
        return [(gap / count, count) for gap, count in zip(self.gaps, counts, strict=True)]

    @property
    def body(self) -> dict[str, Any]:
        """For a report."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "ttft": self.ttft,
            "tpot": self.tpot,
        }
