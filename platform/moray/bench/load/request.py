"""The record of one request: its times, its tokens and the figures derived from them. Independent of HTTP."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

Outcome = Literal["ok", "rejected", "failed"]


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are in seconds since the start of its round."""

    index: int
    question_id: str
    due: float
    """Scheduled time of sending; `max_concurrency` may have delayed it."""
    start: float = 0.0
    end: float = 0.0
    """Time of the last chunk with a choice; for rejected and failed requests, the time of the failure."""
    outcome: Outcome = "failed"
    error: str | None = None
    """One line about what went wrong."""
    times: list[float] = field(default_factory=list)
    """Arrival times of the chunks that carry text."""
    sizes: list[float] = field(default_factory=list)
    """Sizes of these chunks: tokens if the server reports them, else characters."""
    sizes_are_tokens: bool = False
    text: str = ""
    finish_reason: str | None = None
    num_input: int = 0
    num_output: int = 0
    num_accepted: int | None = None
    """None if the server does not report it."""
    num_rejected: int | None = None
    has_usage: bool = False
    """Whether the server counted the tokens; if not, each chunk counts as one token."""

    @property
    def ttft(self) -> float:
        """Time to the first chunk with text, or to the end if there was none."""
        return (self.times[0] if self.times else self.end) - self.start

    @property
    def e2e(self) -> float:
        """End-to-end latency."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None if there are fewer than two tokens."""
        return (self.e2e - self.ttft) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Times between chunks, which is the inter-token latency as vLLM defines it."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def token_gaps(self) -> list[tuple[float, float]]:
        """(seconds per token, tokens) of every chunk after the first.

        If the server does not report the tokens of a chunk, the tokens of the answer are divided among the chunks in
        proportion to their characters.
        """
        total = sum(self.sizes)
        scale = 1.0 if self.sizes_are_tokens or not total else self.num_output / total
        counts = [max(size * scale, 1e-9) for size in self.sizes[1:]]
        return [(gap / count, count) for gap, count in zip(self.gaps, counts, strict=True)]

    @property
    def body(self) -> dict[str, Any]:
        """The record as plain values for a report."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "ttft": self.ttft,
            "tpot": self.tpot,
        }
