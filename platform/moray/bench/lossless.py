"""Raises an error if a measured text differs from plain decoding; called after the report is written. Torch-free."""

from collections.abc import Iterable, Mapping
from typing import Any

from moray.errors import LosslessError


def row_name(row: Mapping[str, Any]) -> str:
    """The name of a report row in error messages."""
    return f"{row['drafter']} with {row['tree']} at temperature {row.get('temperature') or 0:g}"


def check_lossless(lossless: Iterable[tuple[str, bool | None]]) -> None:
    """Raise an error if any text that must equal plain decoding's does not.

    Args:
        lossless: pairs of a row's name and whether its text equals plain decoding's. None means that equality is not
            promised: in 16-bit formats, and with the acceptance methods rejection and typical.

    Raises:
        LosslessError: a row is False; the message names all such rows.
    """
    broken = [name for name, is_lossless in lossless if is_lossless is False]
    if broken:
        raise LosslessError(
            f"the text differs from plain decoding, which is a defect of Moray: {'; '.join(broken)}. The report is "
            "written; do not use these rows, and report the defect with target, drafter and questions"
        )
