"""What positions see in unrolled draft steps, as the picture in `drafters.common.unrolled` has it."""

import torch

from moray.drafters.common.unrolled import drafted_before, from_step

COLUMN = torch.arange(5)


def seen(step: int, position: int) -> list[list[int]]:
    """The keys of each step so far that a position sees in `step`."""
    row = drafted_before(COLUMN, step).rows(0, 5)[0, 0, position]
    return [run.nonzero()[:, 0].tolist() for run in row.split(5)]


def test_step_three_sees_the_root_s_past_and_one_key_of_each_further_step():
    assert seen(3, 4) == [[0, 1, 2], [3], [4]]
    assert seen(3, 2) == [[0], [1], [2]]
    assert seen(2, 4) == [[0, 1, 2, 3], [4]]
    assert seen(1, 3) == [[0, 1, 2, 3]]


def test_a_position_without_a_root_sees_one_key_and_predicts_nothing():
    assert seen(3, 1) == [[0], [], []]
    start = torch.tensor([[0, 0, 1, 2, 3]])
    assert from_step(start, COLUMN, 1).tolist() == [[0, 0, 1, 2, 3]]
    assert from_step(start, COLUMN, 3).tolist() == [[0, 1, 2, 0, 1]]
