"""Collects the losslessness of all measurements in a sweep, of both trials and finalists."""

from collections.abc import Iterator, Mapping
from typing import Any


def lossless_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, bool | None]]:
    """Yield pairs of a measurement's name and whether its text equals plain decoding's, for `check_lossless`.

    Args:
        summary: the summary.json of a sweep of trainings or of decoding.
    """
    for trial in summary["trials"]:
        yield trial["name"], trial["figures"].get("lossless")
    for finalist in (summary.get("sure") or {}).get("finalists", ()):  # of trainings: by seed
        for seed, figures in finalist["seeds"].items():
            yield f"{finalist['name']} from seed {seed}", figures.get("lossless")
    for answer in (summary.get("drafters") or {}).values():  # of decoding: measured side by side
        for finalist in answer["finalists"]:
            yield f"{finalist['name']} as a finalist", finalist["figures"].get("lossless")
