"""What an evaluation leaves behind: report.json for programs, report.html for people, tables on the console.

The JSON is written first and atomically, so that no figure is lost to a fault in its presentation. This
module refuses to know how anything was measured; it needs neither torch nor ray, and matplotlib only once
the page is drawn.
"""

import json
from collections.abc import Collection, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moray.bench.report_schema import CategoryRow, Measure, Phases, Report, Row, read_report
from moray.errors import DataError
from moray.provenance import write_text_atomically

# What each column holds, for people who meet tau for the first time.
RESULT_COLUMNS = (
    ("T", "sampling temperature; 0 is greedy decoding"),
    ("tau", "tokens emitted per pass of the target, the target's own (bonus) token included; plain decoding has 1"),
    ("tok/s", "tokens emitted per second, one sequence at a time unless the settings say otherwise"),
    ("vs plain", "speed-up over our own decoding loop without a drafter, on the same prompts; below 1 is a loss"),
    ("vs generate", "speed-up over Hugging Face's generate, on the same prompts"),
    ("efficiency", "speed-up vs plain as a share of the ideal one: the rest went to verifying and to overhead"),
    ("lossless", "whether the output was the one of plain decoding, token by token; NO means a defect"),
)
COST_COLUMNS = (
    ("draft steps", "gamma: how many times the drafter runs in one cycle"),
    ("draft cost", "c: time of one draft step over the time of one plain step of the target"),
    ("verify cost", "v: time of verifying the tree over the time of one plain step of the target"),
    ("ideal", "tau / (1 + gamma*c): the speed-up if verifying cost one plain step and everything else nothing"),
    ("spread", "low and high of the speed-up vs plain over the prompts"),
)


def write_report(report: dict[str, Any] | Report, folder: Path) -> tuple[Path, Path]:
    """Check a report (keys: `moray.bench.report_schema`) and write report.json and report.html into a folder.

    Returns:
        the paths of both files, in this order.

    Raises:
        DataError: naming the key that is wrong, or the folder that cannot be written.
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
    """The page: one file that needs no network, no script and no other file."""
    from moray.bench.plots import draw_plots

    template_text = resources.files("moray.bench").joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(number=_number, times=_times, percent=_percent, count=_count)
    return environment.from_string(template_text).render(
        report=report,
        plots=draw_plots(report),
        result_columns=RESULT_COLUMNS,
        cost_columns=COST_COLUMNS,
        categories=_category_names(report),
        category_lines=_category_lines(report),
        phases=tuple(Phases.model_fields),
        num_positions=max((len(row.acceptance_by_position) for row in report.rows), default=0),
        machine=_flatten(report.machine),
        settings=_flatten(report.settings),
    )


def print_report(report: dict[str, Any] | Report, console: Console) -> None:
    """Print the main table, then one by category for each drafter's best tree; the page holds the others."""
    checked = read_report(report)
    console.print(_main_table(checked, console.width))
    for baseline in checked.baselines:
        console.print(Text(f"{baseline.name}: {_number(baseline.tokens_per_second)} tokens/s without a drafter"))
    if checked.categories:
        console.print(_category_table(checked))
    for note in checked.notes:
        console.print(Text(f"note: {note}"))


