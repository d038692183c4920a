"""Computes the figures of `vllm bench serve` and of speculation from request records.

Rounds are pooled by adding up their tokens and their durations. This module does not depend on variants or levels.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from moray.bench.load.config import GoodputConfig
from moray.bench.load.request import RequestRecord
from moray.bench.load.results import Acceptance, LoadFigures, Spread
from moray.bench.load.rounds import Round


def measure(rounds: Sequence[Round], goodput: GoodputConfig) -> LoadFigures:
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
        **acceptance(good),
    }


def acceptance(records: Iterable[RequestRecord]) -> Acceptance:
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


def spread(values: Sequence[float]) -> Spread:
    """Mean, median, standard deviation and percentiles, interpolated as in numpy and therefore as in vLLM."""
    if not values:
        return {"mean": None, "median": None, "std": None, "p90": None, "p95": None, "p99": None}
    array = np.asarray(values)
    p90, p95, p99 = np.percentile(array, (90, 95, 99))
    return {
        "mean": float(array.mean()),
        "median": float(np.median(array)),
        "std": float(array.std()),
        "p90": float(p90),
        "p95": float(p95),
        "p99": float(p99),
    }


def _spread_per_token(records: Iterable[RequestRecord]) -> Spread:
    """Like `spread`, but over tokens: the tokens of a chunk share its time, and each token counts."""
    pairs = sorted(pair for r in records for pair in r.token_gaps)
    if not pairs:
        return spread([])
    values, weights = 1e3 * np.array([value for value, _ in pairs]), np.array([weight for _, weight in pairs])
    mean = float(np.average(values, weights=weights))
    below = np.cumsum(weights) / weights.sum()

    def at(share: float) -> float:
        return float(values[min(len(values) - 1, int(np.searchsorted(below, share)))])

    return {
        "mean": mean,
        "median": at(0.5),
        "std": float(np.sqrt(np.average((values - mean) ** 2, weights=weights))),
        "p90": at(0.9),
        "p95": at(0.95),
        "p99": at(0.99),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _inverse(values: Sequence[float]) -> float | None:
    mean = _mean(values)
    return 1 / mean if mean else None
