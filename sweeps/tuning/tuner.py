"""Ray Tune, set up for trials that climb a ladder and keep what they measure in folders.

Nothing of Tune's own state is needed to go on after a kill: trials tell again what lies in their folders, so a new
search meets the same results in the same order of choices. This module refuses to know what a trial does.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import ConcurrencyLimiter, Searcher
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch as RayOptunaSearch

from sweeps.tuning.configs import OptunaSearch
from sweeps.tuning.folders import TrialFolder, trial_folder
from sweeps.tuning.spaces import Choices, Range, Space, from_text, to_text

METRIC = "objective"
WAITING_CPUS = 0.01
"""Of an actor that only waits: Ray refuses 0."""
_TIDY_SECONDS = 10.0
_LISTED = "choices"
"""The one parameter of a search over a list: a whole combination, as JSON text."""


@dataclass(frozen=True)
class Plan:
    """How trials are run, whatever they do."""

    output: str
    """Folder of the sweep."""
    run: Callable[[Choices], None]
    """run(choices): climb all rungs, and report each to Tune with `METRIC` and `size_key`; may be stopped there."""
    size_key: str
    sizes: Sequence[int]
    """How large the rungs are: they grow."""
    reduction: int | None
    """The best 1 / reduction of a rung go on; None: all do."""
    concurrent: int
    max_failures: int
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": WAITING_CPUS})
    """Of a trial's own process; by default it waits for others."""
    reuse: bool = False
    """A process that has ended its trial takes the next one."""
    tidy: Callable[[], object] | None = None
    """Called now and then: gives back what trials whose processes died had reserved, or others might wait for it for
    ever."""
    choices: Callable[[dict[str, Any]], Choices] = dict
    """choices(drawn): what a trial's folder is named by."""


def tune_listed(plan: Plan, points: Sequence[Choices]) -> None:
    """Try these, one after the other. Needs a Ray session, as all here."""
    texts = [json.dumps(to_text(choices)) for choices in points]
    _tune(plan, {_LISTED: tune.grid_search(texts)}, BasicVariantGenerator(max_concurrent=plan.concurrent), 1)


def tune_proposed(plan: Plan, space: Space, num_trials: int, searcher: Searcher) -> None:
    """Try so many that a searcher proposes."""
    _tune(plan, _sampled(space), ConcurrencyLimiter(searcher, max_concurrent=plan.concurrent), num_trials)


def _tune(plan: Plan, space: dict[str, Any], searcher: Any, num_trials: int) -> None:
    storage = Path(plan.output).absolute() / "ray"
    shutil.rmtree(storage / "tune", ignore_errors=True)  # of a search before: folders know better
    run = plan.run

    def trial(params: dict[str, Any]) -> None:
        run(_chosen(params))

    tune.Tuner(
        tune.with_resources(trial, dict(plan.resources)),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max",
            search_alg=searcher,
            scheduler=_scheduler(plan),
            num_samples=num_trials,
            reuse_actors=plan.reuse,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(storage),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=plan.max_failures),
            callbacks=[_Keeper(plan)],
        ),
    ).fit()


class _Keeper(tune.Callback):
    """Notes in a trial's folder what Tune alone knows: that it was stopped, or has failed for good."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tidied = 0.0

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self._plan.tidy is not None and time.monotonic() - self._tidied > _TIDY_SECONDS:
            self._plan.tidy()
            self._tidied = time.monotonic()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._folder(trial).end("stopped")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        error = trial.get_error()
        self._folder(trial).end("failed", str(error).strip().splitlines()[-1] if error else "its process died")

    def _folder(self, trial: Any) -> TrialFolder:
        return trial_folder(self._plan.output, self._plan.choices(_chosen(trial.config)))


def _scheduler(plan: Plan) -> TrialScheduler:
    if plan.reduction is None or len(plan.sizes) == 1:
        return FIFOScheduler()
    return AsyncHyperBandScheduler(
        time_attr=plan.size_key,
        max_t=plan.sizes[-1] * 2,  # a trial that has come to the last rung ends by itself
        grace_period=plan.sizes[0],
        reduction_factor=plan.reduction,
    )


def _chosen(params: dict[str, Any]) -> dict[str, Any]:
    return from_text(json.loads(params[_LISTED]) if _LISTED in params else params)


def _sampled(space: Space) -> dict[str, Any]:
    """The space as Tune draws from it."""
    found: dict[str, Any] = {}
    for key, dimension in space.items():
        if isinstance(dimension, Range):
            low, high = dimension.bounds
            drawn = {"uniform": tune.uniform, "loguniform": tune.loguniform}.get(dimension.type)
            found[key] = drawn(low, high) if drawn else tune.randint(int(low), int(high) + 1)
        else:
            found[key] = tune.choice([json.dumps(value) for value in dimension])
    return found


def optuna_searcher(search: OptunaSearch, space: Space, begun: Sequence[Choices]) -> Searcher:
    """Optuna, which proposes first what has begun already."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=search.seed, n_startup_trials=search.num_random)
    points = [as_drawn(choices, space) for choices in begun]
    return RayOptunaSearch(metric=METRIC, mode="max", sampler=sampler, points_to_evaluate=points or None)


def as_drawn(choices: Choices, space: Space) -> dict[str, Any]:
    """Choices as a searcher would have drawn them from the space."""
    return {key: choices[key] if isinstance(d, Range) else json.dumps(choices[key]) for key, d in space.items()}
