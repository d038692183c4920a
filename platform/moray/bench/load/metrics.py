"""Computes the figures of `vllm bench serve` and of speculation from request records.

Rounds are pooled by adding up their tokens and their durations. This module does not depend on variants or levels.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from moray.bench.load.config import GoodputConfig
from moray.bench.load.request import RequestRecord
from moray.bench.load.rounds import Round

_PERCENTILES = (90, 95, 99)


def measure(rounds: Sequence[Round], goodput: GoodputConfig) -> dict[str, Any]:
    """Compute all figures; latencies are in milliseconds, None for what was not measured."""
    records = [record for each in rounds for record in each.records]
    good = [record for record in records if record.outcome == "ok"]
    duration = sum(each.duration for each in rounds)
    num_input, num_output = sum(r.num_input for r in good), sum(r.num_output for r in good)
    tpots = [1e3 * r.tpot for r in good if r.tpot is not None]
    errors = Counter(r.error for r in records if r.outcome != "ok")
    return {
        "completed": len(good),
        "failed": sum(r.outcome == "failed" for r in records),
        "rejected": sum(r.outcome == "rejected" for r in records),
        "errors": {str(error): count for error, count in errors.most_common(10)},
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(is_good(r, goodput) for r in good) / duration if goodput.is_given else None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_concurrent_requests": max(peak_concurrency(each.records) for each in rounds),
        "mean_concurrent_requests": sum(r.e2e for r in records) / duration,
        "mean_wait_ms": _mean([1e3 * (r.start - r.due) for r in records]),
        "ttft_ms": spread([1e3 * r.ttft for r in good]),
        "tpot_ms": spread(tpots),
        "itl_ms": spread([1e3 * gap for r in good for gap in r.gaps]),
        "itl_per_token_ms": _spread_per_token(good),
        "itl_per_token_is_exact": all(r.sizes_are_tokens for r in good) if good else None,
        "e2e_ms": spread([1e3 * r.e2e for r in good]),
        "rejected_ms": spread([1e3 * r.e2e for r in records if r.outcome == "rejected"]),
        "tokens_per_second_per_user": 1e3 / mean if (mean := _mean(tpots)) else None,
        "tokens_per_second_per_user_with_ttft": _inverse([r.e2e / r.num_output for r in good if r.num_output]),
        "num_uncounted": sum(not r.has_usage for r in good),
    } | acceptance(good)


def acceptance(records: Iterable[RequestRecord]) -> dict[str, Any]:
    """Figures about the drafts. tau is tokens / (tokens - accepted), because each pass adds one token of the target."""
    told = [r for r in records if r.num_accepted is not None]
    tokens, accepted = sum(r.num_output for r in told), sum(r.num_accepted or 0 for r in told)
    rejected = sum(r.num_rejected or 0 for r in told)
    return {
        "accepted_tokens": accepted if told else None,
        "rejected_tokens": rejected if told else None,
        "tau": tokens / (tokens - accepted) if tokens > accepted else None,
        "acceptance_rate": accepted / (accepted + rejected) if accepted + rejected else None,
    }


def is_good(record: RequestRecord, goodput: GoodputConfig) -> bool:
    """Whether a request met all latency limits."""
    kept = (
        (record.ttft, goodput.ttft_ms),
        (record.tpot or 0.0, goodput.tpot_ms),
        (record.e2e, goodput.e2e_ms),
    )
    return all(most is None or 1e3 * seconds <= most for seconds, most in kept)


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """Maximum number of requests in flight at the same time."""
    borders = [border for r in records for border in ((r.start, 1), (r.end, -1))]
    peak = now = 0
    for _, change in sorted(borders):  # at equal times, ends come before starts
        now += change
        peak = max(peak, now)
    return peak


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles, interpolated as in numpy and therefore as in vLLM."""
    names = ("mean", "median", "std", *(f"p{percentile}" for percentile in _PERCENTILES))
    if not values:
        return dict.fromkeys(names)
    array = np.asarray(values)
    figures = (array.mean(), np.median(array), array.std(), *np.percentile(array, _PERCENTILES))
    return {name: float(figure) for name, figure in zip(names, figures, strict=True)}


def _spread_per_token(records: Iterable[RequestRecord]) -> dict[str, float | None]:
    """Like `spread`, but over tokens: the tokens of a chunk share its time, and each token counts."""
    pairs = sorted(pair for r in records for pair in r.token_gaps)
    if not pairs:
        return spread([])
    values, weights = 1e3 * np.array([value for value, _ in pairs]), np.array([weight for _, weight in pairs])
    mean = float(np.average(values, weights=weights))
    below = np.cumsum(weights) / weights.sum()
    std = float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))
    shares = {"median": 0.5} | {f"p{percentile}": percentile / 100 for percentile in _PERCENTILES}
    last = len(values) - 1
    points = {name: float(values[min(last, np.searchsorted(below, share))]) for name, share in shares.items()}
    figures: dict[str, float | None] = {"mean": mean, "std": std}
    return figures | points


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _inverse(values: Sequence[float]) -> float | None:
    mean = _mean(values)
    return 1 / mean if mean else None
