"""Renders the comparison of engines as a self-contained HTML page with a plot."""

from typing import TYPE_CHECKING, Any

from moray.bench.peers.console import cells, notes, title
from moray.bench.reports.drawing import COLOURS, Plot, bar_height, labelled_bars
from moray.bench.reports.page import render_page
from moray.bench.reports.svg import render_svg
from moray.bench.reports.wording import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render_peers(result: dict[str, Any]) -> str:
    """Render the HTML page of a benchmark."""
    rows = [row for row in result["rows"] if row["failure"] is None]
    return render_page(
        "moray.bench.peers", "peers.html.jinja", title=title(result), notes=notes(result), plot=_plot(rows),
        rows=[cells(row, result["num_prompts"]) for row in rows],
    )  # fmt: skip


def _plot(rows: list[dict[str, Any]]) -> Plot:
    ordered = sorted(rows, key=lambda row: -row["tokens_per_second"])

    def draw(figure: "Figure") -> None:
        axes = labelled_bars(figure, [f"{row['engine']} {row['dtype']}, {row['drafting']}" for row in ordered])
        for place, row in enumerate(ordered):
            axes.barh(place, row["tokens_per_second"], height=0.4, color=COLOURS[0 if row["engine"] == "moray" else 5])
            axes.text(row["tokens_per_second"], place, f" {number(row['tokens_per_second'])}", va="center")
        axes.set_xlabel("tokens per second")

    description = "Tokens per second of every row, the fastest on top; Moray's rows stand out."
    return Plot("speed", "Tokens per second", description, render_svg("speed", draw, bar_height(len(ordered))))
