"""Compares variants: ratios of their figures, round by round, and whether their answers are equal."""

from collections.abc import Mapping, Sequence
from typing import Any

from moray.bench.load.results import DifferentTexts, EqualTexts, LoadFigures, Ratio
from moray.bench.load.rounds import Round
from moray.bench.spread import quartiles

RATIOS = {
    "output_throughput": ("output_throughput",),
    "tokens_per_second_per_user": ("tokens_per_second_per_user",),
    "mean_ttft": ("ttft_ms", "mean"),
    "mean_tpot": ("tpot_ms", "mean"),
    "mean_itl": ("itl_ms", "mean"),
    "mean_e2e": ("e2e_ms", "mean"),
    "p99_e2e": ("e2e_ms", "p99"),
}
"""Ratios to report, each with the path to its figure."""
_MAX_SHOWN = 3


def ratios(
    above: LoadFigures, below: LoadFigures, rounds: Sequence[tuple[LoadFigures, LoadFigures]]
) -> dict[str, Ratio]:
    """Ratios of two variants' figures: over all rounds together, and their spread over single rounds."""
    found: dict[str, Ratio] = {}
    for name, keys in RATIOS.items():
        single = [_ratio(_at(a, keys), _at(b, keys)) for a, b in rounds]
        known = [value for value in single if value is not None]
        found[name] = {
            "ratio": _ratio(_at(above, keys), _at(below, keys)),
            "low": min(known, default=None),
            "high": max(known, default=None),
            "quartiles": quartiles(known) if known else None,
            "rounds": single,
        }
    return found


def equal_texts(rounds: Mapping[str, Sequence[Round]]) -> EqualTexts:
    """Count the requests that all variants answered with the same text; skip those that any variant did not answer."""
    compared = equal = 0
    different: list[DifferentTexts] = []
    for number, together in enumerate(zip(*rounds.values(), strict=True)):
        for records in zip(*(each.records for each in together), strict=True):
            if any(record.outcome != "ok" for record in records):
                continue
            compared += 1
            texts = {record.text for record in records}
            equal += len(texts) == 1
            if len(texts) > 1 and len(different) < _MAX_SHOWN:
                answers = dict(zip(rounds, (record.text for record in records), strict=True))
                different.append({"question_id": records[0].question_id, "round": number, "texts": answers})
    share = equal / compared if compared else None
    return {"compared": compared, "equal": equal, "share": share, "different": different}


def _at(figures: LoadFigures, keys: Sequence[str]) -> float | None:
    value: Any = figures
    for key in keys:
        value = value[key]
    return value


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
