"""Runs a sweep over decoding choices: check, search, confirm the winners, report. Requires a Ray session."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from moray.cluster.errors import own_errors
from moray.errors import ConfigError, DataError
from moray.progress import Progress
from moray.provenance import machine, versions, write_json_atomically
from sweeps.decoding.check import concurrency, fingerprints, limits_of, num_questions, sizes_of
from sweeps.decoding.combinations import Combination, Limits, Listing, combine, draw_another, drawn, listed
from sweeps.decoding.configs import TuneDecodingConfig
from sweeps.decoding.report import write_decoding
from sweeps.decoding.results import (
    PLAN_FILE,
    answers_by_drafter,
    between_drafters,
    finalists_of,
    read_shapes,
    write_best,
)
from sweeps.decoding.summaries import DecodingSummary, PlanFile
from sweeps.decoding.trial import measure_together, run_shape
from sweeps.reports.results import Trial, first_message
from sweeps.tuning.configs import OptunaSearch, RandomSearch
from sweeps.tuning.distinct import DistinctSearcher, Proposal
from sweeps.tuning.folders import TrialFolder, trial_folders
from sweeps.tuning.progress import SweepProgressActor, follow_sweep
from sweeps.tuning.records import MeasuredFigures
from sweeps.tuning.resume import alone, begin_or_resume_sweep, is_done, running_clock, seconds_run
from sweeps.tuning.spaces import Choices, from_text, lies_in
from sweeps.tuning.tuner import Plan, as_drawn, optuna_searcher, tune_listed, tune_proposed


def run_decoding(sweep: TuneDecodingConfig, console: Console) -> DecodingSummary:
    """Run or resume a sweep; returns the contents of summary.json.

    Raises:
        ConfigError, DataError, MismatchError: a check failed; nothing has been started.
        DataError: no trial produced a usable measurement.
    """
    output = Path(sweep.output).absolute()
    limits = limits_of(sweep)
    sizes = sizes_of(sweep.ladder, num_questions(sweep, sweep.num_questions))
    listings = {name: _listing(sweep, one) for name, one in limits.items()}
    if not isinstance(sweep.search, OptunaSearch) and not any(one.combinations for one in listings.values()):
        reasons = "; ".join(f"{name}: {one.why()}" for name, one in listings.items())
        raise ConfigError(f"nothing is left of the space: {reasons}")
    concurrent = concurrency(sweep)
    progress_actor: Any = SweepProgressActor.options(num_cpus=0).remote()  # type: ignore[attr-defined]
    with alone(output):
        begin_or_resume_sweep(output, _recorded(sweep), fingerprints(sweep))
        with running_clock(output):
            planned = {name: num_planned(sweep, one, name) for name, one in listings.items()}
            plan: PlanFile = {"trials": planned, "questions": sizes}
            write_json_atomically(output / PLAN_FILE, plan)
            total = sum(_total(sweep, one) for one in listings.values())
            console.print(
                f"{total} ways to decode, {concurrent} measured at a time, with {', '.join(map(str, sizes))} questions",
                highlight=False,
            )
            with follow_sweep(progress_actor, sweep.output, sum(planned.values()), sweep.objective):
                for name, listing in listings.items():
                    _search(sweep, limits[name], listing, _plan(sweep, limits[name], sizes, progress_actor, concurrent))
            for name, listing in listings.items():
                if listing.left_out:
                    text = f"{name}: left out {listing.left_out.total()} combinations: {listing.why()}"
                    console.print(text, markup=False, highlight=False)
            trials = read_shapes(sweep.output)
            finalists = finalists_of(sweep, [one for one in trials if not _is_left(sweep, listings, one)])
            if not finalists:
                why = first_message(trials)
                raise DataError(f"no trial of '{output}' finished with the target's own text{why}")
            figures = _confirm(sweep, finalists, console)
        return _write(sweep, listings, finalists, figures, output)


def is_complete(sweep: TuneDecodingConfig) -> bool:
    """Whether the sweep is done. An unfinished sweep is refused unless `resume` is set.

    Raises:
        MismatchError: the folder holds another sweep.
        ConfigError: the folder holds an unfinished sweep, and `resume` is not set.
    """
    return is_done(Path(sweep.output), _recorded(sweep), lambda: fingerprints(sweep), sweep.resume)


def _listing(sweep: TuneDecodingConfig, limits: Limits) -> Listing:
    if isinstance(sweep.search, RandomSearch):
        return drawn(sweep.space, limits, sweep.search.num_trials, sweep.search.seed)
    return Listing() if isinstance(sweep.search, OptunaSearch) else listed(sweep.space, limits)


def _total(sweep: TuneDecodingConfig, listing: Listing) -> int:
    return sweep.search.num_trials if isinstance(sweep.search, OptunaSearch) else len(listing.combinations)


def num_planned(sweep: TuneDecodingConfig, listing: Listing, drafter: str) -> int:
    """The number of trials of a drafter, or its maximum if a searcher proposes them. Includes trials that began before
    the sweep was resumed with another space."""
    own = [one for one in read_shapes(sweep.output) if one.choices["drafter"] == drafter]
    return _total(sweep, listing) + sum(_is_left(sweep, {drafter: listing}, one) for one in own)


def _is_left(sweep: TuneDecodingConfig, listings: Mapping[str, Listing], trial: Trial) -> bool:
    """Whether the trial is left over from an earlier space and is not part of the current one."""
    if isinstance(sweep.search, OptunaSearch):
        return not lies_in(_drawn(TrialFolder(trial.folder)), sweep.space)
    listing = listings.get(trial.choices["drafter"], Listing())
    return trial.choices not in [one.choices for one in listing.combinations]


def _drawn(folder: TrialFolder) -> Choices:
    """The searcher's proposal for a trial."""
    record = folder.record
    return record.get("drawn", record["choices"])


