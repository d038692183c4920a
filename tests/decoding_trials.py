"""What a sweep over decoding choices might leave behind, for tests of what is made of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweep_trials import row, write_trials

from moray.config import validate
from moray.provenance import write_json_atomically, write_run_yaml
from sweeps.decoding.combinations import Combination
from sweeps.decoding.configs import TuneDecodingConfig
from sweeps.decoding.results import PLAN_FILE, answers_by_drafter, between_drafters, finalists_of, write_best
from sweeps.reports.results import Trial
from sweeps.tuning.records import State
from sweeps.tuning.spaces import folder_name

QUESTIONS = (4, 8, 16)
TREES = [
    {"type": "chain", "depth": 3}, {"type": "chain", "depth": 5},
    {"type": "dynamic", "depth": 5, "breadth": 4, "nodes": 16},
]  # fmt: skip
LEFT_OUT = {"moa": {"breadth 4 is more than 2 nodes": 2, "the same as another one": 3}, "eagle": {}}


def config_of(output: Path | str = "runs/s", **changes: Any) -> TuneDecodingConfig:
    """Two drafters with three trees each."""
    values = {
        "target": {"model": "runs/demo/target"}, "drafters": ["runs/demo/moa", "runs/demo/eagle"],
        "activations": "runs/demo/activations", "space": {"tree": TREES, "draft_vocab_size": [None, 512]},
        "questions": "runs/demo/questions.jsonl", "num_questions": 16, "output": str(output),
    }  # fmt: skip
    return validate(TuneDecodingConfig, values | changes)


def shape(
    drafter: str,
    tree: Mapping[str, Any],
    taus: Sequence[float],
    state: State = "finished",
    message: str | None = None,
    size: int | None = None,
    **changes: Any,
) -> Trial:
    """A trial that came to as many rungs as it has taus."""
    choices = {"drafter": drafter, "tree": dict(tree), "draft_vocab_size": size}
    rows = []
    for rung, tau in enumerate(taus):
        found = row(rung, tau, **changes) | {"rung_questions": QUESTIONS[rung], "num_prompts": QUESTIONS[rung]}
        rows.append(
            {key: value for key, value in found.items() if key not in ("rung_tokens", "training_tokens", "loss")}
        )
    return Trial(
        Combination.of(choices).name, choices, state, message, rows, Path("runs/s/trials") / folder_name(choices)
    )


def two_drafters() -> list[Trial]:
    """One drafter's best tree is clear; the other has one trial to the end, one that was stopped, one that failed."""
    chain, longer, wide = TREES
    return [
        shape("moa", chain, [1.9, 2.0, 2.0]), shape("moa", longer, [2.2, 2.3, 2.4]),
        shape("moa", wide, [2.9, 3.0, 3.1], cost=0.08), shape("moa", wide, [2.5], "stopped", size=512),
        shape("eagle", chain, [1.5, 1.6, 1.7], cost=0.3), shape("eagle", longer, [1.6], "stopped", cost=0.3),
        shape("eagle", wide, [], "failed", "its process died"),
    ]  # fmt: skip


def decoding_summary(
    trials: Sequence[Trial],
    sweep: TuneDecodingConfig | None = None,
    left_out: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """What a finished sweep leaves in summary.json: the finalists came to the same when they were measured again."""
    sweep = sweep or config_of()
    finalists = finalists_of(sweep, trials)
    figures = [one.last | {"answers": _answers(one.last)} for one in finalists]
    answers = answers_by_drafter(sweep, finalists, figures)
    return {
        "drafters": answers,
        "objective": sweep.objective,
        "between": between_drafters(sweep, answers, finalists, figures),
        "trials": [one.summary() for one in trials],
        "left_out": LEFT_OUT if left_out is None else left_out,
        "wall_seconds": 4000.0,
        "machine": {"cpu": "two cores", "gpus": []},
        "versions": {"python": "3.11"},
        "config": sweep.model_dump(mode="json"),
    }


def _answers(row: Mapping[str, Any]) -> list[list[float]]:
    """Of four prompts, not all alike."""
    return [[50, factor / row["speedup"], 1.0, 20, 20 * row["tau"] * factor] for factor in (0.9, 1.0, 1.0, 1.1)]


def write_decoding_sweep(output: Path, trials: Sequence[Trial], is_finished: bool = True, **changes: Any) -> None:
    """Leave it on disk, as `sweeps.tune_decoding` does."""
    sweep = config_of(output, **changes)
    write_run_yaml(output, sweep, None, {})
    write_trials(trials, output)
    write_json_atomically(output / "clock.json", {"seconds": 4000.0})
    write_json_atomically(output / PLAN_FILE, {"trials": {"moa": 6, "eagle": 5}, "questions": QUESTIONS})
    if is_finished:
        summary = decoding_summary(trials, sweep)
        write_json_atomically(output / "summary.json", summary)
        for name, answer in summary["drafters"].items():
            write_best(sweep, name, Combination.of({"drafter": name, **answer["winner"]}))
