"""Ray Tune, set up for a sweep: what is tried next, and who may go on.

Nothing of Tune's own state is needed to go on after a kill: trials tell again what lies in their folders, so a new
search meets the same results in the same order of choices.
"""

import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import ConcurrencyLimiter, Searcher
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch as RayOptunaSearch

from moray.cluster.distil import free_workers
from sweeps.configs import OptunaSearch, RandomSearch, SweepConfig
from sweeps.folders import TrialFolder, trial_folder, trial_folders
from sweeps.ladder import Rung
from sweeps.spaces import Choices, Range, from_text, grid, to_text
from sweeps.trial import run_trial

_METRIC, _TIME = "objective", "rung_tokens"
_TRIAL_CPUS = 0.01
"""Of the actor that only waits: Ray refuses 0."""
_CLEAR_SECONDS = 10.0
_GRID = "choices"
"""The one parameter of a search over a list: a whole combination, as JSON text."""


def search(sweep: SweepConfig, rungs: Sequence[Rung], board: Any, concurrent: int) -> None:
    """Run all trials of the search; their folders tell how each of them ended. Needs a Ray session."""
    if sweep.search.type == "grid":
        points = list(grid(sweep.space))
        random.Random(0).shuffle(points)  # else a scheduler would meet one key's values one after the other
        _tune(sweep, rungs, board, concurrent, *_listed(points, concurrent))
    elif isinstance(sweep.search, RandomSearch):
        generator = BasicVariantGenerator(max_concurrent=concurrent, random_state=sweep.search.seed)
        _tune(sweep, rungs, board, concurrent, _sampled(sweep), generator, sweep.search.num_trials)
    else:
        _tune(
            sweep,
            rungs,
            board,
            concurrent,
            _sampled(sweep),
            _optuna(sweep, sweep.search, concurrent),
            sweep.search.num_trials,
        )


def train_all(sweep: SweepConfig, points: Sequence[Choices], last: Rung, board: Any, concurrent: int) -> None:
    """Train and measure these, on the last rung alone."""
    without_stops = sweep.model_copy(update={"ladder": sweep.ladder.model_copy(update={"stop": False})})
    _tune(without_stops, [last], board, concurrent, *_listed(points, concurrent))


def _tune(
    sweep: SweepConfig,
    rungs: Sequence[Rung],
    board: Any,
    concurrent: int,
    space: dict[str, Any],
    searcher: Any,
    num_trials: int,
) -> None:
    storage = Path(sweep.output).absolute() / "ray"
    shutil.rmtree(storage / "tune", ignore_errors=True)  # of a search before: folders know better
    config = sweep.model_dump_json()

    def trial(params: dict[str, Any]) -> None:
        run_trial(_texts(params), config, rungs, board)

    tune.Tuner(
        tune.with_resources(trial, {"CPU": _TRIAL_CPUS}),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=_METRIC,
            mode="max",
            search_alg=searcher,
            scheduler=_scheduler(sweep, rungs),
            num_samples=num_trials,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(storage),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=sweep.max_failures),
            callbacks=[_Keeper(sweep.output)],
        ),
    ).fit()


class _Keeper(tune.Callback):
    """Notes in a trial's folder what Tune alone knows: that it was stopped, or has failed for good. Gives back what
    trials whose processes died had reserved, or others might wait for it for ever."""

    def __init__(self, output: str) -> None:
        self._output = output
        self._cleared = 0.0

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if time.monotonic() - self._cleared > _CLEAR_SECONDS:
            free_workers()
            self._cleared = time.monotonic()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._folder(trial).end("stopped")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        error = trial.get_error()
        self._folder(trial).end("failed", str(error).strip().splitlines()[-1] if error else "its process died")

    def _folder(self, trial: Any) -> TrialFolder:
        return trial_folder(self._output, from_text(_texts(trial.config)))


def _scheduler(sweep: SweepConfig, rungs: Sequence[Rung]) -> TrialScheduler:
    if not sweep.ladder.stop or len(rungs) == 1:
        return FIFOScheduler()
    return AsyncHyperBandScheduler(
        time_attr=_TIME,
        max_t=rungs[-1].tokens * 2,  # a trial that has come to the last rung ends by itself
        grace_period=rungs[0].tokens,
        reduction_factor=sweep.ladder.reduction,
    )


def _listed(points: Sequence[Choices], concurrent: int) -> tuple[dict[str, Any], BasicVariantGenerator, int]:
    texts = [json.dumps(to_text(choices)) for choices in points]
    return {_GRID: tune.grid_search(texts)}, BasicVariantGenerator(max_concurrent=concurrent), 1


def _texts(params: dict[str, Any]) -> dict[str, Any]:
    return json.loads(params[_GRID]) if _GRID in params else params


def _sampled(sweep: SweepConfig) -> dict[str, Any]:
    """The space as Tune draws from it."""
    space: dict[str, Any] = {}
    for key, dimension in sweep.space.items():
        if isinstance(dimension, Range):
            low, high = dimension.bounds
            drawn = {"uniform": tune.uniform, "loguniform": tune.loguniform}.get(dimension.type)
            space[key] = drawn(low, high) if drawn else tune.randint(int(low), int(high) + 1)
        else:
            space[key] = tune.choice([json.dumps(value) for value in dimension])
    return space


def _optuna(sweep: SweepConfig, search: OptunaSearch, concurrent: int) -> Searcher:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=search.seed, n_startup_trials=search.num_random)
    begun = [
        _as_drawn(folder, sweep)
        for folder in trial_folders(sweep.output)
        if folder.record["choices"].keys() == sweep.space.keys()  # else it confirms a winner
    ]
    searcher = RayOptunaSearch(metric=_METRIC, mode="max", sampler=sampler, points_to_evaluate=begun or None)
    return ConcurrencyLimiter(searcher, max_concurrent=concurrent)


def _as_drawn(folder: TrialFolder, sweep: SweepConfig) -> dict[str, Any]:
    """A trial's choices as the searcher had proposed them."""
    choices = folder.record["choices"]
    return {
        key: choices[key] if isinstance(dimension, Range) else json.dumps(choices[key])
        for key, dimension in sweep.space.items()
    }
