"""Drafters on disk: nothing of the target in them, the same drafts after loading, and clear refusals."""

import re

import pytest
import torch
from drafting import state_at, tree_of
from safetensors.torch import load_file, save_file
from side_by_side import SHAPES
from tiny_batches import taps_of
from tiny_drafters import VARIANTS, build
from tiny_targets import load_target

from moray.decoding.params import SamplingParams
from moray.drafters.checkpoint import load_drafter, read_contract, save_drafter
from moray.drafters.contract import Contract
from moray.errors import DataError, MismatchError
from moray.targets.head import TargetHead


def test_nothing_of_the_target_is_saved_or_counted(tiny, drafter, variant):
    frozen = {tensor.data_ptr() for tensor in tiny("llama").target.model.state_dict().values()}
    assert all(tensor.data_ptr() not in frozen for tensor in drafter.state_dict().values())
    assert drafter.num_parameters == sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    if variant not in ("eagle3-0", "medusa-0", "independent-0", "independent-1"):  # those have projections of their own
        sizes = {drafter.spec.vocab_size, drafter.vocabulary.size}
        assert not any(sizes & set(tensor.shape[:1]) for tensor in drafter.state_dict().values() if tensor.ndim > 1)


def test_a_saved_drafter_drafts_the_same(tiny, learnt, variant, tmp_path):
    target, drafter = tiny("llama"), learnt("llama", variant)
    save_drafter(tmp_path, drafter, "text-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter.json", "drafter.safetensors"]
    assert read_contract(tmp_path) == Contract.of(drafter, "text-1")
    head = TargetHead.load(target.config, drafter.config.num_target_layers)
    loaded = load_drafter(tmp_path, head, "text-1")
    assert not loaded.training
    assert set(load_file(tmp_path / "drafter.safetensors")) == set(drafter.state_dict())
    tokens = torch.tensor([target.prompt(0, 20)])
    taps = taps_of(target.target, tokens, drafter.needs)
    trees = [tree_of(d, tokens, taps, SHAPES["dynamic"], SamplingParams()) for d in (drafter, loaded)]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)
    with torch.no_grad():
        steps = [d.step(state_at(d, tokens, taps, 9), tokens[0, 9:10], None, 0) for d in (drafter, loaded)]
    if steps[0] is None:
        assert steps[1] is None
    else:
        assert torch.equal(*steps)


def test_a_drafter_of_another_target_is_refused_with_both_fingerprints(tiny, drafter, tmp_path):
    save_drafter(tmp_path, drafter, "text-1")
    other = tiny("mistral").target
    with pytest.raises(MismatchError) as caught:
        load_drafter(tmp_path, TargetHead.of(other, drafter.config.num_target_layers), "text-1")
    assert drafter.spec.fingerprint in str(caught.value)
    assert other.spec.fingerprint in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_target_trained_further_is_another_target(tmp_path):
    """One weight changed in place: same sizes, same config, another fingerprint."""
    first = load_target(tmp_path / "first", seed=0)
    drafter = build(first, VARIANTS["moa-0"])
    save_drafter(tmp_path / "drafter", drafter, "text-1")
    with torch.no_grad():
        first.target.model.lm_head.weight[0, 0] += 1.0
    first.target.model.save_pretrained(first.folder)
    with pytest.raises(MismatchError, match="another target"):
        load_drafter(tmp_path / "drafter", TargetHead.load(first.config), "text-1")


def test_another_tokenizer_or_template_is_refused_with_both_fingerprints(drafter, tmp_path):
    save_drafter(tmp_path, drafter, "text-1")
    with pytest.raises(MismatchError, match=r"text-1.*text-2"):
        load_drafter(tmp_path, drafter.head, "text-2")


def test_a_missing_or_damaged_drafter_is_refused_by_name(drafter, tmp_path):
    with pytest.raises(DataError, match=r"drafter\.json is missing"):
        load_drafter(tmp_path, drafter.head, "text-1")
    save_drafter(tmp_path, drafter, "text-1")
    weights = tmp_path / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"drafter\.safetensors"):
        load_drafter(tmp_path, drafter.head, "text-1")


def test_weights_that_are_not_this_drafters_or_not_finite_are_refused_by_name(drafter, tmp_path):
    save_drafter(tmp_path, drafter, "text-1")
    path = tmp_path / "drafter.safetensors"
    good = load_file(path)
    name = next((name for name, tensor in good.items() if tensor.is_floating_point()), None)
    if name is None:
        pytest.skip("a drafter without weights")
    broken = good[name].clone()
    broken.view(-1)[-1] = torch.nan
    for state, message in (
        ({**good, name: broken}, f"tensor '{name}' holds NaN"),
        ({**good, name: good[name][None]}, f"tensor '{name}' has the shape"),
        ({key: value for key, value in good.items() if key != name}, f"tensor '{name}' is missing"),
        ({**good, "extra": torch.ones(1)}, "tensor 'extra' is unexpected"),
    ):
        save_file(state, path)
        with pytest.raises(DataError, match=re.escape(message)):
            load_drafter(tmp_path, drafter.head, "text-1")
