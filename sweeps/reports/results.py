"""Computes the results of a sweep from the folders of its trials. Independent of Ray and of how trials are measured."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from moray.distill.tracking.metrics import read_metrics
from sweeps.reports.summaries import HowSure, Lead, RankAgreement, RankedFinalist, TrialSummary
from sweeps.tuning.configs import Objective
from sweeps.tuning.folders import TrialFolder, trial_folders
from sweeps.tuning.records import Figures, LastFigures, MeasuredFigures, State, TrialRow
from sweeps.tuning.spaces import Choices, label

_NUM_RESAMPLES = 2000
NO_LEAD: Lead = {"ahead_by": None, "ahead_interval": None, "stays_ahead": None}
"""The lead as long as there is nothing to compare with."""

Answers = Sequence[Sequence[float]]
"""Per prompt: tokens, seconds, seconds of plain decoding, cycles, tokens emitted by cycles (see `figures.Answer`)."""


def objective_of(name: Objective, answers: Answers) -> float:
    """Compute the objective over some answers."""
    tokens, seconds, plain, cycles, emitted = (sum(column) for column in zip(*answers, strict=True))
    figures = {
        "speedup": plain / seconds if seconds else 0.0,
        "tau": emitted / cycles if cycles else 0.0,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
    }
    return figures[name]


@dataclass(frozen=True)
class Trial:
    """One trial, as recorded in its folder."""

    name: str
    choices: Choices
    state: State
    message: str | None
    rows: list[TrialRow]
    folder: Path

    @property
    def last(self) -> LastFigures:
        """The figures on the highest rung that the trial has reached; empty if it has reached none."""
        return cast(LastFigures, self.rows[-1]) if self.rows else {}

    @property
    def training_tokens(self) -> int:
        """Tokens that the trial was trained on, including those after its last measurement."""
        reports = read_metrics(self.folder)
        return int(max(self.last.get("training_tokens", 0), reports[-1]["tokens"] if reports else 0))

    def summary(self) -> TrialSummary:
        """The trial as in summary.json."""
        figures = self.last.copy()
        figures.pop("answers", None)
        return {
            "name": self.name,
            "choices": self.choices,
            "state": self.state,
            "message": self.message,
            "training_tokens": self.training_tokens,
            "folder": str(self.folder),
            "figures": figures,
        }


def without_answers(figures: MeasuredFigures) -> Figures:
    """A copy of the figures alone."""
    return cast(Figures, {key: value for key, value in figures.items() if key != "answers"})


def read_trials(output: str) -> list[Trial]:
    """All trials that have begun, oldest first."""
    return [_read(folder) for folder in trial_folders(output)]


def _read(folder: TrialFolder) -> Trial:
    record = folder.record
    rows = sorted(folder.rows, key=lambda row: row["rung"])
    return Trial(label(record["choices"]), record["choices"], record["state"], record["message"], rows, folder.path)


def best_trials(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The best trials that were trained to the end, without those that were not lossless."""
    finished = [trial for trial in trials if trial.state == "finished" and trial.last.get("lossless") is not False]
    return sorted(finished, key=lambda trial: -trial.rows[-1]["objective"])[:count]


def first_message(trials: Sequence[Trial]) -> str:
    """The first trial's error message as the end of a sentence; empty if no trial has one."""
    bad = [trial for trial in trials if trial.message]
    return f"; the first of {len(bad)} that ended early: {bad[0].name}: {bad[0].message}" if bad else ""


@dataclass(frozen=True)
class Finalist:
    """One combination, trained from one or more seeds and measured side by side with the other finalists."""

    name: str
    choices: Choices
    seeds: dict[int, MeasuredFigures]
    """Figures by seed."""
    folders: dict[int, str]

    def objectives(self, name: Objective) -> list[float]:
        """The objective of each seed."""
        return [objective_of(name, figures["answers"]) for figures in self.seeds.values()]


