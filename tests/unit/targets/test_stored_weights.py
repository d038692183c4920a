"""A checkpoint whose weights are not exactly the model's is refused by name, wherever it is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import save_target
from transformers import AutoConfig, AutoModelForCausalLM

from moray.errors import ConfigError, DataError
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.other_families import OtherCausalLM
from moray.targets.spec import TargetConfig, fingerprint, read_spec

LAYER = "model.layers.1.mlp.up_proj.weight"
FLOAT32, CPU = torch.float32, torch.device("cpu")

Weights = dict[str, torch.Tensor]


def load_whole(folder: Path) -> object:
    return Target.load(TargetConfig(model=str(folder), device="cpu"))


def load_head(folder: Path) -> object:
    return TargetHead.load(TargetConfig(model=str(folder), device="cpu"), 1)


def load_drafting(folder: Path) -> object:
    return OtherCausalLM(str(folder), FLOAT32, CPU)


WAYS = pytest.mark.parametrize("load", [load_whole, load_head, load_drafting])


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("weights") / "good")


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("weights") / "tied", tie_word_embeddings=True)


def changed(source: Path, folder: Path, change: Callable[[Weights], object]) -> Path:
    """A copy with other weights."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def configured(source: Path, folder: Path, **keys: object) -> Path:
    """A copy with other keys in its config.json."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def sharded(source: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """A copy in two shards, and where its index has every tensor."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shard_of = {name: f"model-{1 + (i % 2)}.safetensors" for i, name in enumerate(names)}
    for file in set(shard_of.values()):
        save_file({n: weights[n] for n in names if shard_of[n] == file}, folder / file, {"format": "pt"})
    write_index(folder, shard_of)
    return folder, shard_of


def write_index(folder: Path, shard_of: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))


def refused(load: Callable[[Path], object], folder: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in (str(folder), *words)), message


@WAYS
@pytest.mark.parametrize("name", ["lm_head.weight", LAYER])
def test_a_missing_tensor_is_named(good, tmp_path, load, name):
    refused(load, changed(good, tmp_path / "less", lambda weights: weights.pop(name)), f"'{name}' is missing")


@WAYS
def test_an_unexpected_tensor_is_named(good, tmp_path, load):
    more = changed(good, tmp_path / "more", lambda weights: weights.update({"model.extra.weight": torch.ones(3)}))
    refused(load, more, "'model.extra.weight' is unexpected")


@WAYS
def test_a_misshapen_tensor_is_named_with_both_shapes(good, tmp_path, load):
    cut = changed(good, tmp_path / "cut", lambda weights: weights.update({LAYER: torch.ones(95, 64)}))
    refused(load, cut, f"'{LAYER}'", "[95, 64]", "[96, 64]")


@WAYS
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_a_tensor_that_is_not_finite_is_named(good, tmp_path, load, value, word):
    broken = changed(good, tmp_path / "broken", lambda weights: weights["model.norm.weight"][3:4].fill_(value))
    refused(load, broken, f"'model.norm.weight' holds {word}")


@pytest.mark.parametrize("load", [Target.load, TargetHead.load])
def test_what_float16_cannot_hold_is_no_damage(good, tmp_path, load):
    large = changed(good, tmp_path / "large", lambda weights: weights["model.norm.weight"][:2].fill_(70_000.0))
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' holds infinity \(in float16\); .* dtype bfloat16 or"):
        load(TargetConfig(model=str(large), device="cpu", dtype="float16"))
    load(TargetConfig(model=str(large), device="cpu"))


@WAYS
def test_weights_stored_as_integers_are_no_weights(good, tmp_path, load):
    bits = changed(good, tmp_path / "bits", lambda weights: weights.update({LAYER: weights[LAYER].to(torch.int8)}))
    refused(load, bits, f"'{LAYER}' is stored as I8", "BF16")


