"""Cases of two parameters of which an ordinary run takes a part that meets every value, and the soak takes all."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def in_turn(
    names: tuple[str, str],
    rows: Sequence[Any],
    columns: Sequence[Any],
    whole: Collection[Any] = (),
    indirect: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """Parametrize a test with every pair. In an ordinary run each row meets one column, the next row the next one; rows
    in `whole` meet all. The other pairs are marked soak.

    Args:
        names: of the two parameters.
        rows: values of the first, such as drafters.
        columns: values of the second, such as trees.
        whole: rows that always meet every column.
        indirect: which of the names are fixtures.
    """
    cases = [
        pytest.param(
            row,
            column,
            marks=[] if row in whole or j == i % len(columns) else [pytest.mark.soak],
            id=f"{row}-{column}",
        )
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
    return pytest.mark.parametrize(names, cases, indirect=list(indirect))
