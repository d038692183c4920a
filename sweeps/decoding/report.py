"""Writes the results of a sweep over decoding choices: summary.json and sweep.parquet for programs, report.html for
people."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moray.bench.configs import EvaluateConfig
from moray.bench.reports.page import render_page
from moray.bench.reports.wording import interval, number
from moray.config import flatten
from moray.decoding.params import SamplingParams
from moray.provenance import write_text_atomically
from moray.renamed import with_current_names
from moray.targets.spec import TargetConfig
from sweeps.decoding.configs import TuneDecodingConfig
from sweeps.decoding.plots import draw_plots
from sweeps.decoding.results import ranked
from sweeps.decoding.summaries import Between, DecodingSummary, DrafterAnswer
from sweeps.reports.report import lead_in_words, setting_rows, write_tables
from sweeps.reports.results import Trial
from sweeps.reports.views import WORDS

_SHARED = ("target", "questions", "num_questions", "sampling", "max_new_tokens", "max_model_len", "threads")
"""Keys that an evaluation shares with the sweep."""
_COLUMNS = (
    ("rung", "how far it came; with fewer questions than on the last rung a trial is not comparable"),
    ("questions", "that were asked up to there"),
    ("tau", "tokens emitted per pass of the target, the target's own (bonus) token included"),
    ("speed-up", "over our own decoding loop without a drafter, on the same prompts; below 1 is a loss"),
    ("draft cost", "time of one draft step over the time of one plain step of the target"),
    ("verify cost", "time of verifying the tree over the time of one plain step of the target"),
    (
        "efficiency",
        "speed-up (without prefill) over tau / (1 + draft steps times draft cost), which tau would allow",
    ),
    ("lossless", "whether the output was the one of plain decoding, token by token; NO means a defect"),
    ("state", "finished on the last rung; stopped early for others were better; failed: what went wrong is listed"),
)


def write_decoding(summary: DecodingSummary, trials: Sequence[Trial], output: Path) -> None:
    """Write all files; summary.json comes last, because it marks the sweep as complete."""
    write_text_atomically(output / "report.html", render_html(summary, trials))
    write_tables(summary, list(trials), output)


def render_html(summary: DecodingSummary, trials: Sequence[Trial]) -> str:
    """Render the page: one file that needs no network, no script and no other file."""
    answers, word = summary["drafters"], WORDS[summary["objective"]]
    names = dict.fromkeys([*answers, *(trial.choices["drafter"] for trial in trials)])
    groups = {name: ranked([trial for trial in trials if trial.choices["drafter"] == name]) for name in names}
    finalists = {name: answer["finalists"] for name, answer in answers.items()}
    top = max((row["rung"] for trial in trials for row in trial.rows), default=0)
    return render_page(
        "sweeps.decoding",
        "report.html.jinja",
        summary=summary,
        objective=word,
        is_rate=summary["objective"] == "tokens_per_second",
        answers=[
            {
                "drafter": name,
                "name": answer["name"],
                "sentences": sure_in_words(answer, word),
                "command": evaluate_command(summary["config"], answer["evaluate"]),
                "finalists": answer["finalists"],
            }
            for name, answer in answers.items()
        ],
        unanswered=[name for name in groups if name not in answers],
        between=_between_in_words(summary["between"], word),
        plots=draw_plots(groups, finalists, summary["objective"], top),
        trials=[trial for group in groups.values() for trial in group],
        chosen={row["name"] for rows in finalists.values() for row in rows},
        has_efficiency=any(trial.last.get("efficiency") is not None for trial in trials),
        left_out=left_out_rows(summary["left_out"]),
        is_proposed=summary["config"]["search"]["type"] == "optuna",
        columns=_COLUMNS,
        machine=setting_rows(summary["machine"]),
        versions=setting_rows(summary["versions"]),
        config=setting_rows(summary["config"]),
    )


def sure_in_words(answer: DrafterAnswer, word: str) -> list[str]:
    """Sentences about what a drafter's winner has reached, and how certain its lead is."""
    between = f" (95 % interval {interval(answer['spread'])})" if answer["spread"] else ""
    found = [f"{word.capitalize()} {number(answer['objective'])}{between}, measured again after the search."]
    if len(answer["finalists"]) < 2 or answer["ahead_interval"] is None:
        return [*found, "Only one way to decode was measured again: there is none to compare it with."]
    first, second = answer["finalists"][:2]
    return found + lead_in_words(first["name"], second["name"], answer, word, "prompts")


def _between_in_words(between: Between | None, word: str) -> list[str]:
    """Sentences about which drafter is best; empty if there is only one."""
    if between is None:
        return []
    return lead_in_words(between["best"], f"{between['second']}, each at its best,", between, word, "prompts")


def left_out_rows(left_out: Mapping[str, Mapping[str, int]]) -> list[tuple[str, int, str]]:
    """Choices that were not tried, as (drafter, count, reason), most frequent first for each drafter."""
    return [
        (drafter, count, reason)
        for drafter, reasons in left_out.items()
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1])
    ]


def evaluate_command(config: Mapping[str, Any], path: str) -> str:
    """The shell command that measures a winner in the same way as its sweep.

    Args:
        config: the sweep's configuration as plain values.
        path: the winner's YAML file.
    """
    config = with_current_names(TuneDecodingConfig, dict(config), notice=False)  # an earlier version may have swept
    asked = config["confirm"]["num_questions"] or config["num_questions"]
    given = {key: config[key] for key in _SHARED} | {"num_questions": asked}
    drafter = Path(path).stem.removeprefix("best-")
    given["output"] = str(Path(path).parent / "evaluations" / f"{drafter}-as-in-the-sweep")  # not the YAML file's own
    if not config["gpus"]:
        given["target"] = given["target"] | {"device": "cpu"}
    defaults = flatten({"target": _defaults(TargetConfig), "sampling": SamplingParams().model_dump()})
    defaults |= _defaults(EvaluateConfig)
    words = [
        f"{key}={_as_yaml(value)}"
        for key, value in flatten(given).items()
        if key not in defaults or value != defaults[key]
    ]
    return shlex.join(["python", "-m", "pipelines.evaluate", path, *words])


def _defaults(config_class: type[TargetConfig | EvaluateConfig]) -> dict[str, Any]:
    """The defaults of the keys that have one."""
    return {key: field.default for key, field in config_class.model_fields.items() if not field.is_required()}


def _as_yaml(value: Any) -> str:
    """Format a value for an override; texts get no quotes if YAML reads them as the same text."""
    try:
        is_plain = isinstance(value, str) and yaml.safe_load(value) == value
    except yaml.YAMLError:
        is_plain = False
    return value if is_plain else json.dumps(value)
