"""Routers of sparse targets: what they read, how large they are, and what is refused when they are loaded."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import load_sparse_target, save_target

from moray.config import validate
from moray.errors import ConfigError
from moray.targets.model import Target
from moray.targets.sparse.routing import Router, quantise
from moray.targets.sparse.target import SparseTarget
from moray.targets.spec import RoutingSpec, TargetConfig, read_spec


def test_codes_are_a_grid_over_each_vector():
    vector = torch.tensor([-1.0, 0.0, 0.6, 2.0])
    assert quantise(vector, 4).tolist() == [0, 5, 8, 15]
    assert quantise(3 * vector + 7, 4).tolist() == [0, 5, 8, 15]
    assert quantise(torch.stack([vector, vector * 100]), 2).tolist() == [[0, 1, 2, 3]] * 2
    assert quantise(torch.zeros(3), 4).tolist() == [0, 0, 0]


def test_a_router_of_llama_7b_has_the_published_size():
    with torch.device("meta"):
        router = Router(4096, 512, 1e-5, None)
    assert sum(parameter.numel() for parameter in router.parameters()) == 2_099_202


def test_new_routers_run_most_tokens():
    torch.manual_seed(0)
    margins = Router(64, 16, 1e-5, None).margin(torch.randn(2000, 64))
    assert 0.8 < torch.sigmoid(margins).mean() < 0.92
    assert margins.shape == (2000,)


def test_a_folder_with_routers_is_another_target(tmp_path):
    dense = read_spec(str(save_target(tmp_path / "target")))
    sparse = load_sparse_target(tmp_path / "target")
    assert isinstance(sparse.target, SparseTarget)
    assert sparse.target.spec.fingerprint != dense.fingerprint
    assert dense.routing is None
    assert sparse.target.spec.routing == RoutingSpec(first_layer=1, router_size=16, share=0.5)
    assert "routing" not in dense.for_plan
    assert sparse.target.spec.for_plan["routing"]["share"] == 0.5
    (tmp_path / "target" / "routers.safetensors").write_bytes(
        (tmp_path / "target" / "routers.safetensors").read_bytes()[:-4] + b"\x00\x00\x80\x3f"
    )
    assert read_spec(str(tmp_path / "target")).fingerprint != sparse.target.spec.fingerprint


def spoil(folder) -> None:
    state = load_file(folder / "routers.safetensors")
    state["2.outer.bias"][0] = torch.nan
    save_file(state, folder / "routers.safetensors")


def edit(folder, **changes) -> None:
    values = json.loads((folder / "routing.json").read_text()) | changes
    (folder / "routing.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "routers.safetensors").unlink(), "routers.safetensors cannot be read"),
        (lambda folder: (folder / "routers.safetensors").write_bytes(b"\0" * 20), "routers.safetensors cannot be read"),
        (lambda folder: (folder / "routing.json").write_text("{}"), "routing.json cannot be used"),
        (lambda folder: edit(folder, router_size=8), "'1.inner.bias' of routers.safetensors has the shape"),
        (lambda folder: edit(folder, first_layer=4), "leaves no layer of 4 with a router"),
        (spoil, "holds numbers that are not finite"),
    ],
)
def test_a_damaged_sparse_target_is_refused_by_name(tmp_path, damage, problem):
    folder = load_sparse_target(tmp_path / "target").folder
    damage(folder)
    with pytest.raises(ConfigError, match=problem):
        Target.load(validate(TargetConfig, {"model": str(folder), "device": "cpu"}))
