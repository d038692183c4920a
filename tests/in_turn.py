"""Parametrizes a test with pairs: an ordinary run tests each row with one column, in rotation; the soak tests all."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def in_turn(
    names: tuple[str, str], rows: Sequence[Any], columns: Sequence[Any], whole: Collection[Any] = ()
) -> pytest.MarkDecorator:
    """The mark that parametrizes a test with every pair; those that an ordinary run leaves out are marked soak.

    Args:
        names: of the two parameters.
        rows: values of the first, such as drafters, at least as many as there are columns.
        columns: values of the second, such as trees.
        whole: rows that an ordinary run tests with every column.
    """
    assert len(rows) >= len(columns), "an ordinary run would leave out a column"
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
    return pytest.mark.parametrize(names, cases)
