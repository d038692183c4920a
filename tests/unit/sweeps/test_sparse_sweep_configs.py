"""Sweeps over sparse targets: what they accept, and which trials are on the front."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moray.config import load_config
from moray.errors import ConfigError
from sweeps.reports.results import Trial
from sweeps.sparse.configs import SparseSweepConfig
from sweeps.sparse.report import render_html
from sweeps.sparse.results import SparseSummary, print_sparse_summary, rows_of

REPOSITORY = Path(__file__).resolve().parents[3]
SPARSE_PRESET = "configs/sweeps/sparse-demo.yaml"


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def trial(folder: str, share: float | None, perplexity: float = 0.0, name: str = "") -> Trial:
    figures: Any = {"share": share, "pass_share": share, "perplexity": perplexity, "dense_perplexity": 5.0}
    rows: Any = [] if share is None else [figures | {"rung": 0, "objective": 0.5, "agreement": 0.5, "answers": []}]
    state, message = ("finished", None) if rows else ("failed", "no more room")
    return Trial(name or folder, {}, state, message, rows, Path(folder))  # type: ignore[arg-type]


TRIALS = [trial("dead", None), trial("most", 0.9, 6.0), trial("half", 0.5, 9.0), trial("worse", 0.6, 10.0)]


def test_trials_of_the_preset_differ_in_what_the_space_names():
    sweep = load_config(SparseSweepConfig, [SPARSE_PRESET])
    one = sweep.trial({"sparse.share": 0.4, "sparse.router_bits": 4}, "runs/t")
    assert (one.sparse.share, one.sparse.router_bits, one.output) == (0.4, 4, "runs/t")
    assert one.workers.num_workers == 1, "from the words of sparsify"
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
    rows = rows_of(TRIALS)
    assert [(row["name"], row["is_on_front"]) for row in rows] == [
        ("half", True),
        ("worse", False),
        ("most", True),
        ("dead", False),
    ]
    twice = rows_of([trial("a", 0.5001, 9.0, "share 0.5"), trial("b", 0.5002, 10.0, "share 0.5")])
    assert [row["is_on_front"] for row in twice] == [True, False], "trials of one name are told apart"


def test_page_and_table_show_every_trial(capsys):
    rows = rows_of(TRIALS)
    summary: SparseSummary = {
        "trials": rows,
        "training_tokens": 1,
        "wall_seconds": 1.0,
        "machine": {},
        "versions": {},
        "config": {},
    }
    page = render_html(summary)
    print_sparse_summary(summary, Console())
    shown = capsys.readouterr().out
    for row in rows:
        assert f"{row['name']}</th>" in page
        assert row["name"] in shown
    assert "dead: failed: no more room" in shown
    assert "failed: no more room</td>" in page
