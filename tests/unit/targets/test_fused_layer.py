"""Fused layers: transformers' results to rounding for every family, its own where they are asked for, and its text."""

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
from compiled_kernels import CAN_COMPILE
from shape_checks import unchecked
from tiny_drafters import VARIANTS, build
from tiny_targets import TARGETS, TinyTarget, save_target

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.targets import model as model_module
from moray.targets.fused_layer import FusedLayer
from moray.targets.head import TargetHead
from moray.targets.huge_pages import _pieces
from moray.targets.kernels import choice
from moray.targets.kernels.attention import CompiledAttention
from moray.targets.kernels.compiled import loaded_kernels
from moray.targets.kernels.kinds import Kernels, stock_kernels
from moray.targets.kernels.layer import AfterAttention, BeforeAttention
from moray.targets.kernels.weights import PackedLinear
from moray.targets.kernels.whole_layer import WholeLayer
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.trees.shapes import DynamicShape

PACKED = Kernels(1, "for a test")
MORE = {
    "windows": {"family": "mistral", "sliding_window": 8},
    "biases": {"family": "llama", "attention_bias": True},
    "MLP biases": {"family": "llama", "mlp_bias": True},
    "wide heads": {"family": "llama", "head_dim": 24, "num_key_value_heads": 4},
}
CASES = TARGETS | MORE
KINDS = {"packed": PACKED}
if CAN_COMPILE:
    KINDS["compiled"] = Kernels(None, "for a test", compiled_up_to=20)  # not for two prompts of 11 tokens together


@pytest.fixture(scope="module", params=[(case, kind) for kind in KINDS for case in CASES], ids=" ".join)
def tiny(request, tmp_path_factory):
    case, kind = request.param
    options = dict(CASES[case])
    folder = save_target(tmp_path_factory.mktemp("fused"), options.pop("family"), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "stay_in_cache", lambda weights: False)
        patch.setattr(model_module, "choose_kernels", lambda weights, **_: KINDS[kind])
        return TinyTarget(case, folder, Target.load(TargetConfig(model=str(folder), device="cpu")))