def _plan(
    sweep: TuneDecodingConfig, limits: Limits, sizes: Sequence[int], progress_actor: Any, concurrent: int
) -> Plan:
    config = sweep.model_dump_json()

    def run(choices: Choices) -> None:
        run_shape(choices, config, limits, sizes, progress_actor)

    return Plan(
        output=sweep.output,
        run=run,
        size_key="rung_questions",
        sizes=sizes,
        reduction=sweep.ladder.reduction if sweep.ladder.stop else None,
        concurrent=concurrent,
        max_failures=sweep.max_failures,
        resources={"CPU": sweep.cpus} | ({"GPU": sweep.gpus} if sweep.gpus else {}),
        reuse=True,
        choices=lambda choices: combine(choices, limits).choices,
    )


def _search(sweep: TuneDecodingConfig, limits: Limits, listing: Listing, plan: Plan) -> None:
    """Search the best ways to decode with one drafter; each drafter is searched separately."""
    if isinstance(sweep.search, OptunaSearch):
        folders = trial_folders(sweep.output)
        begun = [_drawn(folder) for folder in folders if folder.record["choices"]["drafter"] == limits.name]
        begun = [choices for choices in begun if lies_in(choices, sweep.space)]  # drop those of an earlier space
        inner = optuna_searcher(sweep.search, sweep.space, begun)

        rng = random.Random(sweep.search.seed)

        def spare() -> Proposal | None:
            another = draw_another(sweep.space, limits, listing, rng)
            return None if another is None else as_drawn(another, sweep.space)

        searcher = DistinctSearcher(inner, lambda proposal: listing.add(from_text(proposal), limits), spare)
        tune_proposed(plan, sweep.space, sweep.search.num_trials, searcher)
    elif listing.combinations:
        points = [one.choices for one in listing.combinations]
        random.Random(0).shuffle(points)  # otherwise the scheduler would see the values of one key in sequence
        tune_listed(plan, points)


def _confirm(sweep: TuneDecodingConfig, finalists: list[Trial], console: Console) -> list[MeasuredFigures]:
    """Measure the finalists of all drafters side by side, with nothing else running."""
    points = [trial.choices for trial in finalists]
    count = num_questions(sweep, sweep.confirm.num_questions or sweep.num_questions)
    digest = hashlib.sha256(json.dumps([points, count], sort_keys=True).encode()).hexdigest()[:8]
    folder = Path(sweep.output).absolute() / "confirm" / digest
    task: Any = ray.remote(measure_together).options(num_cpus=sweep.cpus, num_gpus=sweep.gpus)
    with Progress(f"measuring the best {len(points)} side by side on {count} questions", console=console), own_errors():
        found: Any = ray.get(task.remote(sweep.model_dump_json(), points, str(folder), count))
    return found


def _write(
    sweep: TuneDecodingConfig,
    listings: dict[str, Listing],
    finalists: list[Trial],
    figures: list[MeasuredFigures],
    output: Path,
) -> DecodingSummary:
    trials = read_shapes(sweep.output)
    answers = answers_by_drafter(sweep, finalists, figures)
    for name, answer in answers.items():
        winner = Combination.of({"drafter": name, **answer["winner"]})
        write_best(sweep, name, winner)
    left_out: dict[str, Counter[str]] = {name: one.left_out for name, one in listings.items()}
    summary: DecodingSummary = {
        "drafters": answers,
        "objective": sweep.objective,
        "between": between_drafters(sweep, answers, finalists, figures),
        "trials": [trial.summary() for trial in trials],
        "left_out": {name: dict(counts) for name, counts in left_out.items()},
        "wall_seconds": seconds_run(output),
        "machine": machine(),
        "versions": versions(),
        "config": _recorded(sweep).model_dump(mode="json"),
    }
    write_decoding(summary, trials, output)
    return summary


def _recorded(sweep: TuneDecodingConfig) -> TuneDecodingConfig:
    """The sweep's configuration as recorded in its folder."""
    return sweep.model_copy(update={"resume": False})
