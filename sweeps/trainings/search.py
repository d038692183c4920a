"""Runs the trials of a sweep of trainings, chosen from a grid, at random, or by Optuna."""

import random
from collections.abc import Sequence
from typing import Any

from moray.cluster.training.distill import free_workers
from sweeps.trainings.configs import SweepConfig
from sweeps.trainings.ladder import Rung
from sweeps.trainings.trial import run_trial
from sweeps.tuning.configs import GridSearch, OptunaSearch, RandomSearch
from sweeps.tuning.distinct import DistinctSearcher, Proposal
from sweeps.tuning.folders import trial_folders
from sweeps.tuning.spaces import (
    MAX_DRAWS,
    Choices,
    Space,
    Verdict,
    draw,
    draw_distinct,
    folder_name,
    from_text,
    grid,
    lies_in,
)
from sweeps.tuning.tuner import Plan, as_drawn, optuna_searcher, tune_listed, tune_proposed


def search(sweep: SweepConfig, rungs: Sequence[Rung], progress_actor: Any, concurrent: int) -> None:
    """Run all trials of the search; their folders record how each ended. Requires a Ray session."""
    plan = _plan(sweep, rungs, progress_actor, concurrent, sweep.ladder.reduction if sweep.ladder.stop else None)
    if isinstance(sweep.search, OptunaSearch):
        tune_proposed(plan, sweep.space, sweep.search.num_trials, _distinct(sweep, sweep.search))
    else:
        tune_listed(plan, listed_points(sweep.space, sweep.search))


def listed_points(space: Space, search: GridSearch | RandomSearch) -> list[Choices]:
    """The trials of a search that knows all of them before it begins, in their order."""
    if isinstance(search, RandomSearch):
        return draw_distinct(space, search.num_trials, random.Random(search.seed))
    points = list(grid(space))
    random.Random(0).shuffle(points)  # otherwise the scheduler would see the values of one key in sequence
    return points


def _distinct(sweep: SweepConfig, search: OptunaSearch) -> DistinctSearcher:
    """Optuna, informed of the trials that have begun; if it keeps repeating proposals, new ones are drawn at random."""
    begun = [folder.record["choices"] for folder in trial_folders(sweep.output)]
    begun = [choices for choices in begun if lies_in(choices, sweep.space)]
    known: set[str] = set()
    rng = random.Random(search.seed)

    def judge(proposal: Proposal) -> Verdict:
        name = folder_name(from_text(proposal))
        if name in known:
            return "again"
        known.add(name)
        return "new"

    def spare() -> Proposal | None:
        for _ in range(MAX_DRAWS):
            drawn = as_drawn(draw(sweep.space, rng), sweep.space)
            if judge(drawn) == "new":
                return drawn
        return None

    return DistinctSearcher(optuna_searcher(search, sweep.space, begun), judge, spare)


def train_all(sweep: SweepConfig, points: Sequence[Choices], last: Rung, progress_actor: Any, concurrent: int) -> None:
    """Train these points and measure them on the last rung only."""
    tune_listed(_plan(sweep, [last], progress_actor, concurrent, None), points)


def _plan(
    sweep: SweepConfig, rungs: Sequence[Rung], progress_actor: Any, concurrent: int, reduction: int | None
) -> Plan:
    config = sweep.model_dump_json()

    def run(choices: Choices) -> None:
        run_trial(choices, config, rungs, progress_actor)

    return Plan(
        output=sweep.output,
        run=run,
        size_key="rung_tokens",
        sizes=[rung.tokens for rung in rungs],
        reduction=reduction,
        concurrent=concurrent,
        max_failures=sweep.max_failures,
        tidy=free_workers,
    )
