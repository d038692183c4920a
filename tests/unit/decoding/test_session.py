"""One sequence's side of the target: what is kept after a pass, and the taps of exactly that."""

import pytest
import torch
from tiny_batches import taps_of
from tiny_targets import TinyTarget, load_target

from moray.batch import TapNeeds
from moray.decoding.session import PREFILL_CHUNK, TargetSession
from moray.trees.tree import TokenTree, structure_of

NEEDS = TapNeeds(kv_layers=(0, 1, 2, 3), hidden_depths=(-1, -3))
#  0 root - 1, 2 - (1: 3, 4) (2: 5) - (5: 6)
TOKENS, PARENTS, DEPTHS = [40, 41, 42, 43, 44, 45, 46], [-1, 0, 0, 1, 1, 2, 5], [0, 1, 1, 2, 2, 2, 3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("session"))


def tree() -> TokenTree:
    structure = structure_of(PARENTS, DEPTHS, torch.device("cpu"))
    return TokenTree(torch.tensor(TOKENS), structure.parents, structure.depths, structure.ancestors, 3)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("path", [[], [1], [2], [1, 3], [1, 4], [2, 5, 6]])
def test_a_committed_path_leaves_what_plain_text_would(tiny, path):
    """Taps, cache and the next pass's logits equal those of the text read at once."""
    prompt = tiny.prompt(0, 6)
    session = TargetSession(tiny.target, 40, len(TOKENS))
    session.begin(NEEDS)
    session.prefill(prompt)
    session.verify(tree())
    session.commit(path)
    taps = session.take_taps(10)
    kept = [TOKENS[node] for node in [0, *path]]
    whole = taps_of(tiny.target, torch.tensor([[*prompt, *kept]]), NEEDS)
    assert taps.kv is not None
    assert whole.kv is not None
    close(taps.kv, whole.kv[:, 6:])
    assert set(taps.hidden) == {-1, -3}
    for depth, hidden in taps.hidden.items():
        close(hidden, whole.hidden[depth][:, 6:])
    assert session.cache.length == 6 + len(kept)
    close(session.cache.flat(0, 6 + len(kept)), whole.kv)
    after = session.verify(tree())
    text = torch.tensor([[*prompt, *kept, TOKENS[0], TOKENS[2], TOKENS[5]]])
    with torch.no_grad():
        close(after[5], tiny.target.model(text).logits[0, -1])


def test_taps_of_a_prompt_arrive_chunk_by_chunk(tiny):
    prompt = tiny.prompt(1, PREFILL_CHUNK + 9)
    session = TargetSession(tiny.target, 300, 1)
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


def test_taps_are_taken_when_they_are_wanted_and_each_once(tiny):
    prompt = tiny.prompt(0, 6)
    session = TargetSession(tiny.target, 40, len(TOKENS))
    session.begin(NEEDS)
    session.prefill(prompt)
    kept = []
    for path in ([2, 5], [], [1]):
        session.verify(tree())
        session.commit(path)
        kept += [TOKENS[node] for node in [0, *path]]
    whole = taps_of(tiny.target, torch.tensor([[*prompt, *kept]]), NEEDS)
    begin = 6
    for most, count in ((4, 4), (9, 2)):
        taps = session.take_taps(most)
        close(taps.kv, whole.kv[:, begin : begin + count])
        for depth, hidden in taps.hidden.items():
            close(hidden, whole.hidden[depth][:, begin : begin + count])
        begin += count