@WAYS
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("gptq", "bfloat16")),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ("'spiral'", "default", "llama3")),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ("factor",)),
        ({"hidden_size": "wide"}, ("hidden_size",)),
        ({"hidden_act": "bang"}, ("bang",)),
        ({"transformers_weights": "other.safetensors"}, ("transformers_weights",)),
    ],
)
def test_a_configuration_that_cannot_be_used_is_one_line(good, tmp_path, load, keys, words):
    refused(load, configured(good, tmp_path / "odd", **keys), *words)


def test_an_adapter_must_be_merged(good, tmp_path):
    shutil.copytree(good, tmp_path / "adapted")
    (tmp_path / "adapted" / "adapter_config.json").write_text("{}")
    refused(lambda folder: read_spec(str(folder)), tmp_path / "adapted", "adapter")


@WAYS
def test_rotary_frequencies_of_old_checkpoints_are_harmless(good, tmp_path, load):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(changed(good, tmp_path / "old", lambda weights: weights.update({name: torch.ones(8)})))


@WAYS
def test_tied_embeddings_may_lie_there_once_or_twice_but_not_differ(tied, tmp_path, load):
    def copy(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    def move(weights: Weights) -> None:
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")

    for i, change in enumerate((lambda _: None, copy, move)):
        load(changed(tied, tmp_path / str(i), change))
    other = changed(tied, tmp_path / "other", lambda w: w.update({"lm_head.weight": torch.ones(97, 64)}))
    refused(load, other, "tie_word_embeddings")
    neither = changed(tied, tmp_path / "neither", lambda weights: weights.pop("model.embed_tokens.weight"))
    refused(load, neither, "weight' is missing (and 1 more")


@WAYS
def test_shards_hold_what_the_index_says(good, tmp_path, load):
    folder, shard_of = sharded(good, tmp_path / "sharded")
    load(folder)
    write_index(folder, shard_of | {LAYER: "model-3.safetensors"})
    refused(load, folder, "'model-3.safetensors' is missing", LAYER)
    write_index(folder, shard_of | {"model.extra.weight": "model-1.safetensors"})
    refused(load, folder, "'model.extra.weight' is not in model-1.safetensors")
    write_index(folder, shard_of)
    first = load_file(folder / "model-1.safetensors")
    twice = next(name for name, file in shard_of.items() if file == "model-2.safetensors")
    save_file(first | {twice: torch.zeros(1)}, folder / "model-1.safetensors", {"format": "pt"})
    refused(load, folder, f"'{twice}' is in", "model-1.safetensors", "model-2.safetensors")


def test_the_fingerprint_is_of_the_weights_that_are_read(good, tmp_path):
    folder, _ = sharded(good, tmp_path / "sharded")
    before = fingerprint(folder)
    save_file({"x": torch.ones(2)}, folder / "consolidated.safetensors")
    assert fingerprint(folder) == before
    for path in (folder / "model-1.safetensors", folder / "model-2.safetensors"):
        weights = load_file(path)
        next(iter(weights.values())).view(-1)[0] += 1
        save_file(weights, path, {"format": "pt"})
        assert fingerprint(folder) != before
        before = fingerprint(folder)


def test_the_head_of_an_exported_drafter_is_held_to_the_same(good):
    head = load_head(good)
    assert isinstance(head, TargetHead)
    config = AutoConfig.from_pretrained(good).to_dict()

    def restore(**tensors: torch.Tensor) -> None:
        TargetHead.restore(config, head.spec, 1, head.tensors() | tensors)

    restore()
    with pytest.raises(DataError, match=r"'lm_head.weight' has the shape \[5, 64\]; \[97, 64\] is accepted"):
        restore(**{"lm_head.weight": torch.ones(5, 64)})
    with pytest.raises(DataError, match=r"'lm_head.weight' holds NaN"):
        restore(**{"lm_head.weight": torch.full((97, 64), torch.nan)})


def test_what_is_right_loads_as_transformers_loads_it(good):
    target = load_whole(good)
    assert isinstance(target, Target)
    stock = AutoModelForCausalLM.from_pretrained(good).state_dict()
    assert all(torch.equal(value, stock[name]) for name, value in target.model.state_dict().items())
