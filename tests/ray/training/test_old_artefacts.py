"""What commit 9de2e17 wrote is read, and gone on with, by the code of today: cache, drafter, run and sweep."""

import json
import re
import tarfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from moray.config import load_config, read_yaml
from moray.errors import MismatchError

ARCHIVE = Path(__file__).parents[2] / "artefacts" / "9de2e17.tar.xz"

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to change, and the working directory: `distil.yaml` is named by that word alone."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    for path in [*tmp_path.rglob("*.yaml"), *tmp_path.rglob("*.json")]:
        text = path.read_text().replace("@ROOT@", str(tmp_path))
        # Ray's workers have another working directory, so the places that they read are written out.
        text = re.sub(r"\b(model|activations): (target|cache)\b", rf"\1: {tmp_path}/\2", text)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_cache_is_whole_and_nothing_is_made_again(root):
    from moray.activations.format.store import CacheStore
    from moray.activations.maintenance.verify import verify_files
    from moray.cluster.caching.capture import cache_activations
    from pipelines.cache_activations import CacheActivationsConfig

    before = {path: path.stat().st_mtime_ns for path in (root / "cache" / "shards").iterdir()}
    config = load_config(CacheActivationsConfig, ["cache.yaml"])
    manifest = cache_activations(config.output, config.target, config.chats, config.cache, config.capture)
    assert sum(len(lengths) for groups in manifest.lengths.values() for lengths in groups) == 6
    assert {path: path.stat().st_mtime_ns for path in (root / "cache" / "shards").iterdir()} == before

    found = verify_files(CacheStore("cache"), 1, lambda total: None, lambda done: None)
    assert (found.num_shards, found.shards, found.parts, found.other) == (2, {}, {}, [])


def test_a_drafter_drafts_losslessly(root):
    from moray import Target, generate, load_drafter

    target = Target.load("target")
    plain = generate(target, None, "What is 2 plus 3?", max_new_tokens=16)
    drafted = generate(target, load_drafter("moa", target), "What is 2 plus 3?", max_new_tokens=16)
    assert plain.generation.tokens == drafted.generation.tokens
    stored, loaded = load_file(root / "moa" / "drafter.safetensors"), load_drafter("moa", target).state_dict()
    assert stored.keys() <= loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    assert plain.num_tokens == 16


def test_a_run_that_was_killed_goes_on_with_new_names_and_old(root):
    from moray.cluster.training.configs import DistillConfig
    from moray.cluster.training.distill import distill
    from moray.cluster.training.resume import is_complete

    words = ["distil.yaml", "output=moa"]
    assert is_complete(load_config(DistillConfig, words))
    before = (root / "moa" / "metrics.jsonl").read_text().splitlines()
    (root / "moa" / "drafter.json").unlink()
    for path in [root / "moa" / "run.yaml", root / "distil.yaml"]:  # as if it had been killed at update 4 of 8
        path.write_text(path.read_text().replace("max_steps: 4", "max_steps: 8"))
    assert not is_complete(load_config(DistillConfig, words))
    with pytest.raises(MismatchError, match=r"holds a run with train\.max_grad_norm = 0\.5, now it is 0\.7"):
        is_complete(load_config(DistillConfig, [*words, "train.clip=0.7"]))

    (root / "new.yaml").write_text(
        re.sub(r"\bclip:", "max_grad_norm:", (root / "distil.yaml").read_text()).replace("log_steps", "logging_steps")
    )
    distill(load_config(DistillConfig, ["new.yaml", "output=moa"]))
    after = (root / "moa" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in after] == [2, 4, 6, 8]
    assert after[:2] == before, "it went on from the checkpoint of update 4"
    assert is_complete(load_config(DistillConfig, ["new.yaml", "output=moa"]))


def test_a_finished_sweep_is_finished(root):
    from rich.console import Console

    from sweeps.reports.overview import overview
    from sweeps.trainings.configs import SweepConfig
    from sweeps.trainings.run import is_complete, run_sweep

    assert is_complete(load_config(SweepConfig, ["sweep.yaml"]))
    renamed = read_yaml(root / "sweep.yaml")
    renamed["distill"] = renamed.pop("distil")
    (root / "renamed.yaml").write_text(yaml.safe_dump(renamed))
    assert is_complete(load_config(SweepConfig, ["renamed.yaml"]))

    found = overview("sweep")
    assert found["complete"]
    assert found["num_trials"] == 2

    (root / "distil.yaml").write_text((root / "distil.yaml").read_text().replace("final: 0.1", "final: 0.3"))
    left = {name: (root / "sweep" / name).read_bytes() for name in ("summary.json", "run.yaml")}
    for refused in (is_complete, lambda sweep: run_sweep(sweep, Console())):
        with pytest.raises(MismatchError, match=r"trainings with schedule\.min_lr_ratio = 0\.1, now it is 0\.3"):
            refused(load_config(SweepConfig, ["renamed.yaml"]))
    assert {name: (root / "sweep" / name).read_bytes() for name in left} == left
