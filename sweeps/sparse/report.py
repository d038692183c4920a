"""Writes the results of a sweep over sparse targets: summary.json and sweep.parquet for programs, report.html for
people."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moray.bench.reports.drawing import COLOURS, Plot, shorten
from moray.bench.reports.page import render_page
from moray.bench.reports.svg import INK, render_svg
from moray.provenance import write_text_atomically
from sweeps.reports.report import setting_rows, write_tables
from sweeps.reports.results import Trial
from sweeps.sparse.results import SparseRow, SparseSummary
from sweeps.tuning.records import SparseFigures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_sparse_sweep(summary: SparseSummary, trials: list[Trial], output: Path) -> None:
    """Write all files; summary.json comes last, because it marks the sweep as complete."""
    write_text_atomically(output / "report.html", render_html(summary))
    write_tables(summary, trials, output)


def render_html(summary: SparseSummary) -> str:
    """Render the page: one file that needs no network, no script and no other file."""
    rows = summary["trials"]
    return render_page(
        "sweeps.sparse",
        "report.html.jinja",
        rows=rows,
        plots=[front_plot(rows)],
        machine=setting_rows(summary["machine"]),
        versions=setting_rows(summary["versions"]),
        config=setting_rows(summary["config"]),
    )


def front_plot(rows: Sequence[SparseRow]) -> Plot:
    """Perplexity against the share of layers that run, with the front."""
    points = [_Point(row["name"], row["figures"], row["is_on_front"]) for row in rows if row["figures"]]
    dense = points[0].figures["dense_perplexity"]
    title = "Perplexity against the share of the layers that a token runs through"
    said = "; ".join(f"{one.name}: share {one.at[0]:.2f}, perplexity {one.at[1]:.2f}" for one in points)
    description = (
        f"{said}. Dotted: the dense target, {dense:.2f}. Line: the front, trials of which no other one has a lower "
        "perplexity with no more layers."
    )
    return Plot("front", title, description, render_svg("front", _painter(points, dense), 3.4))


class _Point(NamedTuple):
    name: str
    figures: SparseFigures
    is_on_front: bool

    @property
    def at(self) -> tuple[float, float]:
        """Share and perplexity."""
        return self.figures["share"], self.figures["perplexity"]


def _painter(points: Sequence[_Point], dense: float) -> Callable[["Figure"], None]:
    def draw(canvas: "Figure") -> None:
        axes = canvas.subplots()
        axes.scatter(*zip(*(one.at for one in points), strict=True), color=COLOURS[0], s=24)
        front = [one.at for one in points if one.is_on_front]
        axes.plot(*zip(*front, strict=True), color=COLOURS[1], marker="o", markersize=6)
        for one in points:
            axes.annotate(shorten(one.name), one.at, xytext=(5, 5), textcoords="offset points", fontsize=8.5)
        axes.axhline(dense, color=INK, linewidth=0.8, linestyle=":")
        axes.margins(0.15)
        axes.set_xlabel("share of layers")
        axes.set_ylabel("perplexity")

    return draw
