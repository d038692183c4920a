"""Slots: what is computed when, and what is never computed twice."""

import pytest
import torch

from moray.drafters.slots import EXTEND_CHUNK, DraftSlots

LIKE = torch.zeros(1)


class Log:
    """Which verified tokens were computed in passes of their own, and from which slot on."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []

    def __call__(self, some: torch.Tensor, start: int) -> None:
        self.calls.append((some.tolist(), start))


def tokens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long)


def test_a_prompt_is_computed_in_chunks():
    slots, log = DraftSlots(400, 4, LIKE), Log()
    slots.extend(torch.arange(150), 0, log)
    assert log.calls == [
        (list(range(64)), 0),
        (list(range(64, 128)), 64),
        (list(range(128, 150)), 128),
    ]
    assert (slots.length, slots.num_verified) == (150, 150)


def test_few_tokens_wait_for_the_next_root_and_are_computed_with_it_once():
    slots, log = DraftSlots(100, 4, LIKE), Log()
    slots.extend(tokens(7, 8, 9), 0, log)
    assert (slots.length, slots.num_verified) == (0, 3)
    rows = slots.expand(tokens(5), None, 0)
    assert rows.tokens.tolist() == [7, 8, 9, 5]
    assert (rows.num_known, rows.start, rows.begin, rows.position) == (3, 0, 0, 3)
    rows = slots.expand(tokens(6), None, 1)
    assert (rows.tokens.tolist(), rows.num_known, rows.start, rows.position) == ([6], 0, 4, 4)
    again = slots.expand(tokens(5), None, 0)
    assert (again.tokens.tolist(), again.num_known, again.start, again.position) == ([5], 0, 3, 3)
    assert log.calls == []


def test_an_accepted_chain_needs_nothing_but_its_leaf():
    slots, log = DraftSlots(100, 4, LIKE), Log()
    slots.extend(tokens(7, 8), 0, log)
    for depth, token in enumerate((1, 2, 3)):
        slots.expand(tokens(token), None, depth)
    slots.extend(tokens(1, 2, 3, 4), 3, log)  # 4 was the leaf
    assert (slots.length, slots.num_verified) == (5, 6)
    rows = slots.expand(tokens(9), None, 0)
    assert (rows.tokens.tolist(), rows.num_known, rows.start, rows.position) == ([4, 9], 1, 5, 6)
    slots.extend(tokens(9), 1, log)
    rows = slots.expand(tokens(0), None, 0)
    assert (rows.tokens.tolist(), rows.num_known, rows.start, rows.position) == ([0], 0, 7, 7)
    assert log.calls == []


def test_what_waits_is_computed_by_itself_where_no_draft_follows():
    slots, log = DraftSlots(100, 4, LIKE), Log()
    for token in (1, 2, 3):
        slots.extend(tokens(token), 0, log)
    assert log.calls == [([1], 0), ([2], 1)]
    assert (slots.length, slots.num_verified) == (2, 3)


@pytest.mark.parametrize("size", [EXTEND_CHUNK - 1, EXTEND_CHUNK])
def test_no_more_waits_than_can_be_masked(size):
    slots, log = DraftSlots(200, 4, LIKE, is_layered=True), Log()
    slots.extend(torch.arange(size), 0, log)
    rows = slots.expand(tokens(0), None, 0)
    assert rows.num_known == (size if size < EXTEND_CHUNK else 0)
    if rows.causal is not None:
        seen = rows.causal[0, 0].isfinite()
        assert torch.equal(seen, torch.ones(size + 1, size + 1, dtype=torch.bool).tril())


def test_a_reset_forgets_what_waited():
    slots, log = DraftSlots(100, 4, LIKE), Log()
    slots.extend(tokens(1, 2), 0, log)
    slots.expand(tokens(3), None, 0)
    slots.reset()
    rows = slots.expand(tokens(4), None, 0)
    assert (rows.tokens.tolist(), rows.start, rows.position, slots.num_verified) == ([4], 0, 0, 0)
