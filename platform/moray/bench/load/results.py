"""What a benchmark of an endpoint has measured, as in its report. Latencies are in milliseconds."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from moray.bench.load.config import LevelConfig


class Spread(TypedDict):
    """How a latency is distributed; all None if nothing was measured."""

    mean: float | None
    median: float | None
    std: float | None
    p90: float | None
    p95: float | None
    p99: float | None


class Acceptance(TypedDict):
    """Figures about the drafts; None if the server does not report them."""

    accepted_tokens: int | None
    rejected_tokens: int | None
    tau: float | None
    acceptance_rate: float | None


class LoadFigures(Acceptance):
    """The figures of one or more rounds of a variant; None for what was not measured."""

    completed: int
    failed: int
    rejected: int
    errors: dict[str, int]
    """The most frequent errors, with their counts."""
    duration: float
    """Seconds of all rounds together."""
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_concurrent_requests: int
    mean_concurrent_requests: float
    mean_wait_ms: float | None
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    itl_per_token_ms: Spread
    itl_per_token_is_exact: bool | None
    e2e_ms: Spread
    rejected_ms: Spread
    tokens_per_second_per_user: float | None
    tokens_per_second_per_user_with_ttft: float | None
    num_uncounted: int
    """Answers whose tokens the server did not count."""


class VariantFigures(LoadFigures):
    """The figures of all rounds of a variant together, and of each."""

    rounds: list[LoadFigures]
    requests: NotRequired[list[list[Mapping[str, Any]]]]
    """Round by round, every request (see `RequestRecord.body`)."""


class Ratio(TypedDict):
    """One figure of a variant relative to the same figure of another one."""

    ratio: float | None
    """Over all rounds together."""
    low: float | None
    high: float | None
    quartiles: tuple[float, float, float] | None
    rounds: list[float | None]


class DifferentTexts(TypedDict):
    """A request that variants answered differently."""

    question_id: str
    round: int
    texts: dict[str, str]
    """Answer by variant."""


class EqualTexts(TypedDict):
    """How many requests all variants answered with the same text."""

    compared: int
    equal: int
    share: float | None
    different: list[DifferentTexts]
    """A few of the others."""


class LevelFigures(TypedDict):
    """The figures of one level."""

    variants: dict[str, VariantFigures]
    ratios: dict[str, dict[str, Ratio]]
    """By pair of variants, then by figure (see `variants.RATIOS`)."""
    equal_texts: EqualTexts | None
    """None if the answers cannot be compared."""


class LevelResult(LevelFigures):
    """The load of one level (see `LevelConfig`), and its figures."""

    request_rate: float | None
    max_concurrency: int | None
    burstiness: float
    times_first: float | None
    num_requests: int | None


def level_result(level: LevelConfig, figures: LevelFigures) -> LevelResult:
    """The load of a level with its figures."""
    return {
        "request_rate": level.request_rate,
        "max_concurrency": level.max_concurrency,
        "burstiness": level.burstiness,
        "times_first": level.times_first,
        "num_requests": level.num_requests,
        **figures,
    }


def load_of(level: LevelResult) -> LevelConfig:
    """The load that a level's figures were measured at."""
    return LevelConfig(
        request_rate=level["request_rate"],
        max_concurrency=level["max_concurrency"],
        burstiness=level["burstiness"],
        times_first=level["times_first"],
        num_requests=level["num_requests"],
    )
