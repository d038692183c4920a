"""Plain decoding's side of the target: the taps of a prompt."""

import pytest
import torch
from tiny_batches import taps_of
from tiny_targets import TinyTarget, load_target

from moray.batch import TapNeeds
from moray.decoding.session import PREFILL_CHUNK, TargetSession


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("session"))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_taps_of_a_prompt_arrive_chunk_by_chunk(tiny):
    prompt = tiny.prompt(1, PREFILL_CHUNK + 9)
    session = TargetSession(tiny.target, 300)
    session.begin(TapNeeds((1, 3), (-1,)))
    tokens, kv, hidden = [], [], []

    def on_chunk(new, taps):
        tokens.extend(new.tolist())
        kv.append(taps.kv.clone())
        hidden.append(taps.hidden[-1].clone())

    logits = session.prefill(prompt, on_chunk)
    whole = taps_of(tiny.target, torch.tensor([prompt]), TapNeeds((1, 3), (-1,)))
    assert tokens == prompt
    assert [piece.shape[1] for piece in kv] == [PREFILL_CHUNK, 9]
    assert whole.kv is not None
    close(torch.cat(kv, dim=1), whole.kv)
    close(torch.cat(hidden, dim=1), whole.hidden[-1])
    close(logits, tiny.target.logits(whole.hidden[-1][0, -1:]))