def passes(target: Target, num_rows: int = 2) -> list[torch.Tensor]:
    """Two prompts of 11 tokens, a tree of three nodes behind each, and one token: the hidden states of all."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.spec.vocab_size, (num_rows, 15), generator=generator)
    cache = target.new_cache(20, num_rows)
    found = []
    output = target.forward(tokens[:, :11], torch.arange(11).expand(num_rows, -1), None, cache, (-1, -3))
    cache.commit(11)
    found += [output.last, output.hidden[-3]]
    mask = torch.ones(1, 1, 3, 14, dtype=torch.bool)
    mask[..., 1, 12:] = mask[..., 2, 12] = False  # the nodes are siblings of each other but for the root
    mask[..., 0, 12:] = False
    mask[..., 1, 12] = mask[..., 2, 13] = True
    positions = torch.tensor([[11, 12, 12]]).expand(num_rows, -1)
    found.append(target.forward(tokens[:, 11:14], positions, mask, cache).last)
    added = torch.zeros(mask.shape, dtype=target.dtype).masked_fill_(~mask, -torch.inf)  # as decoding gives it
    found.append(target.forward(tokens[:, 11:14], positions, added, cache).last)
    cache.commit(1)
    found.append(target.forward(tokens[:, 14:], torch.full((num_rows, 1), 12), None, cache).last)
    return found


def test_every_family_gives_the_results_of_transformers_to_rounding(tiny):
    assert all(isinstance(layer.forward, FusedLayer) for layer in tiny.target.model.model.layers)
    assert isinstance(tiny.target.model.lm_head, PackedLinear)
    fused = passes(tiny.target)
    with stock_kernels():
        stock = passes(tiny.target)
    for own, theirs in zip(fused, stock, strict=True):
        torch.testing.assert_close(own, theirs, atol=2e-5, rtol=2e-5)
    assert not torch.equal(fused[0], stock[0]), "the same kernels were compared"


def test_text_is_that_of_transformers(tiny):
    prompt = tiny.prompt(3, 14)
    wanted = tiny.hugging_face(prompt, 30)
    with unchecked():
        plain = PlainDecoder(tiny.target, 100).generate(prompt, SamplingParams(), 30, ())
        drafter = build(tiny, VARIANTS["moa-1"])
        shape = DynamicShape(type="dynamic", depth=3, breadth=3, nodes=8)
        drafted = SpeculativeDecoder(tiny.target, drafter, shape, 100).generate(prompt, SamplingParams(), 30, ())
    assert plain.tokens == drafted.tokens == wanted


def test_parameters_are_those_of_the_file_and_nothing_is_held_twice(tiny):
    plain = Target.load(TargetConfig(model=str(tiny.folder), device="cpu"))
    fused_state, state = tiny.target.model.state_dict(), plain.model.state_dict()
    assert fused_state.keys() == state.keys()
    assert all(torch.equal(fused_state[name], state[name]) for name in state)
    layer = tiny.target.model.model.layers[0]
    joined = layer.forward._qkv.weight
    assert layer.self_attn.k_proj.weight.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()
    assert TargetHead.of(tiny.target, 1).tensors().keys() == TargetHead.of(plain, 1).tensors().keys()


def test_gradients_and_compiled_parts_use_the_layer_s_own_pass(tiny, monkeypatch):
    layer = tiny.target.model.model.layers[0]
    used = []
    monkeypatch.setattr(layer.forward, "_stock", lambda *args, **kwargs: used.append(1) or args[0])
    inputs = {
        "position_embeddings": tiny.target._rotary.at(torch.zeros(1), torch.tensor([[0]])),
        "past_key_values": tiny.target.new_cache(4),
    }
    hidden = torch.randn(1, 1, tiny.target.spec.hidden_size)
    with torch.inference_mode():
        layer(hidden, **inputs)
    assert not used
    layer(hidden.requires_grad_(), **inputs)
    assert len(used) == 1
    marker = torch.full_like(hidden, 1e6)
    monkeypatch.setattr(layer.mlp, "_compiled_call_impl", lambda x: marker)
    monkeypatch.setattr(layer.forward, "_gate_up", None)
    with torch.inference_mode():
        assert (layer(hidden.detach(), **inputs) > 9e5).all()
    assert len(used) == 1, "attention stays fused beside an MLP that torch compiled"


def test_compiled_parts_are_used_for_few_rows(tiny, monkeypatch):
    fused = [layer.forward for layer in tiny.target.model.model.layers]
    rows: dict[str, set[int]] = {"_before": set(), "_after": set(), "_whole": set()}

    def counted(part: Callable[..., torch.Tensor], seen: set[int], one: Any, *args: torch.Tensor) -> torch.Tensor:
        seen.add(args[0].shape[:2].numel())
        return part(one, *args)

    for kind, name in ((BeforeAttention, "_before"), (AfterAttention, "_after"), (WholeLayer, "_whole")):
        part = kind.__call__
        monkeypatch.setattr(kind, "__call__", partialmethod(partial(counted, part, rows[name])))
    attended: set[tuple[int, int]] = set()

    def attends(self: CompiledAttention, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
        attended.add((query.shape[2], key.shape[2]))
        return compiled(self, query, key, *rest)

    compiled = CompiledAttention.__call__
    monkeypatch.setattr(CompiledAttention, "__call__", attends)
    passes(tiny.target)
    are_compiled = fused[0]._compiled_up_to > 0
    can_attend = are_compiled and fused[0]._head_dim % loaded_kernels().lanes == 0
    is_whole = can_attend and fused[0]._head_norm is None
    # Where a window hides something, the mask of a single query is of booleans, as the first of three nodes is.
    added = {6} if tiny.name == "windows" else {6, 2}
    rest = ({6, 2} - added | {6}) if is_whole else {6, 2}
    passed = {6: (3, 14), 2: (1, 13)}
    assert rows["_whole"] == (added if is_whole else set())
    assert attended == ({passed[one] for one in added} if can_attend and not is_whole else set())
    assert rows["_after"] == (rest if are_compiled else set())
    assert rows["_before"] == (rest if are_compiled and fused[0]._head_norm is None else set())


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_gives_what_it_gives_unfused(kind, tmp_path, monkeypatch):
    folder = save_target(tmp_path, "llama")
    monkeypatch.setattr(model_module, "stay_in_cache", lambda weights: False)
    monkeypatch.setattr(model_module, "choose_kernels", lambda weights, **_: KINDS[kind])
    target = Target.load(TargetConfig(model=str(folder), device="cpu", dtype="bfloat16"))
    fused = passes(target)
    with stock_kernels():
        stock = passes(target)
    for own, theirs in zip(fused, stock, strict=True):
        assert (own.float() - theirs.float()).norm() < 0.03 * theirs.float().norm()


def test_transformers_own_pass_still_works(tiny):
    """Also without gradients and with a cache, as `generate` has it."""
    prompt = tiny.prompt(5, 9)
    with torch.inference_mode():
        ids = tiny.target.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert ids[0, len(prompt) :].tolist() == tiny.hugging_face(prompt, 8)


def test_large_anonymous_memory_alone_is_moved_to_huge_pages():
    maps = """\
