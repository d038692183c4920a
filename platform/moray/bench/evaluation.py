"""Runs one evaluation from configuration to report: load, ask, summarise."""

from pathlib import Path
from typing import Any

from rich.console import Console

from moray.bench.answers import AnswerLog, open_answers
from moray.bench.configs import EvaluateConfig
from moray.bench.loading import load_target, nothing_fits
from moray.bench.runner import Runner
from moray.bench.specbench import Question
from moray.bench.summary import slower_than_plain, summarise
from moray.decoding.compiling import compile_models
from moray.distill.tracking.metrics import read_learning, read_metrics
from moray.drafters.base import Drafter
from moray.drafters.configs import TrainedConfig
from moray.drafters.loading import fingerprints_of, folder_of, load_drafters
from moray.progress import Progress
from moray.provenance import machine, read_run_yaml, sha256_of_files, versions
from moray.targets.model import Target
from moray.text import ChatTokenizer


def evaluate(config: EvaluateConfig, console: Console) -> dict[str, Any]:
    """Run or resume an evaluation and return its report (see `bench.reports.schema`).

    Raises:
        DataError: no prompt fits into the target's context.
        MismatchError: `config.output` holds the answers of another evaluation.
    """
    questions, tokenizer, target = load_target(config, config.categories)
    drafters = load_drafters(config.drafters, target, tokenizer)
    folders = {
        name: folder_of(entry)
        for name, entry in zip(drafters, config.drafters, strict=True)
        if isinstance(entry, str | TrainedConfig)
    }
    fingerprints = measurement_fingerprints(config, target, tokenizer)
    with Progress("compile", console=console):
        compiled = compile_models(target, drafters.values(), config.compile)
    runner = Runner(target, drafters, tokenizer, config)
    with open_answers(config, fingerprints) as log:
        record = read_run_yaml(Path(config.output))
        total = sum(len(question.turns) for question in questions) * len(config.samplings)
        if log.num_recorded:
            console.print(
                f"{log.num_recorded} of {total} turns were answered before (begun {record['written_at']}); "
                f"remove {log.path} to ask them again", markup=False, highlight=False,
            )  # fmt: skip
        _ask(runner, questions, log, total, console)
        mixed = log.mixed_programs()
    if not runner.measurement.asked:
        raise nothing_fits(config.questions, runner.max_model_len)
    figures = summarise(runner.measurement, config.samplings, config.target.dtype)
    metrics = {name: read_metrics(folder) for name, folder in folders.items()}
    learning = {name: read_learning(folder) for name, folder in folders.items()}
    making = {name: _making(drafter, metrics.get(name, [])) for name, drafter in drafters.items()}
    if target.device.type == "cuda" and not config.exact_phases:
        _drop_phases(figures)
    figures["notes"] += [*([] if config.compile == "off" else [compiled]), *mixed]
    figures["notes"] += slower_than_plain(figures["rows"])
    figures["rows"] = [row | making[row["drafter"]] for row in figures["rows"]]
    return figures | {
        "training": {name: _series(rows) for name, rows in metrics.items() if rows},
        "validation": {name: _series(rows) for name, rows in learning.items() if rows},
        "machine": machine(),
        "settings": config.model_dump(mode="json")
        | {"versions": versions(), "fingerprints": fingerprints}
        | {"begun": record["written_at"], "git": record.get("git")},
    }


def _drop_phases(figures: dict[str, Any]) -> None:
    """Remove costs and phase times, which are not exact on a device that runs asynchronously."""
    unknown = dict.fromkeys(("draft_cost", "verify_cost", "efficiency", "phases_ms"))
    figures["rows"] = [row | unknown for row in figures["rows"]]
    figures["notes"].append("costs and phases of a cycle on a GPU need exact_phases=true, which costs some speed")


def measurement_fingerprints(config: EvaluateConfig, target: Target, tokenizer: ChatTokenizer) -> dict[str, str]:
    """Everything that must match before answers and timings of two runs may be mixed in one report."""
    here = machine()
    trained = {f"drafter.{name}": value for name, value in fingerprints_of(config.drafters).items()}
    return trained | {
        "machine": ", ".join([f"{here['cores']} x {here['cpu']}", *here["gpus"]]),
        "questions": sha256_of_files([Path(config.questions)]),
        "target": target.spec.fingerprint,
        "text": tokenizer.fingerprint,
        "torch": str(versions()["torch"]),
    }


def _ask(runner: Runner, questions: list[Question], log: AnswerLog, total: int, console: Console) -> None:
    """Ask every turn that has no answer yet and show progress."""
    with Progress("evaluate", total, done=log.num_recorded, unit="turns", console=console) as progress:
        for num_turns in runner.ask(questions, log, show=lambda doing: progress.update(note=doing)):
            progress.advance(num_turns)
        progress.update(note="")


def _making(drafter: Drafter, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """The size of a drafter and how long it was trained."""
    last = metrics[-1] if metrics else {}
    tokens = last.get("tokens")
    return {
        "trainable_parameters": drafter.num_parameters,
        "training_tokens": None if tokens is None else int(tokens),
        "training_seconds": last.get("seconds"),
    }


def _series(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Convert rows of training metrics into one series per column."""
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    return {name: [row.get(name) for row in rows] for name in names}
