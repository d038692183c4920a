"""What a sweep tries next, and in what order: a grid, draws, or Optuna's proposals."""

import random
from collections.abc import Sequence
from typing import Any

from ray.tune.search.basic_variant import BasicVariantGenerator

from sweeps.configs import RandomSearch, SweepConfig
from sweeps.folders import trial_folders
from sweeps.ladder import Rung
from sweeps.spaces import Choices, grid
from sweeps.trial import run_trial
from sweeps.tuner import Plan, optuna_searcher, tune_drawn, tune_listed


def search(sweep: SweepConfig, rungs: Sequence[Rung], board: Any, concurrent: int) -> None:
    """Run all trials of the search; their folders tell how each of them ended. Needs a Ray session."""
    plan = _plan(sweep, rungs, board, concurrent, sweep.ladder.reduction if sweep.ladder.stop else None)
    if sweep.search.type == "grid":
        points = list(grid(sweep.space))
        random.Random(0).shuffle(points)  # else a scheduler would meet one key's values one after the other
        tune_listed(plan, points)
    elif isinstance(sweep.search, RandomSearch):
        generator = BasicVariantGenerator(random_state=sweep.search.seed)
        tune_drawn(plan, sweep.space, generator, sweep.search.num_trials)
    else:
        begun = [folder.record["choices"] for folder in trial_folders(sweep.output)]
        tune_drawn(plan, sweep.space, optuna_searcher(sweep.search, sweep.space, begun), sweep.search.num_trials)


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
    )
