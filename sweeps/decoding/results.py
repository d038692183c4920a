"""Computes the results of a sweep over decoding choices from trials and the final measurement, and writes its files.

This module does not depend on how the results are shown.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml

from moray.activations.format.store import CacheStore
from moray.activations.reading.token_counts import token_counts
from moray.bench.spread import ratio_interval
from moray.drafters.checkpoint import load_drafter, read_contract, save_drafter
from moray.provenance import RUN_FILE, write_text_atomically
from moray.targets.head import TargetHead
from moray.text import ChatTokenizer
from sweeps.decoding.combinations import Combination
from sweeps.decoding.configs import TuneDecodingConfig
from sweeps.decoding.summaries import Between, DrafterAnswer
from sweeps.reports.results import Finalist, Trial, how_sure, lead_of, read_trials, without_answers
from sweeps.tuning.configs import Objective
from sweeps.tuning.records import LastFigures, MeasuredFigures

PLAN_FILE = "plan.json"
"""File with the planned number of trials per drafter (`trials`) and of questions per rung (`questions`)."""

_COMMAND = "python -m pipelines.evaluate TARGET.yaml EVALUATION.yaml {path}"


def read_shapes(output: str) -> list[Trial]:
    """All trials that have begun, oldest first, named after their combinations."""
    return [replace(trial, name=Combination.of(trial.choices).name) for trial in read_trials(output)]


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Sort trials by the highest rung reached, then by objective; those without figures come last."""

    def merit(trial: Trial) -> tuple[int, float]:
        return trial.last.get("rung", -1), trial.last.get("objective") or 0.0

    return sorted(trials, key=merit, reverse=True)


def finalists_of(sweep: TuneDecodingConfig, trials: Sequence[Trial]) -> list[Trial]:
    """The best few trials of every drafter, by rung reached and then by objective. Stopped trials may be included,
    because finalists are asked all questions again; trials that were not lossless are excluded."""
    found = []
    for name in sweep.folders:
        able = [
            one
            for one in trials
            if one.choices["drafter"] == name
            and one.state in ("finished", "stopped")
            and one.rows
            and one.last.get("lossless") is not False
        ]
        found += sorted(ranked(able)[: sweep.confirm.finalists], key=lambda one: one.name)  # in a stable order
    return found


def answers_by_drafter(
    sweep: TuneDecodingConfig, trials: Sequence[Trial], figures: Sequence[MeasuredFigures]
) -> dict[str, DrafterAnswer]:
    """The winner of every drafter and how certain its lead is, as in summary.json; the best drafter first.

    Args:
        sweep: provides the objective.
        trials: the finalists.
        figures: the figures of each finalist, measured side by side.
    """
    found: dict[str, DrafterAnswer] = {}
    for name in sweep.folders:
        rows = {
            trial.name: (trial, figure)
            for trial, figure in zip(trials, figures, strict=True)
            if trial.choices["drafter"] == name
        }
        if not rows:
            continue
        finalists = [_finalist(trial, figure) for trial, figure in rows.values()]
        sure = how_sure(finalists, sweep.objective)
        trial, figure = rows[sure["finalists"][0]["name"]]
        found[name] = {
            "winner": Combination.of(trial.choices).decoding,
            "name": trial.name,
            "objective": sure["finalists"][0]["mean"],
            "spread": spread_of(sweep.objective, figure),
            "figures": without_answers(figure),
            **lead_of(sure),
            "finalists": [
                {
                    "name": row["name"],
                    "choices": Combination.of(row["choices"]).decoding,
                    "objective": row["mean"],
                    "spread": spread_of(sweep.objective, rows[row["name"]][1]),
                    "figures": row["seeds"]["0"],
                }
                for row in sure["finalists"]
            ],
            "evaluate": str(_best_file(sweep, name)),
        }
    return dict(sorted(found.items(), key=lambda item: -item[1]["objective"]))


def between_drafters(
    sweep: TuneDecodingConfig,
    answers: Mapping[str, DrafterAnswer],
    trials: Sequence[Trial],
    figures: Sequence[MeasuredFigures],
) -> Between | None:
    """Which drafter is best, each with its winner, and how certain that is; None if there is only one drafter."""
    if len(answers) < 2:
        return None
    names = {answer["name"] for answer in answers.values()}
    winners = [_finalist(trial, figure) for trial, figure in zip(trials, figures, strict=True) if trial.name in names]
    sure = how_sure(winners, sweep.objective)
    first, second = (row["choices"]["drafter"] for row in sure["finalists"][:2])
    return {"best": first, "second": second, **lead_of(sure)}


def spread_of(objective: Objective, figures: MeasuredFigures | LastFigures) -> list[float] | None:
    """95 % interval of the objective by bootstrap over prompts; None if unknown."""
    if objective == "tokens_per_second":
        found = ratio_interval([(tokens, seconds) for tokens, seconds, *_ in figures.get("answers", ())])
    else:
        found = figures.get("speedup_spread" if objective == "speedup" else "tau_spread")
    return None if found is None else list(found)


def write_best(sweep: TuneDecodingConfig, drafter: str, combination: Combination) -> Path:
    """Write `best-<drafter>.yaml`, to append to the files of pipelines.evaluate in order to measure the winner.

    If the winner reduces the draft vocabulary, also save the reduced drafter, so that other commands can use it.
    """
    output = Path(sweep.output)
    folder = sweep.folders[drafter]
    if combination.draft_vocab_size is not None:
        folder = str(_restricted(sweep, combination, output / "best" / drafter))
    path = _best_file(sweep, drafter)
    values = {
        "drafters": [folder],
        "trees": [combination.tree.model_dump(mode="json", exclude_none=True)],
        "output": str(output / "evaluations" / drafter),
    }
    text = yaml.safe_dump(values, sort_keys=False, width=110, default_flow_style=None)
    write_text_atomically(path.absolute(), f"# {_COMMAND.format(path=path)}\n{text}")
    return path


def _best_file(sweep: TuneDecodingConfig, drafter: str) -> Path:
    return Path(sweep.output) / f"best-{drafter}.yaml"


def _restricted(sweep: TuneDecodingConfig, combination: Combination, folder: Path) -> Path:
    """Save a drafter with the winning draft vocabulary."""
    assert sweep.activations is not None
    assert combination.draft_vocab_size is not None
    source = Path(sweep.folders[combination.drafter])
    text = ChatTokenizer.load(sweep.target.model, sweep.target.template).fingerprint
    here = sweep.target.model_copy(update={"device": "cpu"})
    drafter = load_drafter(source, TargetHead.load(here, read_contract(source).drafter.num_target_layers), text)
    counts = token_counts(CacheStore(sweep.activations), drafter.spec.vocab_size)
    drafter.restrict_vocabulary(torch.from_numpy(counts), combination.draft_vocab_size)
    save_drafter(folder.absolute(), drafter, text)
    for name in ("metrics.jsonl", RUN_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return folder


def _finalist(trial: Trial, figures: MeasuredFigures) -> Finalist:
    return Finalist(trial.name, trial.choices, {0: figures}, {0: str(trial.folder)})
