"""What a measurement comes to whose text was not the target's own: an error, once everything is written. Torch-free."""

from collections.abc import Iterable, Mapping
from typing import Any

from moray.errors import LosslessError


def row_name(row: Mapping[str, Any]) -> str:
    """A row of a report, in an error."""
    return f"{row['drafter']} with {row['tree']} at temperature {row.get('temperature') or 0:g}"


def check_lossless(lossless: Iterable[tuple[str, bool | None]]) -> None:
    """Refuse texts that had to be plain decoding's and were not.

    Args:
        lossless: of each row its name, and whether its text was the same; None where that is not promised: in 16 bits,
            where near ties fall either way, by rejection, which keeps the distribution alone, and by the lossy rule.

    Raises:
        LosslessError: naming the rows.
    """
    broken = [name for name, is_lossless in lossless if is_lossless is False]
    if broken:
        raise LosslessError(
            f"the text was not plain decoding's, which is a defect: {'; '.join(broken)}. What was measured is written; "
            "do not use these rows, and report them with target, drafter and questions"
        )
