"""Writes the results of a sweep over sparse targets: summary.json and sweep.parquet for programs, report.html for
people."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moray.bench.reports.drawing import COLOURS, Plot, shorten
from moray.bench.reports.page import render_page
from moray.bench.reports.svg import INK, render_svg
from moray.provenance import write_text_atomically
from sweeps.reports.report import setting_rows, write_tables
from sweeps.reports.results import Trial
from sweeps.sparse.results import SparseRow, SparseSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_sparse_sweep(summary: SparseSummary, trials: list[Trial], output: Path) -> None:
    """Write all files; summary.json comes last, because it marks the sweep as complete."""
    write_text_atomically(output / "report.html", render_html(summary))
    write_tables(summary, trials, output)


def render_html(summary: SparseSummary) -> str:
    """Render the page: one file that needs no network, no script and no other file."""
    rows = sorted(summary["trials"], key=lambda row: row["figures"]["share"] if row["figures"] else 2.0)
    return render_page(
        "sweeps.sparse",
        "report.html.jinja",
        rows=rows,
        front=summary["front"],
        plots=[front_plot(rows, summary["front"])],
        machine=setting_rows(summary["machine"]),
        versions=setting_rows(summary["versions"]),
        config=setting_rows(summary["config"]),
    )


def front_plot(rows: Sequence[SparseRow], front: Sequence[str]) -> Plot:
    """Perplexity against the share of layers that run, with the front."""
    places = {row["name"]: (row["figures"]["share"], row["figures"]["perplexity"]) for row in rows if row["figures"]}
    dense = next(row["figures"]["dense_perplexity"] for row in rows if row["figures"])
    title = "Perplexity against the share of the layers that a token runs through"
    said = "; ".join(f"{name}: share {share:.2f}, perplexity {value:.2f}" for name, (share, value) in places.items())
    description = (
        f"{said}. Dotted: the dense target, {dense:.2f}. Line: the front, trials of which no other one has a lower "
        "perplexity with no more layers."
    )
    return Plot("front", title, description, render_svg("front", _painter(places, front, dense), 3.4))


def _painter(places: dict[str, tuple[float, float]], front: Sequence[str], dense: float) -> Callable[["Figure"], None]:
    def draw(canvas: "Figure") -> None:
        axes = canvas.subplots()
        axes.scatter(*zip(*places.values(), strict=True), color=COLOURS[0], s=24)
        axes.plot(*zip(*(places[name] for name in front), strict=True), color=COLOURS[1], marker="o", markersize=6)
        for name, place in places.items():
            axes.annotate(shorten(name), place, xytext=(5, 5), textcoords="offset points", fontsize=8.5)
        axes.axhline(dense, color=INK, linewidth=0.8, linestyle=":")
        axes.margins(0.15)
        axes.set_xlabel("share of layers")
        axes.set_ylabel("perplexity")

    return draw
