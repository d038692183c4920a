"""Configurations of sweeps: what cannot be swept is refused, naming what was meant."""

from pathlib import Path

import pytest

from moray.config import load_config, read_yaml
from moray.errors import ConfigError
from sweeps.trainings.configs import SweepConfig

REPOSITORY = Path(__file__).resolve().parents[3]
PRESETS = [path for path in sorted((REPOSITORY / "configs" / "sweeps").glob("*.yaml")) if "distill" in read_yaml(path)]
PRESET = "configs/sweeps/target-layer-and-mask-width.yaml"


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_loads_and_every_end_of_its_space_is_a_distillation(path):
    sweep = load_config(SweepConfig, [str(path)])
    assert Path(sweep.output).name == path.stem
    for key, values in sweep.space.items():
        for value in values if isinstance(values, list) else values.bounds:
            assert sweep.trial({key: value}, "runs/x").output == "runs/x"


def test_a_trial_is_its_choices_laid_over_what_all_share():
    sweep = load_config(SweepConfig, [PRESET])
    trial = sweep.trial({"drafter.mask_width": [7, 9], "optim.lr": 0.125}, "runs/t")
    assert (trial.drafter.mask_width, trial.optim.lr, trial.output) == ((7, 9), 0.125, "runs/t")
    assert trial.validation is None
    assert trial.train.max_steps == 680, "from the words of distill"


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("drafter.target_layer", 1, "drafter.target_layers"),
        ("optim.momentun", 0.1, "optim.momentum"),
        ("optm.lr", 0.1, "optim"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest(key, value, nearest):
    sweep = load_config(SweepConfig, [PRESET])
    with pytest.raises(ConfigError, match=f"distill and space, with {key}=.*; did you mean '{nearest}'"):
        sweep.trial({key: value})


@pytest.mark.parametrize(
    "key", ["output", "activations", "source.type", "train.max_steps", "ray.num_cpus", "target.model", "trackers"]
)
def test_what_belongs_to_the_sweep_cannot_be_swept(key):
    with pytest.raises(ConfigError, match=f"'{key}' cannot be swept: "):
        load_config(SweepConfig, [PRESET, f"space.{key}=[1, 2]"])
    assert load_config(SweepConfig, [PRESET, "space.train.epochs=[1, 2]"]).space["train.epochs"] == [1, 2]


def test_a_grid_has_no_range():
    words = [PRESET, "space.optim.lr={type: loguniform, low: 1e-3, high: 1e-1}"]
    with pytest.raises(ConfigError, match=r"search.type is grid, but 'optim.lr' is a range without end"):
        load_config(SweepConfig, words)
    for search in ("random", "optuna"):
        assert load_config(SweepConfig, [*words, f"search={{type: {search}, num_trials: 3}}"]).search.type == search


def test_a_sweep_needs_something_to_sweep(tmp_path):
    path = tmp_path / "none.yaml"
    text = Path(PRESET).read_text(encoding="utf-8")
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("  drafter.")))
    with pytest.raises(ConfigError, match="'space'"):
        load_config(SweepConfig, [str(path)])


def test_a_batch_may_have_an_adaptive_tree():
    words = [PRESET, "decoding.batch_size=4", "decoding.tree={type: adaptive, depth: 5}"]
    assert load_config(SweepConfig, words).decoding.tree.type == "adaptive"


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (["workers.use_gpu=true"], 4),
        (["workers.use_gpu=true", "workers.gpus_per_worker=0.5"], 8),
        (["workers.use_gpu=true", "workers.gpus_per_worker=0.25"], 9),  # CPUs run out first
        (["workers.use_gpu=true", "workers.num_workers=2"], 2),
        (["workers.use_gpu=true", "train.gradient_accumulation_steps=1", "workers.num_workers=3"], 1),
    ],
)
def test_as_many_trials_run_at_a_time_as_there_is_room_for(monkeypatch, words, most):
    """On a cluster of 4 GPUs and 10 CPUs, some of which are left to the readers of the trials."""
    import ray

    from sweeps.trainings.check import concurrency

    monkeypatch.setenv("RAY_ADDRESS", "a cluster")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 10.0, "GPU": 4.0})
    sweep = load_config(SweepConfig, [PRESET])
    sweep = sweep.model_copy(update={"distill": (*sweep.distill, *words)})
    assert concurrency(sweep, sweep.trial({})) == most
    limited = sweep.model_copy(update={"max_concurrent": 1})
    assert concurrency(limited, limited.trial({})) == 1
    greedy = sweep.model_copy(update={"decoding": sweep.decoding.model_copy(update={"gpus": 5.0})})
    with pytest.raises(ConfigError, match=r"decoding\.gpus is 5; there are 4 GPUs"):
        concurrency(greedy, greedy.trial({}))
