"""Drafters that compute with compiled kernels: the scores of the same drafter without them."""

from copy import deepcopy

import pytest
import torch
from compiled_kernels import needs_compiler
from tiny_batches import batch_of
from tiny_drafters import TRAINED, VARIANTS, build
from tiny_targets import TinyTarget, load_target

from moray.batch import Taps
from moray.drafters import base
from moray.drafters.base import Drafter
from moray.drafters.common.decoder_layers import DecoderLayer
from moray.targets.kernels.attention import CompiledAttention
from moray.targets.kernels.kinds import ALL_ROWS, Kernels
from moray.targets.kernels.layer import AfterAttention

pytestmark = needs_compiler
KNOWN = 12
TOLERANCES = {None: 1e-5, torch.bfloat16: 0.03}
"""How far scores may differ, as a share of their norm, by the dtype that weights are rounded to."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("compiled"), "llama")


@pytest.fixture
def calls(monkeypatch) -> dict[type, int]:
    """How often each part was computed by a compiled kernel."""
    found = {CompiledAttention: 0, AfterAttention: 0}

    def count(kind: type) -> None:
        function = kind.__call__

        def counted(self, *args):
            found[kind] += 1
            return function(self, *args)

        monkeypatch.setattr(kind, "__call__", counted)

    for kind in found:
        count(kind)
    return found


@torch.inference_mode()
def scores(drafter: Drafter, tokens: torch.Tensor, taps: Taps) -> list[torch.Tensor]:
    """Of one node in each of two sequences, and of two children of the first."""
    kv = None if taps.kv is None else taps.kv[:, :KNOWN]
    memory = drafter.observe(Taps(kv, {depth: hidden[:, :KNOWN] for depth, hidden in taps.hidden.items()}))
    states = []
    for length in (KNOWN, KNOWN - 3):
        states.append(drafter.new_state(64, 64))
        drafter.extend(states[-1], tokens[:length], {name: part[:, :length] for name, part in memory.items()})
    _, together = drafter.step_many(states, torch.tensor([[5], [7]]), None, 0)
    children = torch.tensor([[True, True, False], [True, False, True]])
    return [together, drafter.step(states[0], torch.tensor([3, 9]), children, 1)]


@pytest.mark.parametrize("rounded", TOLERANCES)
@pytest.mark.parametrize("variant", TRAINED)
def test_scores_are_those_of_the_same_drafter_without_compiled_kernels(tiny, calls, variant, rounded, monkeypatch):
    drafter = build(tiny, VARIANTS[variant])
    batch = batch_of(tiny.target, [tiny.prompt(0, 24)], 6, drafter.needs)
    wanted = scores(drafter, batch.tokens[0], batch.taps)
    assert set(calls.values()) == {0}
    compiled = deepcopy(drafter)
    monkeypatch.setattr(base, "choose_kernels", lambda *_, **__: Kernels(None, "for a test", rounded, ALL_ROWS))
    compiled.pack()
    for own, expected in zip(scores(compiled, batch.tokens[0], batch.taps), wanted, strict=True):
        known = expected.isfinite()
        assert torch.equal(known, own.isfinite())
        assert (own - expected)[known].norm() <= TOLERANCES[rounded] * expected[known].norm()
    kind = drafter.config.type
    assert (calls[CompiledAttention] > 0) == (kind != "medusa"), "heads of Medusa attend to nothing"
    assert (calls[AfterAttention] > 0) == (kind not in ("medusa", "glide")), "GLIDE's layer has another order"


def test_what_torch_compiled_is_used(tiny, calls, monkeypatch):
    """MLPs of a packed drafter that torch compiled as well (see `decoding.compiling`)."""
    drafter = build(tiny, VARIANTS["independent-0"])
    monkeypatch.setattr(base, "choose_kernels", lambda *_, **__: Kernels(None, "for a test", None, ALL_ROWS))
    drafter.pack()
    used: list[int] = []
    for layer in drafter.modules():
        if isinstance(layer, DecoderLayer):
            monkeypatch.setattr(layer.mlp, "_compiled_call_impl", lambda x: used.append(1) or torch.zeros_like(x))
    batch = batch_of(tiny.target, [tiny.prompt(0, 24)], 6, drafter.needs)
    scores(drafter, batch.tokens[0], batch.taps)
    assert used
    assert calls[AfterAttention] == 0
