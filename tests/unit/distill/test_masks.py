"""Which positions count as verified and which train, against a reference that walks token by token."""

from itertools import pairwise

import pytest
import torch

from moray.batch import Taps, TrainBatch
from moray.distill.masks import draw_view, loss_positions, staircase_probability, verified_start

CHATS = [
    "ppprrrrrr",
    "rrrpp",  # no prompt at all: something must be known all the same
    "pprrrppprrrrrrrpr",
    "pppp",
    "prprprpr",
    "pprrrrrrrrrrrrrrrrr",
]


def batch_of(chats: list[str]) -> TrainBatch:
    """Chats drawn as p (prompt) and r (response), padded with non-response."""
    longest = max(map(len, chats))
    mask = torch.tensor([[token == "r" for token in chat.ljust(longest, "-")] for chat in chats])
    return TrainBatch(torch.zeros_like(mask, dtype=torch.long), mask, torch.tensor([len(c) for c in chats]), Taps())


def slow_start(chat: str, period: int, phase: int) -> list[int]:
    """Each response counts its own tokens from its first; every `period`-th of them is verified."""
    start, latest, count = [], 0, 0
    for position, token in enumerate(chat):
        if token == "r":
            verified = (count + phase) % period == 0
            count += 1
        else:
            verified, count = True, 0
        if verified or position == 0:
            latest = position
        start.append(latest)
    return start


@pytest.mark.parametrize("period", [2, 3, 5, 100])
def test_verified_positions_equal_a_slow_reference(period):
    batch = batch_of(CHATS)
    for phase in range(min(period, 6)):
        size = len(CHATS)
        start = verified_start(batch.response_mask, torch.full((size,), period), torch.full((size,), phase))
        for row, chat in enumerate(CHATS):
            assert start[row, : len(chat)].tolist() == slow_start(chat, period, phase), (chat, phase)


def test_the_drawing_in_the_docstring():
    mask = torch.tensor([[False] * 3 + [True] * 6])
    assert verified_start(mask, torch.tensor([3]), torch.tensor([2]))[0].tolist() == [0, 1, 2, 2, 4, 4, 4, 7, 7]


def test_training_positions_equal_a_slow_reference():
    batch = batch_of(CHATS)
    positions = loss_positions(batch)
    for row, chat in enumerate(CHATS):
        expected = [i + 1 < len(chat) and chat[i + 1] == "r" for i in range(batch.tokens.shape[1])]
        assert positions[row].tolist() == expected


def test_no_position_trains_into_padding_or_on_the_last_token():
    batch = batch_of(["pprrr", "pprrrrrrr"])
    assert loss_positions(batch).tolist() == [
        [False, True, True, True, False, False, False, False, False],
        [False, True, True, True, True, True, True, True, False],
    ]


def test_a_response_mask_that_reaches_into_padding_is_cut():
    batch = batch_of(["pprrrr"])
    cut = TrainBatch(batch.tokens, batch.response_mask, torch.tensor([4]), batch.taps)
    assert loss_positions(cut)[0].tolist() == [False, True, True, False, False, False]


def test_draws_cover_every_period_and_phase_and_repeat():
    batch = batch_of(["p" + "r" * 30] * 300)
    view = draw_view(batch, (3, 6), 0.25, torch.Generator().manual_seed(0))
    again = draw_view(batch, (3, 6), 0.25, torch.Generator().manual_seed(0))
    assert torch.equal(view.start, again.start)
    assert torch.equal(view.staircase, again.staircase)
    assert 40 < int(view.staircase.sum()) < 110
    seen = set()
    for row in view.start.tolist():
        verified = sorted(set(row))[1:]  # without the prompt
        gaps = {b - a for a, b in pairwise(verified)}
        assert len(gaps) == 1
        seen.add((gaps.pop(), verified[0]))
    # period P in 3..5; the first verified response token is number 0..P-1 of the response, which begins at 1
    assert seen == {(period, 1 + offset) for period in (3, 4, 5) for offset in range(period)}


def test_without_a_period_every_position_is_predicted_from_the_one_before():
    view = draw_view(batch_of(CHATS), None, 0.5, torch.Generator().manual_seed(0))
    assert view.start[0].tolist() == [0, *range(view.start.shape[1] - 1)]
    assert view.staircase is None


def test_every_draw_has_a_seed_of_its_own():
    generator = torch.Generator().manual_seed(0)
    assert len({draw_view(batch_of(CHATS), period, 0.0, generator).seed for period in (None, (2, 6)) * 4}) == 8


def test_the_staircase_ends_with_the_first_half():
    assert [staircase_probability(epoch, 4) for epoch in range(4)] == [1.0, 0.5, 0.0, 0.0]
    assert staircase_probability(0, 1) == 0.0
    never, always = (draw_view(batch_of(CHATS), (2, 3), p, torch.Generator()).staircase for p in (0.0, 1.0))
    assert never is None
    assert always.all()
