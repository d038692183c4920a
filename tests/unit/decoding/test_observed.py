"""The taps of a text, chunk by chunk, are those of one pass over all of it."""

import pytest
import torch
from tiny_batches import taps_of
from tiny_targets import TinyTarget, load_target

from moray.batch import TapNeeds
from moray.decoding.engine.observer import MAX_TOKENS
from moray.decoding.generate import runner_for
from moray.decoding.observed import taps_of_text


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("observed"))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_taps_of_a_text_arrive_chunk_by_chunk(tiny):
    text, needs = tiny.prompt(1, MAX_TOKENS + 9), TapNeeds((1, 3), (-1,))
    runner = runner_for(tiny.target, 300, 0)
    for _ in taps_of_text(runner, tiny.prompt(2, 280), needs):
        pass  # what the runner held before is overwritten
    pieces = list(taps_of_text(runner, text, needs))
    whole = taps_of(tiny.target, torch.tensor([text]), needs)
    assert torch.cat([tokens for tokens, _ in pieces]).tolist() == text
    kv = [taps.kv for _, taps in pieces if taps.kv is not None]
    assert [piece.shape[1] for piece in kv] == [MAX_TOKENS, 9]
    assert whole.kv is not None
    close(torch.cat(kv, dim=1), whole.kv)
    close(torch.cat([taps.hidden[-1] for _, taps in pieces], dim=1), whole.hidden[-1])
