"""One trial: a distillation that climbs the ladder and is measured at each rung. Runs in a Ray Tune actor.

Each rung is a separate Ray Train run that continues from the checkpoint of the one before. Between two rungs, while the
scheduler decides, a trial holds no resources. A trial that is stopped there therefore leaves no worker group behind,
and trials cannot deadlock waiting for each other's CPUs. Measurements are stored in the trial's folder and reported
again after any kind of crash (see `sweeps.tuning.folders`).
"""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray import tune

from moray.cluster.errors import own_errors
from moray.cluster.progress_actor import ProgressActor
from moray.cluster.training.configs import DistillConfig
from moray.cluster.training.distill import hand_out, train_until
from moray.cluster.training.resume import with_recorded_precision
from moray.cluster.training.worker import checkpoint_step, open_run_trackers
from moray.distill.finite import NONFINITE_FILE
from moray.distill.tracking.metrics import read_metrics
from moray.errors import DataError, MorayError, UnreachableError
from sweeps.trainings.break_even import break_even_of
from sweeps.trainings.configs import SweepConfig
from sweeps.trainings.ladder import Rung, steps_at
from sweeps.trainings.measure import measure
from sweeps.tuning.folders import ENDED, TrialFolder, trial_folder
from sweeps.tuning.records import MeasuredFigures, TrialRow
from sweeps.tuning.spaces import Choices

_DRIVER = "DEFAULT"
"""Scheduling strategy outside the placement group of Tune's actor, which has no room for anything else."""


def run_trial(choices: Choices, config: str, rungs: Sequence[Rung], progress_actor: Any) -> None:
    """Climb the ladder and report each rung to Ray Tune, until Tune stops this process or the last rung is done.

    Our own errors end the trial and are recorded in its folder; errors of the machine are raised, so that Tune retries.

    Args:
        choices: the trial's choices.
        config: the sweep's configuration as JSON.
        rungs: the rungs of the ladder.
        progress_actor: the sweep's progress actor.
    """
    sweep = SweepConfig.model_validate_json(config)
    folder = trial_folder(sweep.output, choices)
    has_ended = folder.state in ENDED
    if not has_ended:
        folder.begin(choices)
    known = {row["rung"]: row for row in folder.rows}
    reason = None if has_ended or known else reason_not_to_train(sweep, choices)
    if reason is not None:
        folder.end("stopped", reason)
        return
    for rung in rungs:
        row = known.get(rung.number)
        if row is None and has_ended:
            return
        if row is None:
            try:
                row = _climb(sweep, sweep.trial(choices, str(folder.path)), folder, (rung, rungs[-1]), progress_actor)
            except UnreachableError:  # may be temporary: let Tune retry
                raise
            except MorayError as error:
                folder.end("diverged" if (folder.path / NONFINITE_FILE).is_file() else "failed", str(error))
                return
        if rung == rungs[-1]:
            folder.end("finished")
        reason = None if has_ended or rung == rungs[-1] else reason_to_stop(sweep, row)
        if reason is not None:
            folder.end("stopped", reason)
        tune.report({key: value for key, value in row.items() if key != "answers"})
        if reason is not None:
            return


def reason_not_to_train(sweep: SweepConfig, choices: Choices) -> str | None:
    """Why a trial cannot break even, even if every draft token is accepted; None if it can."""
    if sweep.stop_below_break_even is None:
        return None
    needed, most = break_even_of(sweep, sweep.trial(choices)), sweep.decoding.tree.depth + 1
    if needed < most:
        return None
    return (
        f"not trained: its tau to break even is {needed:.2f}, and decoding.tree gives at most {most} tokens per cycle; "
        "give a deeper tree or a cheaper drafter"
    )


def reason_to_stop(sweep: SweepConfig, row: TrialRow) -> str | None:
    """Why a measured trial is too far below its tau to break even to continue; None if it is not."""
    needed, tau = row.get("break_even_tau"), row.get("tau")
    if sweep.stop_below_break_even is None or needed is None or tau is None:
        return None
    if tau >= sweep.stop_below_break_even * needed:
        return None
    return (
        f"tau is {tau:.2f} after {row.get('training_tokens', 0):,} training tokens, below "
        f"{sweep.stop_below_break_even:.0%} (stop_below_break_even) of its tau to break even, {needed:.2f}"
    )


def _climb(
    sweep: SweepConfig, config: DistillConfig, folder: TrialFolder, rungs: tuple[Rung, Rung], sweep_progress: Any
) -> TrialRow:
    """Train up to the first of the two rungs and measure there; the second is the last rung of the ladder."""
    begin = time.time()
    rung, last = rungs
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"max_steps": steps_at(last.tokens, config)})}
    )
    progress_actor: Any = ProgressActor.options(num_cpus=0, scheduling_strategy=_DRIVER).remote()  # type: ignore[attr-defined]
    sweep_progress.watch.remote(folder.path.name, progress_actor, rung.number)
    try:
        checkpoint = train_until(config, steps_at(rung.tokens, config), progress_actor)
        hand_out(checkpoint, folder.path)
        config = with_recorded_precision(config)
        trained = read_metrics(folder.path)[-1]
        sweep_progress.watch.remote(folder.path.name, None, rung.number)
        figures = measure_on_ray(sweep, config, (str(folder.path),))[folder.path.name]
        objective = figures.get(sweep.objective)
        if objective is None:
            raise DataError(f"{sweep.objective} is not known, for all answers are one token long: give other questions")
        row: TrialRow = {
            "rung": rung.number,
            "rung_tokens": rung.tokens,
            "step": checkpoint_step(checkpoint),
            "training_tokens": int(trained["tokens"]),
            "training_seconds": float(trained["seconds"]),
            "loss": trained["loss"],
            "simulated_tau": trained["simulated_tau"],
            **figures,
            "objective": objective,
            "seconds": time.time() - begin,
        }
        if sweep.stop_below_break_even is not None:
            row["break_even_tau"] = break_even_of(sweep, config)
        folder.add(row)
        _track(config, folder, progress_actor, row)
    finally:
        ray.kill(progress_actor)
        sweep_progress.forget.remote(folder.path.name)
    return row


def _track(config: DistillConfig, folder: TrialFolder, progress_actor: Any, row: TrialRow) -> None:
    """Write the measured figures to the run's trackers and its TensorBoard."""
    from moray.distill.tracking.sinks import TensorBoard

    values = {name: row.get(name) for name in ("tau", "speedup", "tokens_per_second", "objective")}
    figures = {f"sweep/{name}": float(value) for name, value in values.items() if value is not None}
    for sink in [TensorBoard(folder.path / "tensorboard"), *open_run_trackers(config, folder.path, progress_actor)]:
        sink.write(row.get("step", 0), figures)
        sink.close()


def decoding_gpus(sweep: SweepConfig, config: DistillConfig) -> float:
    """The number of GPUs of a measurement."""
    given = sweep.decoding.gpus
    return config.workers.resources.get("GPU", 0.0) if given is None else given


def measure_on_ray(sweep: SweepConfig, config: DistillConfig, folders: tuple[str, ...]) -> dict[str, MeasuredFigures]:
    """Measure the drafters in some folders in a task with its own resources; returns figures by folder name."""
    decoding = sweep.decoding
    gpus = decoding_gpus(sweep, config)
    task: Any = ray.remote(measure).options(num_cpus=decoding.cpus, num_gpus=gpus, scheduling_strategy=_DRIVER)
    evaluation = decoding.evaluation(config.target, folders).model_dump_json()
    with own_errors():
        found: Any = ray.get(task.remote(evaluation, gpus, decoding.rounds, decoding.batch_size))
    return found
