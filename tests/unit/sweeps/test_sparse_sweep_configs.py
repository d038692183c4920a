"""Sweeps over sparse targets: what they accept, and which trials are on the front."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moray.config import load_config
from moray.errors import ConfigError
from sweeps.sparse.configs import SparseSweepConfig
from sweeps.sparse.report import render_html
from sweeps.sparse.results import SparseRow, SparseSummary, front_of, print_sparse_summary

REPOSITORY = Path(__file__).resolve().parents[3]
SPARSE_PRESET = "configs/sweeps/sparse-demo.yaml"


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def row(name: str, share: float | None, perplexity: float = 0.0) -> SparseRow:
    figures: Any = None
    if share is not None:
        figures = dict.fromkeys(("kv_share", "pass_share"), share)
        figures |= {"share": share, "perplexity": perplexity, "dense_perplexity": 5.0, "agreement": 0.5}
    message = None if share is not None else "no more room"
    return {"name": name, "choices": {}, "state": "failed", "message": message, "folder": "", "figures": figures}


ROWS = [row("half", 0.5, 9.0), row("worse", 0.6, 10.0), row("most", 0.9, 6.0), row("dead", None)]


def test_trials_of_the_preset_differ_in_what_the_space_names():
    sweep = load_config(SparseSweepConfig, [SPARSE_PRESET])
    trial = sweep.trial({"sparse.share": 0.4, "sparse.router_bits": 4}, "runs/t")
    assert (trial.sparse.share, trial.sparse.router_bits, trial.output) == (0.4, 4, "runs/t")
    assert trial.workers.num_workers == 1, "from the words of sparsify"
    with pytest.raises(ConfigError, match=r"with sparse\.shar=0\.4: .*did you mean 'sparse.share'"):
        sweep.trial({"sparse.shar": 0.4})


@pytest.mark.parametrize("key", ["output", "activations", "target.model", "workers.num_workers", "ray.num_cpus"])
def test_what_belongs_to_a_sweep_of_sparse_targets_cannot_be_swept(key):
    with pytest.raises(ConfigError, match=f"'{key}' cannot be swept: "):
        load_config(SparseSweepConfig, [SPARSE_PRESET, f"space.{key}=[1, 2]"])


def test_a_range_needs_draws():
    words = [SPARSE_PRESET, "space={sparse.share: {type: uniform, low: 0.3, high: 0.9}}"]
    with pytest.raises(ConfigError, match=r"search\.type is grid, but 'sparse\.share' is a range"):
        load_config(SparseSweepConfig, words)
    load_config(SparseSweepConfig, [*words, "search={type: random, num_trials: 3}"])


def test_the_front_has_no_trial_that_another_beats():
    assert front_of(ROWS) == ["half", "most"]
    assert front_of([*ROWS, row("best", 0.4, 5.5)]) == ["best"]


def test_page_and_table_show_every_trial(capsys):
    summary: SparseSummary = {
        "trials": ROWS,
        "front": front_of(ROWS),
        "training_tokens": 1,
        "wall_seconds": 1.0,
        "machine": {},
        "versions": {},
        "config": {},
    }
    page = render_html(summary)
    print_sparse_summary(summary, Console())
    shown = capsys.readouterr().out
    for one in ROWS:
        assert f"{one['name']}</th>" in page
        assert one["name"] in shown
    assert "dead: failed: no more room" in shown
    assert "failed: no more room</td>" in page
