"""Prints a report in the terminal: the main table, then the categories for each drafter's fastest tree.

A terminal is narrow, so values that are the same in every row go into the caption, and only the HTML page has
everything.
"""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moray.bench.reports.schema import CategoryMean, CategoryRow, Measure, Report, ResultRow, RowKey, read_report
from moray.bench.reports.wording import count, number, pair, percent, temperature, times

_WIDE = 120
_MAX_PAIRS = 3
"""Maximum number of drafters whose two figures fit side by side into a narrow terminal."""


def print_report(report: dict[str, Any] | Report, console: Console) -> None:
    """Print the main table, then per temperature a table by category for each drafter's fastest tree."""
    checked = read_report(report)
    console.print(_main_table(checked, console.width))
    for baseline in checked.baselines:
        where = f" at T {temperature(baseline.temperature)}" if len(checked.temperatures) > 1 else ""
        speed = number(baseline.tokens_per_second)
        console.print(Text(f"{baseline.name}: {speed} tokens/s without a drafter{where}"))
    if any(row.training_tokens for row in checked.rows):
        console.print(_training_table(checked))
    for value in checked.temperatures:
        groups = {key: rows for key, rows in checked.category_groups.items() if key[2] == value}
        if groups:
            where = f" at T {temperature(value)}" if len(checked.temperatures) > 1 else ""
            # Printed above the table, because a table wraps its own title to its width.
            fastest = _fastest(checked, groups)
            is_narrow = len(fastest) > _MAX_PAIRS and console.width < _WIDE
            figures = "Speed-up vs plain" if is_narrow else "Speed-up vs plain / tau"
            console.print(Text(f"{figures} by category{where}, fastest tree of each drafter", style="italic"))
            console.print(_category_table(fastest, checked.category_means, is_narrow))
    for note in checked.notes:
        console.print(Text(f"note: {note}"))


def _main_table(report: Report, width: int) -> Table:
    table = Table(
        title="Speculative decoding", box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    # Text, not str, so that a "[" in a name is not read as markup.
    columns: list[tuple[str, list[Text | str]]] = [
        ("drafter", [Text(row.drafter) for row in report.rows]),
        ("tree", [Text(row.tree) for row in report.rows]),
        ("T", [temperature(row.temperature) for row in report.rows]),
        ("tau", [number(row.tau) for row in report.rows]),
        ("tok/s", [number(row.tokens_per_second) for row in report.rows]),
        ("vs plain", [times(row.speedup_vs_plain) for row in report.rows]),
        ("vs gen.", [times(row.speedup_vs_generate) for row in report.rows]),
        ("eff.", [percent(row.efficiency) for row in report.rows]),
        ("lossless", [_lossless(row) for row in report.rows]),
        ("prompts", [count(row.num_prompts) for row in report.rows]),
        ("tokens", [count(row.num_tokens) for row in report.rows]),
    ]
    shared = []
    shown = []
    for name, cells in columns:
        if name in ("T", "prompts", "tokens") and len(set(cells)) == 1 and width < _WIDE:
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


def _lossless(row: ResultRow) -> Text:
    if row.lossless is None:
        return Text("not checked", style="dim")
    return Text("yes", style="green") if row.lossless else Text("NO", style="bold red")


def _category_table(
    groups: dict[RowKey, dict[str, CategoryRow]], means: Sequence[CategoryMean], is_narrow: bool
) -> Table:
    """Build a table with "speed-up / tau" per category and group, and a row with their means over categories.

    If there is no room, cells hold only the speed-up and the caption names the trees.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.add_column("category", overflow="fold")
    for drafter, tree, _ in groups:
        table.add_column(Text(drafter if is_narrow else f"{drafter}, {tree}"), justify="right", overflow="fold")
    if is_narrow:
        table.caption = Text(", ".join(f"{drafter}: {tree}" for drafter, tree, _ in groups))
    table.add_column("prompts", justify="right")
    num_all = 0
    for name in dict.fromkeys(name for rows in groups.values() for name in rows):
        rows = [group.get(name) for group in groups.values()]
        num_prompts = max((row.num_prompts for row in rows if row), default=0)
        num_all += num_prompts
        cells = [pair(row.speedup_vs_plain, row.tau) if row else "-" for row in rows]
        table.add_row(Text(name), *(_first(cell, is_narrow) for cell in cells), count(num_prompts))
    table.add_section()
    cells = {mean.key: pair(mean.speedup_vs_plain, mean.tau) for mean in means}
    table.add_row("mean", *(_first(cells.get(key, "-"), is_narrow) for key in groups), count(num_all))
    return table


def _first(cell: str, is_narrow: bool) -> str:
    return cell.partition(" / ")[0] if is_narrow else cell


def _training_table(report: Report) -> Table:
    """Build a table with one row per drafter: its size and how long it was trained."""
    table = Table(title="Training", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("drafter", overflow="fold")
    for name in ("parameters", "tokens", "seconds"):
        table.add_column(name, justify="right")
    for row in {row.drafter: row for row in report.rows}.values():
        seconds = number(row.training_seconds)
        table.add_row(Text(row.drafter), count(row.trainable_parameters), count(row.training_tokens), seconds)
    return table


def _fastest(report: Report, groups: dict[RowKey, dict[str, CategoryRow]]) -> dict[RowKey, dict[str, CategoryRow]]:
    """For each drafter, keep the group whose row has the highest speed-up over plain decoding; the first wins ties."""
    speedups: dict[RowKey, Measure] = {row.key: row.speedup_vs_plain for row in report.rows}
    best: dict[str, RowKey] = {}
    for key in groups:
        rival = best.setdefault(key[0], key)
        if (speedups.get(key) or 0.0) > (speedups.get(rival) or 0.0):
            best[key[0]] = key
    return {key: groups[key] for key in best.values()}