def how_sure(finalists: Sequence[Finalist], objective: Objective) -> HowSure:
    """How far the best finalist is ahead of the second, and how often it stays ahead when prompts and seeds are
    resampled (paired bootstrap: both get the same prompts, because they were measured in turn)."""
    ranked = sorted(finalists, key=lambda finalist: -statistics.fmean(finalist.objectives(objective)))
    rows: list[RankedFinalist] = [
        {
            "name": finalist.name,
            "choices": finalist.choices,
            "mean": statistics.fmean(finalist.objectives(objective)),
            "spread": [min(finalist.objectives(objective)), max(finalist.objectives(objective))],
            "seeds": {str(seed): without_answers(figures) for seed, figures in finalist.seeds.items()},
        }
        for finalist in ranked
    ]
    if len(ranked) < 2:
        return {"finalists": rows, **NO_LEAD}
    gaps = _resampled_gaps(ranked[0], ranked[1], objective)
    return {
        "finalists": rows,
        "ahead_by": rows[0]["mean"] - rows[1]["mean"],
        "ahead_interval": [gaps[int(0.025 * len(gaps))], gaps[int(0.975 * len(gaps))]],
        "stays_ahead": sum(gap > 0 for gap in gaps) / len(gaps),
    }


def lead_of(sure: Lead) -> Lead:
    """The lead alone."""
    return {
        "ahead_by": sure["ahead_by"],
        "ahead_interval": sure["ahead_interval"],
        "stays_ahead": sure["stays_ahead"],
    }


def _resampled_gaps(first: Finalist, second: Finalist, objective: Objective) -> list[float]:
    rng = random.Random(0)  # fixed seed, so that the same measurements give the same result
    ours, theirs = (list(finalist.seeds.values()) for finalist in (first, second))
    num_prompts = len(ours[0]["answers"])
    gaps = []
    for _ in range(_NUM_RESAMPLES):
        prompts = rng.choices(range(num_prompts), k=num_prompts)
        means = [
            statistics.fmean(
                objective_of(objective, [figures["answers"][i] for i in prompts])
                for figures in rng.choices(seeds, k=len(seeds))
            )
            for seeds in (ours, theirs)
        ]
        gaps.append(means[0] - means[1])
    return sorted(gaps)


def rank_agreement(trials: Sequence[Trial]) -> list[RankAgreement]:
    """How well the ranking on each earlier rung predicted the ranking on the last one: Spearman's correlation over the
    trials that reached both. If trials were stopped early, these are only the best ones."""
    numbers = sorted({row["rung"] for trial in trials for row in trial.rows})
    found: list[RankAgreement] = []
    for number in numbers[:-1]:
        pairs = [
            (by_rung[number]["objective"], by_rung[numbers[-1]]["objective"], by_rung[number].get("rung_tokens"))
            for trial in trials
            if (by_rung := {row["rung"]: row for row in trial.rows}).keys() >= {number, numbers[-1]}
        ]
        early, final = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        found.append(
            {
                "rung": number,
                "rung_tokens": pairs[0][2] if pairs else None,
                "trials": len(pairs),
                "spearman": spearman(early, final),
                "same_best": bool(pairs) and early.index(max(early)) == final.index(max(final)),
            }
        )
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation; None for fewer than three pairs, or if all values of one side are equal."""
    if len(first) < 3:
        return None
    import pandas as pd

    value = float(pd.Series(first).rank().corr(pd.Series(second).rank()))
    return value if math.isfinite(value) else None


Figure = Callable[[LastFigures], float]
"""figure(row) returns one figure of a rung's measurement."""


def pareto(trials: Sequence[Trial], gain: Figure, cost: Figure) -> list[Trial]:
    """The Pareto front: trials that no other trial dominates in gain and cost, cheapest first."""
    measured = sorted((one for one in trials if one.rows), key=lambda one: (cost(one.last), -gain(one.last)))
    front: list[Trial] = []
    for trial in measured:
        if not front or gain(trial.last) > gain(front[-1].last):
            front.append(trial)
    return front
