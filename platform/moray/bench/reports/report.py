"""Writes the report of an evaluation: report.json for programs, report.html for people.

The JSON is written first and atomically, so that a bug in the presentation cannot lose figures. This module does not
depend on how anything was measured. It imports neither torch nor ray, and matplotlib only when it draws the page.
"""

import json
from pathlib import Path
from typing import Any

from moray.bench.reports.page import render_page
from moray.bench.reports.schema import Phases, Report, ResultRow, RowKey, read_report
from moray.bench.reports.wording import pair
from moray.config import flatten
from moray.errors import DataError
from moray.provenance import write_text_atomically

# What each column means, for readers who are new to tau.
RESULT_COLUMNS = (
    ("T", "sampling temperature; 0 is greedy decoding"),
    ("tau", "tokens emitted per pass of the target, the target's own (bonus) token included; plain decoding has 1"),
    ("tok/s", "tokens emitted per second, one sequence at a time unless the settings say otherwise"),
    ("vs plain", "speed-up over our own decoding loop without a drafter, on the same prompts; below 1 is a loss"),
    ("vs generate", "speed-up over Hugging Face's generate, on the same prompts"),
    (
        "efficiency",
        "speed-up in cycles (prefill left out) as a share of the ideal one: the rest went to verifying and overhead",
    ),
    ("lossless", "whether the output was the one of plain decoding, token by token; NO means a defect"),
)
COST_COLUMNS = (
    ("draft steps", "gamma: how many times the drafter runs in one cycle"),
    ("draft cost", "c: time of one draft step over the time of one plain step of the target"),
    ("verify cost", "v: time of verifying the tree over the time of one plain step of the target"),
    ("ideal", "tau / (1 + gamma*c): the speed-up if verifying cost one plain step and everything else nothing"),
    ("95 %", "interval that the figure before it lies in, by bootstrap over the prompts"),
    ("median", "of the single prompts' speed-ups vs plain: one long answer counts no more than a short one"),
    ("middle half", "a quarter of the prompts is sped up less than the first of these, a quarter more than the second"),
)


def write_report(report: dict[str, Any] | Report, folder: Path) -> tuple[Path, Path]:
    """Check a report (keys: `moray.bench.reports.schema`) and write report.json and report.html into a folder.

    Returns:
        the paths of both files, in this order.

    Raises:
        DataError: a key is wrong or the folder cannot be written; the message names it.
    """
    checked = read_report(report)
    json_path, html_path = folder / "report.json", folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(
            json_path, json.dumps(checked.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
        )
        write_text_atomically(html_path, render_html(checked))
    except OSError as error:
        raise DataError(f"the report cannot be written to '{folder}': {error.strerror}; name another folder") from None
    return json_path, html_path


def render_html(report: Report) -> str:
    """Render the page: one file that needs no network, no script and no other file."""
    from moray.bench.reports.plots import draw_plots

    return render_page(
        "moray.bench.reports",
        "report.html.jinja",
        report=report,
        plots=draw_plots(report),
        result_columns=RESULT_COLUMNS,
        cost_columns=COST_COLUMNS,
        trainings=[row for row in {row.drafter: row for row in report.rows}.values() if _has_training(row)],
        categories=list(dict.fromkeys(row.category for row in report.categories)),
        category_lines=_category_lines(report),
        phases=tuple(Phases.model_fields),
        num_positions=max((len(row.acceptance_by_position) for row in report.rows), default=0),
        chosen=[row for row in report.rows if row.tree.startswith("adaptive") and row.depth_shares],
        machine=_table(report.machine),
        settings=_table(report.settings),
    )


def _category_lines(report: Report) -> list[tuple[RowKey, dict[str, str]]]:
    """The cells of each row by category; the cell "mean" is the plain mean over the categories measured."""
    lines, means = [], {mean.key: pair(mean.speedup_vs_plain, mean.tau) for mean in report.category_means}
    for key, rows in report.category_groups.items():
        cells = {"mean": means.get(key, "-")}
        cells.update((name, pair(row.speedup_vs_plain, row.tau)) for name, row in rows.items())
        lines.append((key, cells))
    return lines


def _has_training(row: ResultRow) -> bool:
    return (row.trainable_parameters, row.training_tokens, row.training_seconds) != (None, None, None)


def _table(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Flatten nested settings to pairs of (dotted key, text)."""
    return [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in flatten(values).items()
    ]
