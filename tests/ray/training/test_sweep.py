"""Sweeps on Ray Tune over a tiny target: they find a winner, go on, outlive deaths, and refuse what cannot work."""

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file
from tiny_sweeps import BLOCK, STEP_TOKENS, write_distill, write_questions

from moray.cluster.configs import RayConfig
from moray.config import validate
from moray.errors import ConfigError, DataError, MismatchError
from moray.provenance import read_json
from sweeps.trainings.configs import SweepConfig
from sweeps.tuning.configs import GridSearch
from sweeps.tuning.folders import trial_folder

LAST_STEP = 12

pytestmark = pytest.mark.usefixtures("ray_session")

MakeSweep = Callable[..., SweepConfig]


@pytest.fixture(scope="module")
def make_sweep(tiny_target: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeSweep:
    """A sweep of few updates over the tiny target; what is given replaces its own keys."""
    folder = tmp_path_factory.mktemp("sweep")
    distill = write_distill(folder, tiny_target, tiny_cache)
    questions = write_questions(folder, "one two three", "four five", "six", "seven eight nine ten")

    def make(**values: Any) -> SweepConfig:
        defaults = {
            "distill": [str(distill)],
            "space": {"drafter.target_layers": [0, 1]},
            "ladder": {"rungs": 2, "reduction": 2, "stop": False},
            "training_tokens": LAST_STEP * STEP_TOKENS,
            "decoding": {"tree": {"type": "chain", "depth": 3}, "questions": str(questions), "max_new_tokens": 12},
            "confirm": {"finalists": 1, "seeds": 1},
        }
        return validate(SweepConfig, defaults | values)

    return make


def run(sweep: SweepConfig) -> dict[str, Any]:
    from rich.console import Console

    from sweeps.trainings.run import run_sweep

    return run_sweep(sweep, Console(file=StringIO()))


Swept = tuple[SweepConfig, dict[str, Any]]


@pytest.fixture(scope="module")
def climbed(make_sweep: MakeSweep, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Two trials to the end, on two rungs."""
    sweep = make_sweep(output=str(tmp_path_factory.mktemp("climbed") / "two"))
    return sweep, run(sweep)


@pytest.mark.soak
def test_a_sweep_of_two_trials_writes_its_answer(climbed: Swept) -> None:
    sweep, summary = climbed
    output = Path(sweep.output)
    assert read_json(output / "summary.json") == json.loads(json.dumps(summary))
    assert [trial["state"] for trial in summary["trials"]] == ["finished", "finished"]
    assert sorted(trial["choices"]["drafter.target_layers"] for trial in summary["trials"]) == [0, 1]
    best = max(summary["trials"], key=lambda trial: trial["figures"]["objective"])
    assert summary["winner"]["choices"] == best["choices"]
    assert summary["training_tokens"] == sum(trial["training_tokens"] for trial in summary["trials"])
    rows = pd.read_parquet(output / "sweep.parquet")
    assert sorted(rows["step"]) == [LAST_STEP // 2] * 2 + [LAST_STEP] * 2
    assert (rows["tau"] >= 1).all()
    assert rows["lossless"].all()
    assert (rows["objective"] == rows["speedup"]).all()
    for name in ("drafter.json", "drafter.safetensors"):
        assert (output / "best" / name).read_bytes() == (Path(best["folder"]) / name).read_bytes()


@pytest.mark.soak
def test_a_trial_that_climbs_in_parts_ends_where_an_unbroken_run_ends(climbed: Swept, tmp_path: Path) -> None:
    from moray.cluster.training.distill import distill

    sweep, summary = climbed
    trial = summary["trials"][0]
    assert [row["step"] for row in read_json(Path(trial["folder"]) / "rungs.json")] == [LAST_STEP // 2, LAST_STEP]
    config = sweep.trial(trial["choices"], str(tmp_path / "unbroken"))
    config = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": LAST_STEP})})
    whole = load_file(distill(config) / "drafter.safetensors")
    parts = load_file(Path(trial["folder"]) / "drafter.safetensors")
    assert whole.keys() == parts.keys()
    assert all(bool((whole[name] == parts[name]).all()) for name in whole)


@pytest.mark.soak
def test_a_complete_sweep_is_not_run_again(climbed: Swept) -> None:
    from sweeps.trainings.run import is_complete

    sweep, _ = climbed
    assert is_complete(sweep)
    assert is_complete(sweep.model_copy(update={"max_concurrent": 1, "ray": RayConfig(num_cpus=7)}))
    with pytest.raises(MismatchError, match="training_tokens"):
        is_complete(sweep.model_copy(update={"training_tokens": 100}))


@pytest.mark.soak
def test_resumption_measures_nothing_again_and_trains_what_is_missing(climbed: Swept, tmp_path: Path) -> None:
    from sweeps.trainings.run import is_complete

    sweep, before = climbed
    again = sweep.model_copy(update={"output": str(tmp_path / "two")})
    shutil.copytree(sweep.output, again.output)
    lost, kept = (Path(again.output) / "trials" / Path(trial["folder"]).name for trial in before["trials"])
    (Path(again.output) / "summary.json").unlink()  # as a kill in the middle of the first trial's last rung leaves it
    rows = read_json(lost / "rungs.json")
    (lost / "rungs.json").write_text(json.dumps(rows[:1]))
    (lost / "trial.json").write_text(json.dumps(read_json(lost / "trial.json") | {"state": "running"}))
    with pytest.raises(ConfigError, match="--resume"):
        is_complete(again)
    resumed = again.model_copy(update={"resume": True})
    assert not is_complete(resumed)
    untouched = {path: path.stat().st_mtime_ns for path in kept.rglob("*") if path.is_file()}
    after = run(resumed)
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*") if path.is_file()} == untouched
    assert read_json(lost / "rungs.json")[0] == rows[0]
    figures = [trial["figures"] for trial in after["trials"]]
    assert [row["tau"] for row in figures] == [trial["figures"]["tau"] for trial in before["trials"]]


@pytest.mark.soak
@pytest.mark.parametrize("then", ["end", "resume"])
def test_a_trial_that_diverges_or_cannot_be_made_is_reported_and_the_others_go_on(
    then: str, make_sweep: MakeSweep, tmp_path: Path
) -> None:
    """What speaks against a trial is no divergence. It may be mended: with --resume that trial is tried again."""
    space = {"optim.lr": [1e30, 0.02, 0.03]}
    sweep = make_sweep(space=space, output=str(tmp_path / "sweep"), ladder={"rungs": 1, "reduction": 2})
    blocked = trial_folder(sweep.output, {"optim.lr": 0.03})
    blocked.path.mkdir(parents=True)
    (blocked.path / "run.yaml").write_text("config: {drafter: {type: eagle}}\nfingerprints: {}\n")
    summary = run(sweep)
    states = {trial["choices"]["optim.lr"]: trial for trial in summary["trials"]}
    assert {rate: trial["state"] for rate, trial in states.items()} == {
        1e30: "diverged",
        0.02: "finished",
        0.03: "failed",
    }
    assert "lower optim.lr" in states[1e30]["message"]
    assert "another output" in states[0.03]["message"]
    assert summary["winner"]["choices"] == {"optim.lr": 0.02}
    if then == "end":
        return
    (blocked.path / "run.yaml").unlink()
    summary = run(sweep.model_copy(update={"resume": True}))
    after = {trial["choices"]["optim.lr"]: trial["state"] for trial in summary["trials"]}
    assert after == {1e30: "diverged", 0.02: "finished", 0.03: "finished"}


def test_a_trial_whose_drafts_cannot_pay_is_stopped_on_its_first_rung(make_sweep: MakeSweep, tmp_path: Path) -> None:
    """Three drafted tokens cost more than a pass of the tiny target, and six updates teach no drafter that much."""
    sweep = make_sweep(output=str(tmp_path / "sweep"), space={"optim.lr": [0.02]}, stop_below_break_even=1.0)
    with pytest.raises(DataError, match=r"not one trial .* was trained to the end; the first of 1 that ended early"):
        run(sweep)
    folder = trial_folder(sweep.output, {"optim.lr": 0.02})
    (needed,) = read_json(Path(sweep.output) / "break_even.json").values()
    assert folder.state == "stopped"
    message = folder.record["message"] or ""
    if needed < 4:
        (row,) = folder.rows
        assert (row.get("step"), row.get("break_even_tau")) == (LAST_STEP // 2, needed)
        assert message.endswith(f"of its tau to break even, {needed:.2f}")
    else:
        assert message.startswith("not trained: its tau to break even is")


@pytest.mark.soak
def test_a_search_at_random_goes_on_with_another_space_and_tells_mlflow(
    make_sweep: MakeSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    output, store = str(tmp_path / "sweep"), tmp_path / "store"
    sweep = make_sweep(
        output=output,
        space={"optim.lr": {"type": "loguniform", "low": 0.01, "high": 0.05}},
        search={"type": "random", "num_trials": 1},
        ladder={"rungs": 1, "reduction": 2},
    )
    trackers = json.dumps([{"type": "mlflow", "uri": str(store)}])
    sweep = sweep.model_copy(update={"distill": (*sweep.distill, f"trackers={trackers}")})
    first = run(sweep)
    assert len(first["trials"]) == 1
    assert all(0.01 <= trial["choices"]["optim.lr"] <= 0.05 for trial in first["trials"])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=store.as_uri())
    told = []
    for trial in first["trials"]:
        (run_id,) = read_json(Path(trial["folder"]) / "trackers.json").values()
        told += [metric.value for metric in client.get_metric_history(run_id, "sweep/objective")]
    assert sorted(told) == pytest.approx(sorted(trial["figures"]["objective"] for trial in first["trials"]))
    other = sweep.model_copy(update={"space": {"optim.lr": [0.03]}, "search": GridSearch(type="grid")})
    second = run(other.model_copy(update={"resume": True}))
    before = {trial["name"]: trial["figures"] for trial in first["trials"]}
    after = {trial["name"]: trial["figures"] for trial in second["trials"]}
    assert len(after) == 2
    assert before.items() <= after.items()


@pytest.mark.soak
def test_optuna_searches_by_the_speed_of_a_batch(make_sweep: MakeSweep, tmp_path: Path) -> None:
    sweep = make_sweep(
        output=str(tmp_path / "sweep"),
        space={"drafter.target_layers": [0, 1, 2], "losses.kl": {"type": "uniform", "low": 0.5, "high": 1.5}},
        search={"type": "optuna", "num_trials": 2, "num_random": 1},
        ladder={"rungs": 1, "reduction": 2},
    )
    decoding = sweep.decoding.model_copy(update={"batch_size": 2, "rounds": 2})
    summary = run(sweep.model_copy(update={"decoding": decoding}))
    assert len(summary["trials"]) == 2
    for trial in summary["trials"]:
        assert trial["state"] == "finished"
        assert trial["figures"]["equal_share"] == 1
        assert trial["figures"]["objective"] == trial["figures"]["speedup"] > 0


@pytest.fixture(scope="module")
def narrow_cache(tiny_target: Path, chats_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for drafters that run no layer of the target."""
    from moray.activations.format.schema import CacheConfig
    from moray.cluster.caching.capture import cache_activations
    from moray.cluster.caching.configs import CaptureConfig
    from moray.data.ultrachat import ChatsConfig
    from moray.targets.spec import TargetConfig

    folder = tmp_path_factory.mktemp("narrow")
    chats, cache = ChatsConfig(path=str(chats_file), max_chats=12), CacheConfig(hidden_depths=(-1,), max_length=128)
    cache_activations(str(folder), TargetConfig(model=str(tiny_target)), chats, cache, CaptureConfig())
    return folder


def test_a_missing_column_is_refused_before_anything_starts(
    make_sweep: MakeSweep, narrow_cache: Path, tmp_path: Path
) -> None:
    sweep = make_sweep(output=str(tmp_path / "sweep"))
    narrow = sweep.model_copy(update={"distill": (*sweep.distill, f"activations={narrow_cache}")})
    with pytest.raises(DataError, match=r"no column hidden\.-2"):
        run(narrow)
    assert not (tmp_path / "sweep").exists()


def test_what_cannot_work_is_refused_before_anything_starts(make_sweep: MakeSweep, tmp_path: Path) -> None:
    output = tmp_path / "sweep"
    misspelt = make_sweep(space={"drafter.target_layer": [0, 1]}, output=str(output))
    with pytest.raises(ConfigError, match=r"'drafter\.target_layer'; did you mean 'drafter\.target_layers'"):
        run(misspelt)
    layers = make_sweep(space={"drafter.target_layers": [0, 3]}, output=str(output))
    with pytest.raises(ConfigError, match="target_layers is 3"):
        run(layers)
    heads = make_sweep(
        space={"drafter.layer_self_attention": [BLOCK, BLOCK | {"num_heads": 5, "num_kv_heads": 5}]}, output=str(output)
    )
    with pytest.raises(ConfigError, match="num_heads is 5"):
        run(heads)
    long = make_sweep(training_tokens=10**9, output=str(output))
    with pytest.raises(DataError, match=r"raise train\.epochs"):
        run(long)
    short = make_sweep(training_tokens=STEP_TOKENS, output=str(output))
    with pytest.raises(ConfigError, match=r"ladder\.rungs is 2, but with .* they are at updates 1, 1"):
        run(short)
    few = make_sweep(output=str(output))
    few = few.model_copy(update={"decoding": few.decoding.model_copy(update={"batch_size": 5})})
    with pytest.raises(ConfigError, match=r"batch_size is 5, but .* 4 questions"):
        run(few)
    assert not output.exists()
