"""What a sweep tries next, and in what order: a grid, draws, or Optuna's proposals."""

import random
from collections.abc import Sequence
from typing import Any

from moray.cluster.distil import free_workers
from sweeps.configs import RandomSearch, SweepConfig
from sweeps.folders import trial_folders
from sweeps.ladder import Rung
from sweeps.spaces import Choices, grid
from sweeps.trial import run_trial
from sweeps.tuner import Plan, optuna_searcher, tune_listed, tune_proposed, tune_random


def search(sweep: SweepConfig, rungs: Sequence[Rung], board: Any, concurrent: int) -> None:
    """Run all trials of the search; their folders tell how each of them ended. Needs a Ray session."""
    plan = _plan(sweep, rungs, board, concurrent, sweep.ladder.reduction if sweep.ladder.stop else None)
    if sweep.search.type == "grid":
        points = list(grid(sweep.space))
        random.Random(0).shuffle(points)  # else a scheduler would meet one key's values one after the other
        tune_listed(plan, points)
    elif isinstance(sweep.search, RandomSearch):
        tune_random(plan, sweep.space, sweep.search.num_trials, sweep.search.seed)
    else:
        begun = [folder.record["choices"] for folder in trial_folders(sweep.output)]
        begun = [choices for choices in begun if choices.keys() == sweep.space.keys()]  # others confirm a winner
        tune_proposed(plan, sweep.space, sweep.search.num_trials, optuna_searcher(sweep.search, sweep.space, begun))


def train_all(sweep: SweepConfig, points: Sequence[Choices], last: Rung, board: Any, concurrent: int) -> None:
    """Train and measure these, on the last rung alone."""
    tune_listed(_plan(sweep, [last], board, concurrent, None), points)


def _plan(sweep: SweepConfig, rungs: Sequence[Rung], board: Any, concurrent: int, reduction: int | None) -> Plan:
    config = sweep.model_dump_json()

    def run(choices: Choices) -> None:
        run_trial(choices, config, rungs, board)

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
