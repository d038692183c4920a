"""Sets up Ray Tune for trials that climb a ladder and store their measurements in folders.

Resuming does not need Tune's own state: trials report the measurements in their folders again, so that a new search
sees the same results for the same order of choices. This module does not depend on what a trial does.
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
from sweeps.tuning.distinct import Proposal
from sweeps.tuning.folders import TrialFolder, trial_folder
from sweeps.tuning.spaces import Choices, Range, Space, from_text, to_text

METRIC = "objective"
WAITING_CPUS = 0.01
"""CPUs of an actor that only waits; Ray does not accept 0."""
_TIDY_SECONDS = 10.0
_LISTED = "choices"
"""The only parameter of a search over a list; it holds a whole combination as JSON text."""


@dataclass(frozen=True)
class Plan:
    """How to run trials, independent of what they do."""

    output: str
    """Folder of the sweep."""
    run: Callable[[Choices], None]
    """run(choices) climbs all rungs and reports each to Tune with `METRIC` and `size_key`; Tune may stop it there."""
    size_key: str
    sizes: Sequence[int]
    """Sizes of the rungs, ascending."""
    reduction: int | None
    """The best 1 / reduction of the trials on a rung continue; None lets all continue."""
    concurrent: int
    max_failures: int
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": WAITING_CPUS})
    """Resources of a trial's own process, which by default only waits for others."""
    reuse: bool = False
    """Whether a process runs the next trial after its own has ended."""
    tidy: Callable[[], object] | None = None
    """Called regularly to release what trials with dead processes had reserved; otherwise other trials might wait for
    it forever."""
    choices: Callable[[Choices], Choices] = dict
    """choices(drawn) returns the choices that a trial's folder is named after."""


def tune_listed(plan: Plan, points: Sequence[Choices]) -> None:
    """Try these points in order. Like everything here, it requires a Ray session."""
    texts = [json.dumps(to_text(choices)) for choices in points]
    _tune(plan, {_LISTED: tune.grid_search(texts)}, BasicVariantGenerator(max_concurrent=plan.concurrent), 1)


def tune_proposed(plan: Plan, space: Space, num_trials: int, searcher: Searcher) -> None:
    """Try `num_trials` points that a searcher proposes."""
    _tune(plan, _sampled(space), ConcurrencyLimiter(searcher, max_concurrent=plan.concurrent), num_trials)


def _tune(plan: Plan, space: dict[str, Any], searcher: Any, num_trials: int) -> None:
    storage = Path(plan.output).absolute() / "ray"
    shutil.rmtree(storage / "tune", ignore_errors=True)  # state of an earlier search; the trial folders replace it
    run = plan.run

    def trial(params: Proposal) -> None:
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
    """Records in a trial's folder what only Tune knows: that it was stopped, or has failed for good."""

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
        max_t=plan.sizes[-1] * 2,  # never reached: a trial ends by itself on the last rung
        grace_period=plan.sizes[0],
        reduction_factor=plan.reduction,
    )


def _chosen(params: Proposal) -> Choices:
    return from_text(json.loads(params[_LISTED]) if _LISTED in params else params)


def _sampled(space: Space) -> dict[str, Any]:
    """The space in Tune's terms."""
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
    """Create an Optuna searcher that first proposes the trials that have already begun."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=search.seed, n_startup_trials=search.num_random)
    points = [as_drawn(choices, space) for choices in begun]
    return RayOptunaSearch(metric=METRIC, mode="max", sampler=sampler, points_to_evaluate=points or None)


def as_drawn(choices: Choices, space: Space) -> Proposal:
    """Convert choices to the form in which a searcher draws them from the space."""
    return {key: choices[key] if isinstance(d, Range) else json.dumps(choices[key]) for key, d in space.items()}
