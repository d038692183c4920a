"""Rows become batches and come back with Python's own values, as Ray Data hands them on."""

import numpy as np

from moray.activations.planning.shards import ShardPlan
from moray.cluster.caching.rows import GroupRow, JoinedRow, ShardPlanRow, TokensRow, batch_of, rows_of, token_rows


def test_rows_come_back_as_they_were() -> None:
    plans = [ShardPlan("part-00000", f"00000-0000{i}", [[0, 1], [2]]) for i in range(2)]
    for sent in (
        [ShardPlanRow(plan) for plan in plans],
        [GroupRow(["a", "b"]), GroupRow(["c", "d"])],  # of equal lengths: NumPy would make a table of them
        [JoinedRow(3)],
    ):
        assert rows_of(batch_of(sent), type(sent[0])) == sent


def test_values_are_python_s_own_whatever_an_array_holds() -> None:
    (row,) = rows_of({"tokens": np.array([7])}, TokensRow)
    assert type(row.tokens) is int
    names = np.empty(1, dtype=object)
    names[0] = np.array(["a", "b"])
    (group,) = rows_of({"shards": names}, GroupRow)
    assert group == GroupRow(["a", "b"])
    assert [type(name) for name in group.shards] == [str, str]


def test_tokens_are_told_eight_times_a_shard_at_most_and_all_of_them() -> None:
    def told(counts: list[int]) -> list[int]:
        return [row.tokens for batch in token_rows(counts, len(counts)) for row in rows_of(batch, TokensRow)]

    assert told([]) == []
    assert told([5, 7, 11]) == [5, 7, 11]
    assert told([1] * 20) == [3] * 6 + [2]