def _main_table(report: Report, width: int) -> Table:
    """One line per row; what is the same in every line goes into the caption, for a terminal is narrow."""
    table = Table(
        title="Speculative decoding", box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    # Text, not str: a "[" in a name is no markup.
    columns: list[tuple[str, list[Text | str]]] = [
        ("drafter", [Text(row.drafter) for row in report.rows]),
        ("tree", [Text(row.tree) for row in report.rows]),
        ("T", [_number(row.temperature, 2) for row in report.rows]),
        ("tau", [_number(row.tau) for row in report.rows]),
        ("tok/s", [_number(row.tokens_per_second) for row in report.rows]),
        ("vs plain", [_times(row.speedup_vs_plain) for row in report.rows]),
        ("vs gen.", [_times(row.speedup_vs_generate) for row in report.rows]),
        ("eff.", [_percent(row.efficiency) for row in report.rows]),
        ("lossless", [_lossless(row) for row in report.rows]),
        ("prompts", [_count(row.num_prompts) for row in report.rows]),
        ("tokens", [_count(row.num_tokens) for row in report.rows]),
    ]
    shared = []
    shown = []
    for name, cells in columns:
        if name in ("T", "prompts", "tokens") and len(set(cells)) == 1 and width < 120:
            shared.append(f"{name} {cells[0]}")
        else:
            shown.append((name, cells))
            is_name = name in ("drafter", "tree")
            justify = "left" if is_name or name == "lossless" else "right"
            table.add_column(name, overflow="fold", no_wrap=not is_name, justify=justify, min_width=8 if is_name else 3)
    for index in range(len(report.rows)):
        table.add_row(*(cells[index] for _, cells in shown))
    table.caption = Text(", ".join(shared)) if report.rows else "no drafter was measured"
    return table


def _lossless(row: Row) -> Text:
    if row.lossless is None:
        return Text("not checked", style="dim")
    return Text("yes", style="green") if row.lossless else Text("NO", style="bold red")


def _category_table(report: Report) -> Table:
    """A line per category with "speed-up / tau" of each drafter's fastest tree, for a terminal is narrow."""
    title = "Speed-up vs plain / tau by category, fastest tree of each drafter"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    best = _best_groups(report)
    table.add_column("category", overflow="fold")
    for drafter, tree in best:
        table.add_column(Text(f"{drafter}, {tree}"), justify="right", overflow="fold")
    table.add_column("prompts", justify="right")
    num_all = 0
    for name in _category_names(report):
        rows = [group.get(name) for group in best.values()]
        num_prompts = max((row.num_prompts for row in rows if row), default=0)
        num_all += num_prompts
        cells = [_pair(row.speedup_vs_plain, row.tau) if row else "-" for row in rows]
        table.add_row(Text(name), *cells, _count(num_prompts))
    table.add_section()
    table.add_row("mean", *(_mean_pair(group.values()) for group in best.values()), _count(num_all))
    return table


def _category_names(report: Report) -> list[str]:
    return list(dict.fromkeys(row.category for row in report.categories))


def _category_groups(report: Report) -> dict[tuple[str, str], dict[str, CategoryRow]]:
    """The rows of each drafter and tree by category."""
    groups: dict[tuple[str, str], dict[str, CategoryRow]] = {}
    for row in report.categories:
        groups.setdefault((row.drafter, row.tree), {})[row.category] = row
    return groups


def _best_groups(report: Report) -> dict[tuple[str, str], dict[str, CategoryRow]]:
    """Of each drafter the group whose row has the highest speed-up over plain decoding, the first if they tie."""
    speedups: dict[tuple[str, str], float] = {}
    for row in report.rows:
        key = (row.drafter, row.tree)
        speedups[key] = max(speedups.get(key, 0.0), row.speedup_vs_plain or 0.0)
    groups = _category_groups(report)
    best: dict[str, tuple[str, str]] = {}
    for key in groups:
        rival = best.setdefault(key[0], key)
        if speedups.get(key, 0.0) > speedups.get(rival, 0.0):
            best[key[0]] = key
    return {key: groups[key] for key in best.values()}


def _category_lines(report: Report) -> list[tuple[str, str, dict[str, str]]]:
    """(drafter, tree, cell by category); the cell "mean" is the plain mean over the categories measured."""
    lines = []
    for (drafter, tree), rows in _category_groups(report).items():
        cells = {"mean": _mean_pair(rows.values())}
        cells.update((name, _pair(row.speedup_vs_plain, row.tau)) for name, row in rows.items())
        lines.append((drafter, tree, cells))
    return lines


def _mean_pair(rows: Collection[CategoryRow]) -> str:
    return _pair(_mean([row.speedup_vs_plain for row in rows]), _mean([row.tau for row in rows]))


def _mean(values: Sequence[Measure]) -> Measure:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _pair(speedup: Measure, tau: Measure) -> str:
    return "-" if speedup is None and tau is None else f"{_number(speedup)} / {_number(tau)}"


def _number(value: Measure, digits: int = 3) -> str:
    """Two or three significant digits, no exponent for everyday sizes, "-" for what was not measured."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 10 ** (digits - 1):
        text = f"{value:#.{digits}g}" if value else "0"
        return text.rstrip(".")
    return f"{value:,.0f}" if 1 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def _times(value: Measure) -> str:
    return "-" if value is None else f"{_number(value)}x"


def _percent(value: Measure) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _count(value: int) -> str:
    return f"{value:,}"


def _flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted key, text)."""
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            pairs += _flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return pairs
