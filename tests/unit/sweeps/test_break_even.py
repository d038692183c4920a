"""A sweep stops trials whose drafts cannot pay: what they cost is measured first, with random weights."""

import json

import pytest
from tiny_sweeps import BLOCK, write_questions
from tiny_targets import save_chat_target
from torch.utils._python_dispatch import TorchDispatchMode

from moray.config import load_config, validate
from moray.errors import ConfigError
from moray.provenance import write_json_atomically
from sweeps.trainings.break_even import BREAK_EVEN_FILE, break_even_of, drafter_key, measure_break_even
from sweeps.trainings.configs import SweepConfig
from sweeps.trainings.trial import reason_not_to_train, reason_to_stop

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

SHALLOW, DEEP = (
    {"type": "independent", "num_layers": layers, "hidden_size": 32, "head_dim": 16, "layer": BLOCK}
    for layers in (1, 24)
)


def sweep_over(tmp_path, **values):
    target = {"model": str(save_chat_target(tmp_path / "target")), "device": "cpu"}
    optim = {"type": "muon", "lr": 0.02, "vector_lr": 0.003}
    distill = {"target": target, "activations": "runs/activations", "drafter": SHALLOW, "optim": optim}
    (tmp_path / "distill.yaml").write_text(
        json.dumps(distill | {"train": {"batch_tokens": 512}, "losses": {"feature": 0.0, "kl": 1.0}})
    )
    settings = {
        "distill": [str(tmp_path / "distill.yaml")],
        "space": {"drafter": [SHALLOW, DEEP]},
        "stop_below_break_even": 0.9,
        "decoding": {
            "tree": {"type": "chain", "depth": 3},
            "questions": str(write_questions(tmp_path, "one two three", "four")),
        },
        "output": str(tmp_path / "sweep"),
    }
    return validate(SweepConfig, settings | values)


class OperationClock(TorchDispatchMode):
    """A clock that ticks with every operation of torch, so that other work on the machine does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ticks += 1
        return func(*args, **(kwargs or {}))


def test_a_deeper_drafter_has_to_get_more_tokens_accepted(tmp_path, monkeypatch):
    sweep = sweep_over(tmp_path)
    trials = [sweep.trial({"drafter": drafter}) for drafter in (SHALLOW, DEEP)]
    with OperationClock() as clock:
        monkeypatch.setattr("time.perf_counter", lambda: clock.ticks * 1e-6)
        found = measure_break_even(sweep.model_dump_json(), [trial.model_dump_json() for trial in trials], 0)
        monkeypatch.undo()
    (tmp_path / "sweep").mkdir()
    write_json_atomically(tmp_path / "sweep" / BREAK_EVEN_FILE, dict(found))
    shallow, deep = (break_even_of(sweep, trial) for trial in trials)
    assert deep > 2 * shallow > 2, "24 layers against one, beside a target of few layers"


def test_a_trial_is_stopped_by_the_tau_that_its_drafts_need(tmp_path):
    sweep = sweep_over(tmp_path)
    keys = [drafter_key(sweep.trial({"drafter": each})) for each in (SHALLOW, DEEP)]
    (tmp_path / "sweep").mkdir()
    write_json_atomically(tmp_path / "sweep" / BREAK_EVEN_FILE, dict(zip(keys, (2.0, 4.0), strict=True)))
    assert reason_not_to_train(sweep, {"drafter": SHALLOW}) is None
    assert reason_not_to_train(sweep, {"drafter": DEEP}) == (
        "not trained: its tau to break even is 4.00, and decoding.tree gives at most 4 tokens per cycle; give a deeper "
        "tree or a cheaper drafter"
    )
    row = {"rung": 0, "objective": 1.0, "answers": [], "break_even_tau": 2.0, "training_tokens": 4_000}
    assert reason_to_stop(sweep, row | {"tau": 1.8}) is None, "1.8 is 90 % of 2.0"
    assert reason_to_stop(sweep, row | {"tau": 1.79}) == (
        "tau is 1.79 after 4,000 training tokens, below 90% (stop_below_break_even) of its tau to break even, 2.00"
    )
    never = sweep.model_copy(update={"stop_below_break_even": None})
    assert reason_not_to_train(never, {"drafter": DEEP}) is None
    assert reason_to_stop(never, row | {"tau": 1.0}) is None


def test_searches_and_trees_whose_costs_are_not_known_before_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"search\.type optuna proposes them later: give grid or random"):
        sweep_over(tmp_path, search={"type": "optuna", "num_trials": 2})
    decoding = {"tree": {"type": "adaptive", "depth": 3}, "questions": "questions.jsonl"}
    with pytest.raises(ConfigError, match=r"decoding\.tree is adaptive, which drafts only where it pays"):
        sweep_over(tmp_path, decoding=decoding)
    assert load_config(SweepConfig, ["configs/sweeps/draft-shapes-demo.yaml"]).stop_below_break_even == 0.8
