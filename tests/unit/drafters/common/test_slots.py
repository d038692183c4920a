"""Slots: what is computed when, and what is never computed twice."""

import pytest
import torch

from moray.drafters.common.slots import EXTEND_CHUNK, DraftSlots

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


def begun(size: int, is_layered: bool = False) -> tuple[DraftSlots, Log]:
    """Slots of a prompt, and a log of what is computed by itself after it."""
    slots = DraftSlots(200, 4, LIKE, is_layered)
    slots.extend(torch.arange(size), 0, Log())
    return slots, Log()


def draft(slots: DraftSlots, *chain: int) -> None:
    for depth, token in enumerate(chain):
        slots.expand(tokens(token), None, depth)


def test_what_was_not_kept_waits_for_the_next_root_and_is_computed_with_it_once():
    slots, log = begun(2)
    draft(slots, 1)
    slots.extend(tokens(1, 8, 9), 1, log)  # a tree's path: the root is kept
    assert (slots.length, slots.num_verified) == (3, 5)
    rows = slots.expand(tokens(5), None, 0)
    assert rows.tokens.tolist() == [8, 9, 5]
    assert (rows.num_known, rows.slot, rows.positions, rows.position) == (2, 3, (3, 6), 5)
    rows = slots.expand(tokens(6), None, 1)
    assert (rows.tokens.tolist(), rows.num_known, rows.slot, rows.positions) == ([6], 0, 6, (6, 7))
    again = slots.expand(tokens(5), None, 0)
    assert (again.tokens.tolist(), again.num_known, again.slot, again.positions) == ([5], 0, 5, (5, 6))
    assert log.calls == []


def test_an_accepted_chain_needs_nothing_but_its_leaf():
    slots, log = begun(2)
    draft(slots, 1, 2, 3)
    slots.extend(tokens(1, 2, 3, 4), 3, log)  # 4 was the leaf
    assert (slots.length, slots.num_verified) == (5, 6)
    rows = slots.expand(tokens(9), None, 0)
    assert (rows.tokens.tolist(), rows.num_known, rows.slot, rows.position) == ([4, 9], 1, 5, 6)
    slots.extend(tokens(9), 1, log)
    rows = slots.expand(tokens(0), None, 0)
    assert (rows.tokens.tolist(), rows.num_known, rows.slot, rows.position) == ([0], 0, 7, 7)
    assert log.calls == []


def test_what_waits_is_computed_by_itself_where_no_draft_follows():
    slots, log = begun(1)
    draft(slots, 1)
    slots.extend(tokens(1, 2), 1, log)
    assert log.calls == []
    slots.extend(tokens(3), 0, log)
    slots.extend(tokens(4), 0, log)
    assert log.calls == [([2], 2), ([3], 3), ([4], 4)]
    assert (slots.length, slots.num_verified) == (5, 5)


@pytest.mark.parametrize("size", [1, EXTEND_CHUNK - 1, EXTEND_CHUNK])
def test_no_more_waits_than_can_be_masked(size):
    slots, log = begun(3, is_layered=True)
    draft(slots, 0)
    slots.extend(torch.arange(1 + size), 1, log)
    rows = slots.expand(tokens(0), None, 0)
    assert rows.num_known == (size if size < EXTEND_CHUNK else 0)
    assert [len(some) for some, _ in log.calls] == ([] if size < EXTEND_CHUNK else [size])
    if rows.causal is not None:
        seen = rows.causal[0, 0].isfinite()
        wanted = torch.ones(size + 1, 4, dtype=torch.bool), torch.ones(size + 1, size + 1, dtype=torch.bool).tril()
        assert torch.equal(seen, torch.cat(wanted, dim=1))


def test_a_reset_forgets_what_waited():
    slots, log = begun(2)
    draft(slots, 1)
    slots.extend(tokens(1, 2), 1, log)
    slots.reset()
    rows = slots.expand(tokens(4), None, 0)
    assert (rows.tokens.tolist(), rows.slot, rows.position, slots.num_verified) == ([4], 0, 0, 0)
