"""Computes the table rows from the answers: speed, share of the bandwidth limit, and equality of texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moray.bench.peers.config import PeerConfig
from moray.bench.spread import ratio_interval, ratio_of_ratios_interval

_UNKNOWN = (
    "tokens", "seconds", "tokens_per_second", "interval", "of_plain_limit", "ratio_to_transformers", "ratio_interval",
    "equal_texts", "mean_equal_tokens", "tau",
)  # fmt: skip


@dataclass
class Answers:
    """The answers of one row, prompt by prompt."""

    peer: PeerConfig
    version: str | None = None
    failure: str | None = None
    """Why the row could not be measured."""
    tokens: list[list[int]] = field(default_factory=list)
    """New tokens of each answer, without the end-of-sequence token."""
    seconds: list[float] = field(default_factory=list)
    """Time of each answer, including its prompt."""

    drafted: list[tuple[int, int] | None] = field(default_factory=list)
    """Drafts, and accepted tokens, of each answer; None if the engine does not say."""

    @property
    def tau(self) -> float | None:
        """Tokens of a pass that verifies a draft, the target's own among them; None without a count."""
        counted = [pair for pair in self.drafted if pair is not None]
        num_drafts = sum(drafts for drafts, _ in counted)
        return 1 + sum(accepted for _, accepted in counted) / num_drafts if num_drafts else None

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """(tokens, seconds) of each answer."""
        return [(float(len(tokens)), seconds) for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def rows_of(rows: Sequence[Answers], limits: dict[str, float]) -> list[dict[str, Any]]:
    """Compute the figures of all rows; those of a failed row are None.

    Args:
        rows: the answers of all engines to the same prompts.
        limits: tokens per second that memory bandwidth allows in plain decoding, by dtype.
    """
    return [_row(row, _reference(rows, row.peer.dtype), limits[row.peer.dtype]) for row in rows]


def _reference(rows: Sequence[Answers], dtype: str) -> Answers | None:
    """The plain transformers row of a dtype, if it was measured."""
    wanted = ("transformers", dtype, None)
    found = (row for row in rows if (row.peer.engine, row.peer.dtype, row.peer.drafter) == wanted)
    return next((row for row in found if row.failure is None), None)


def _row(row: Answers, reference: Answers | None, limit: float) -> dict[str, Any]:
    figures: dict[str, Any] = row.peer.model_dump(mode="json") | {"drafting": row.peer.drafting}
    figures |= {"version": row.version, "failure": row.failure} | dict.fromkeys(_UNKNOWN)
    if row.failure is not None:
        return figures
    speed = _speed(row)
    figures |= {
        "tokens": sum(map(len, row.tokens)),
        "seconds": sum(row.seconds),
        "tokens_per_second": speed,
        "interval": ratio_interval(row.pairs),
        "of_plain_limit": speed / limit,
        "tau": row.tau,
    }
    if reference is None:
        return figures
    both = list(zip(row.tokens, reference.tokens, strict=True))
    return figures | {
        "ratio_to_transformers": speed / _speed(reference),
        "ratio_interval": ratio_of_ratios_interval(row.pairs, reference.pairs),
        "equal_texts": sum(ours == truth for ours, truth in both),
        "mean_equal_tokens": sum(_equal_tokens(ours, truth) for ours, truth in both) / len(both),
    }


def _speed(row: Answers) -> float:
    """Tokens per second over all answers."""
    return sum(map(len, row.tokens)) / sum(row.seconds)


def _equal_tokens(some: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix of two token lists."""
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))