7f0000100000-7f0000a00000 rw-p 00000000 00:00 0
7f0001000000-7f0001400000 r--p 00000000 00:00 0
7f0002000000-7f0002400000 rw-p 00000000 08:01 12   /usr/lib/a.so
7f0003000000-7f00031ff000 rw-p 00000000 00:00 0
555500000000-555505000000 rw-p 00000000 00:00 0   [heap]
"""
    mebi = 1 << 20
    assert _pieces(maps) == [
        (0x7F0000200000, 8 * mebi),
        (0x555500000000, 64 * mebi),
        (0x555504000000, 16 * mebi),
    ]


def test_layers_are_fused_where_torch_s_own_kernels_are_faster(tiny, monkeypatch):
    monkeypatch.setattr(model_module, "stay_in_cache", lambda weights: False)
    monkeypatch.setattr(model_module, "choose_kernels", lambda weights, **_: Kernels(None, "for a test"))
    target = Target.load(TargetConfig(model=str(tiny.folder), device="cpu"))
    assert all(isinstance(layer.forward, FusedLayer) for layer in target.model.model.layers)
    fused = passes(target)
    with stock_kernels():
        stock = passes(target)
    for own, theirs in zip(fused, stock, strict=True):
        torch.testing.assert_close(own, theirs, atol=2e-5, rtol=2e-5)


def test_without_memory_for_copies_layers_are_not_fused(tiny, monkeypatch):
    monkeypatch.setattr(model_module, "stay_in_cache", lambda weights: False)
    monkeypatch.setattr(choice, "_free_bytes", lambda: 1 << 10)
    target = Target.load(TargetConfig(model=str(tiny.folder), device="cpu"))
    assert not target.is_fused
    assert target.kernels is not None
    assert "more than half of the 0 MiB that are free" in target.kernels.reason


def test_a_small_target_is_left_as_it_is(tiny):
    target = Target.load(TargetConfig(model=str(tiny.folder), device="cpu"))
    assert target.kernels is None
    assert not target.is_fused
    assert not any(isinstance(layer.forward, FusedLayer) for layer in target.model.model.layers)


def test_a_target_for_long_passes_is_not_packed(tiny, monkeypatch):
    monkeypatch.setattr(model_module, "stay_in_cache", lambda weights: False)
    monkeypatch.setattr(model_module, "choose_kernels", lambda weights, **_: PACKED)
    config = TargetConfig(model=str(tiny.folder), device="cpu")
    assert Target.load(config).kernels == PACKED
    plain = Target.load(config, packs=False)
    assert plain.kernels is None
    assert not any(isinstance(module, PackedLinear) for module in plain.model.modules())
