"""The memory of one whole training step: linear in tokens, the same for short and long sequences, less on request."""

import pytest
import torch
from memory_use import memory_use
from one_step import gradients_of
from tiny_batches import batch_of, taps_of
from tiny_drafters import TRAINED, VARIANTS, build, losses_for
from tiny_targets import TinyTarget, load_target

from moray.batch import TrainBatch
from moray.distill import token_losses
from moray.distill.masks import draw_view
from moray.drafters.base import Drafter
from moray.drafters.moa import moa
from moray.targets import visibility

T_STEP_AND_CAUSAL = ["moa-0", "moa-2", "glide-0", "eagle-0"]
ONE_OF_EVERY_KIND = {name.rpartition("-")[0]: name for name in TRAINED}.values()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("step"), num_hidden_layers=3)


def step(drafter: Drafter, batch: TrainBatch) -> None:
    for parameter in drafter.parameters():
        parameter.grad = None
    gradients_of(drafter, [batch], losses_for(drafter), staircase_probability=0.5)


def peak(tiny: TinyTarget, drafter: Drafter, num_sequences: int, seq: int) -> int:
    tokens = torch.randint(0, 97, (num_sequences, seq), generator=torch.Generator().manual_seed(0))
    response = torch.ones(num_sequences, seq, dtype=torch.bool)
    response[:, :4] = False
    taps = taps_of(tiny.target, tokens, drafter.needs)
    batch = TrainBatch(tokens, response, torch.full((num_sequences,), seq), taps)
    step(drafter, batch)  # what is made once and stays, such as tables of rotations
    return memory_use(lambda: step(drafter, batch)).peak


@pytest.mark.parametrize("name", T_STEP_AND_CAUSAL)
def test_memory_follows_the_number_of_tokens_and_not_the_length_of_sequences(monkeypatch, tiny, name):
    """Lengths of 2 and 8 blocks of queries, of 32 in place of 512."""
    monkeypatch.setattr(visibility, "_QUERY_BLOCK", 32)
    monkeypatch.setattr(token_losses, "_MAX_CHUNK", 16)
    drafter = build(tiny, VARIANTS[name]).train()
    peaks = [peak(tiny, drafter, 256 // seq, seq) for seq in (64, 256)]
    assert max(peaks) < 1.1 * min(peaks)
    assert peak(tiny, drafter, 2, 256) < 2.2 * peaks[-1]


# One of every kind; what else the kinds can be is compared before a release.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ONE_OF_EVERY_KIND else pytest.mark.soak) for name in TRAINED]
)
def test_checkpointing_has_the_same_gradients_in_less_memory(monkeypatch, tiny, name):
    # In pieces, as large layer self-attention is: recomputed as a whole it would be as large again.
    monkeypatch.setattr(moa, "_LAYER_NUMBERS", 16 * tiny.target.spec.num_layers * tiny.target.spec.kv_width)
    drafter = build(tiny, VARIANTS[name]).train()
    batch = batch_of(tiny.target, [tiny.prompt(0, 60), tiny.prompt(1, 41)], 5, drafter.needs)
    gradients, left = [], []
    for recomputes in (False, True):
        drafter.recomputes = recomputes
        step(drafter, batch)
        gradients.append([p.grad.clone() for p in drafter.parameters() if p.grad is not None])
        view = draw_view(batch, drafter.config.verified_period, 0.5, torch.Generator().manual_seed(0))
        left.append(memory_use(lambda view=view: drafter(batch, view)).left)
    assert len(gradients[0]) == len(list(drafter.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert left[1] < 0.8 * left[0]
    # Peaks vary from run to run by a few tensors; why is not known. Of medusa-1 the loss takes most.
    assert any(peak_of_step(drafter, batch, True) <= 1.05 * peak_of_step(drafter, batch, False) for _ in range(3))


def peak_of_step(drafter: Drafter, batch: TrainBatch, recomputes: bool) -> int:
    drafter.recomputes = recomputes
    return memory_use(lambda: step(drafter, batch)).peak


def test_layer_self_attention_in_pieces_is_the_same(monkeypatch, tiny):
    drafter = build(tiny, VARIANTS["moa-0"])
    batch = batch_of(tiny.target, [tiny.prompt(0, 24), tiny.prompt(1, 17)], 5, drafter.needs)
    with torch.no_grad():
        whole = drafter.observe(batch.taps)["cross"]
        monkeypatch.setattr(moa, "_LAYER_NUMBERS", 5 * tiny.target.spec.num_layers * tiny.target.spec.kv_width)
        pieces = drafter.observe(batch.taps)["cross"]
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)


def test_layer_self_attention_computes_nothing_of_padding(tiny):
    drafter = build(tiny, VARIANTS["moa-0"])
    batch = batch_of(tiny.target, [tiny.prompt(0, 24), tiny.prompt(1, 17)], 5, drafter.needs)
    assert isinstance(drafter, moa.MoA)
    seen: list[int] = []
    drafter.lsa.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0]))
    step(drafter, batch)
    assert seen == [24 + 17]
