"""A checkpoint that lacks something, holds something else, or is not finite is refused by the tensor's name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import save_target

from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.other_families import OtherCausalLM
from moray.targets.spec import TargetConfig, read_spec

Tensors = dict[str, torch.Tensor]
UP = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with an lm_head of its own."""
    return save_target(tmp_path_factory.mktemp("whole"), tie_word_embeddings=False)


def damaged(whole: Path, folder: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of the target whose tensors are changed."""
    shutil.copytree(whole, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def set_to(value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[UP].view(-1)[7].fill_(value)


DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no lm_head": (lambda tensors: tensors.pop("lm_head.weight"), r"'lm_head\.weight' is missing"),
    "no layer": (lambda tensors: tensors.pop(UP), r"up_proj\.weight' is missing"),
    "shape": (lambda tensors: tensors.update({UP: torch.zeros(3, 5)}), r"up_proj\.weight' has the shape \[3, 5\]"),
    "unexpected": (lambda tensors: tensors.update(strange=torch.zeros(2)), r"'strange' is unexpected"),
    "quantised": (lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}), r"is stored as I8"),
    "nan": (set_to(float("nan")), r"up_proj\.weight' holds NaN"),
    "inf": (set_to(float("inf")), r"up_proj\.weight' holds infinity"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(whole: Path, tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    folder = damaged(whole, tmp_path / "target", change)
    with pytest.raises(ConfigError, match=message) as caught:
        Target.load(TargetConfig(model=str(folder)))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=rf"drafter\.model.*{message}"):
        OtherCausalLM(str(folder), torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match=message):
        TargetHead.load(TargetConfig(model=str(folder)), num_layers=2)


def test_buffers_that_the_model_computes_itself_do_no_harm(whole: Path, tmp_path: Path) -> None:
    folder = damaged(whole, tmp_path / "old", lambda tensors: tensors.update({"rotary_emb.inv_freq": torch.ones(4)}))
    Target.load(TargetConfig(model=str(folder)))
    TargetHead.load(TargetConfig(model=str(folder)))


def test_tied_embeddings_may_lie_there_once(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    target, head = Target.load(TargetConfig(model=str(folder))), TargetHead.load(TargetConfig(model=str(folder)))
    assert torch.equal(target.model.lm_head.weight, target.model.model.embed_tokens.weight)
    assert torch.equal(head.weight, target.model.lm_head.weight)


def test_other_weights_have_another_fingerprint(whole: Path, tmp_path: Path) -> None:
    changed = damaged(whole, tmp_path / "changed", set_to(0.125))
    assert read_spec(str(changed)).fingerprint != read_spec(str(whole)).fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantization_config \(gptq\); accepted are"),
        ({"hidden_size": "wide"}, r"its config\.json cannot be used"),
        ({"hidden_size": 48}, r"has the shape"),
    ],
)
def test_a_config_that_does_not_fit_is_one_line(
    whole: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=message) as caught:
        Target.load(TargetConfig(model=str(folder)))
    assert "\n" not in str(caught.value)


def sharded(whole: Path, folder: Path) -> Path:
    """The same target in two shards with an index."""
    shutil.copytree(whole, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shard_of = {name: f"model-{1 + number % 2:05}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in set(shard_of.values()):
        save_file({name: tensors[name] for name in names if shard_of[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return folder


def test_shards_are_those_that_the_index_names(whole: Path, tmp_path: Path) -> None:
    folder = sharded(whole, tmp_path / "shards")
    target = Target.load(TargetConfig(model=str(folder)))
    assert torch.equal(target.model.lm_head.weight, load_file(whole / "model.safetensors")["lm_head.weight"])
    before = read_spec(str(folder)).fingerprint
    save_file({"strange": torch.zeros(2)}, folder / "consolidated.safetensors")
    assert read_spec(str(folder)).fingerprint == before, "a file that is never read is no part of the model"
    Target.load(TargetConfig(model=str(folder)))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"shard 'model-00002-of-00002\.safetensors' is missing"):
        read_spec(str(folder))


def test_a_tensor_that_is_not_in_its_shard_is_named(whole: Path, tmp_path: Path) -> None:
    folder = sharded(whole, tmp_path / "shards")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index | {"weight_map": index["weight_map"] | {"ghost": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(ConfigError, match="'ghost' is not in model-00001-of-00002"):
        Target.load(TargetConfig(model=str(folder)))
