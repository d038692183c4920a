"""A sweep over sparse targets on Ray Tune: every trial is a target, and what is finished is not trained again."""

import json
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
import yaml
from rich.console import Console

from moray.config import validate
from moray.errors import ConfigError, DataError, MismatchError
from moray.provenance import read_json, write_json_atomically
from moray.targets.model import Target
from moray.targets.sparse.target import SparseTarget
from moray.targets.spec import TargetConfig
from sweeps.sparse.configs import SparseSweepConfig
from sweeps.tuning.folders import RUNGS_FILE, TRIAL_FILE

pytestmark = pytest.mark.usefixtures("ray_session")


def write_sparsify(folder: Path, target: Path, cache: Path) -> Path:
    settings = {
        "target": {"model": str(target)},
        "activations": str(cache),
        "sparse": {"first_layer": 1, "router_size": 16, "lora_rank": 2, "share_weight": 20.0},
        "losses": {"feature": 0.0, "kl": 1.0},
        "optim": {"type": "adamw", "lr": 0.01},
        "train": {"epochs": 4, "max_steps": 24, "batch_tokens": 512, "save_steps": 100, "logging_steps": 4},
    }
    (folder / "sparsify.yaml").write_text(yaml.safe_dump(settings))
    return folder / "sparsify.yaml"


# Two sweeps and their trials take two and a half minutes, most of it Ray's.
@pytest.mark.soak
def test_every_trial_is_a_target_and_a_finished_sweep_is_not_trained_again(
    tiny_target: Path, tiny_cache: Path, chats_file: Path, tmp_path: Path
) -> None:
    from sweeps.sparse.run import check_sparse_sweep, is_complete, run_sparse_sweep

    sparsify = write_sparsify(tmp_path, tiny_target, tiny_cache)
    values = {
        "sparsify": [str(sparsify)],
        "space": {"sparse.share": [0.6, 0.95]},
        "quality": {"chats": str(chats_file), "max_chats": 8},
        "output": str(tmp_path / "sweep"),
    }
    sweep = validate(SparseSweepConfig, values)
    assert not is_complete(sweep)
    console = Console(file=StringIO(), width=120)
    summary = run_sparse_sweep(sweep, console)
    assert read_json(tmp_path / "sweep" / "summary.json") == json.loads(json.dumps(summary))
    few, many = sorted(summary["trials"], key=lambda row: row["choices"]["sparse.share"])
    assert few["figures"] is not None
    assert many["figures"] is not None
    assert 0 < few["figures"]["share"] < many["figures"]["share"] <= 1
    for row in (few, many):
        figures = row["figures"]
        assert figures is not None
        assert figures["share"] <= figures["pass_share"] <= 1
        assert 0 < figures["agreement"] <= 1
        assert figures["perplexity"] > 1
        target = Target.load(TargetConfig(model=row["folder"], device="cpu"))
        assert isinstance(target, SparseTarget)
    front = [few, many] if many["figures"]["perplexity"] < few["figures"]["perplexity"] else [few]
    assert [row for row in summary["trials"] if row["is_on_front"]] == front
    assert len(pd.read_parquet(tmp_path / "sweep" / "sweep.parquet")) == 2
    page = (tmp_path / "sweep" / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1
    assert all(f"{row['name']}</th>" in page for row in (few, many))
    assert is_complete(sweep)
    with pytest.raises(ConfigError, match="add --resume"):
        is_complete(validate(SparseSweepConfig, values | {"space": {"sparse.share": [0.6, 0.7, 0.95]}}))
    kept, lost = Path(few["folder"]), Path(many["folder"])
    before = (kept / RUNGS_FILE).read_bytes(), (kept / "model.safetensors").stat().st_mtime_ns
    (lost / RUNGS_FILE).unlink()  # as if it had been killed before it was measured
    record = read_json(lost / TRIAL_FILE)
    write_json_atomically(lost / TRIAL_FILE, {**record, "state": "running"})
    again = run_sparse_sweep(sweep, console)
    assert ((kept / RUNGS_FILE).read_bytes(), (kept / "model.safetensors").stat().st_mtime_ns) == before
    assert all(row["state"] == "finished" and row["figures"] for row in again["trials"])
    sparsify.write_text(sparsify.read_text().replace("lr: 0.01", "lr: 0.02"))
    with pytest.raises(MismatchError, match=r"over sparse targets with optim\.lr = 0.01, now it is 0.02"):
        is_complete(sweep)
    missing = validate(SparseSweepConfig, values | {"quality": {"chats": str(chats_file), "skip_chats": 1000}})
    with pytest.raises(DataError, match="after 1000 chats"):
        check_sparse_sweep(missing.model_copy(update={"sparsify": sweep.sparsify}))
