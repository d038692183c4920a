"""Renders the evaluation of sparse targets as a self-contained HTML page: both tables, and plots of the ways."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moray.bench.reports.drawing import COLOURS, Plot, annotate, bar_height, labelled_bars, shorten
from moray.bench.reports.page import render_page
from moray.bench.reports.svg import render_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = (
    ("speed", "Speed-up over the dense target without drafts", "speedup", "{:.2f}x"),
    ("tau", "Tokens per pass", "tau", "{:.2f}"),
    ("layers", "Share of the layers whose weights a pass reads", "layers_read", "{:.2f}"),
)


def render_sparse(result: Mapping[str, Any]) -> str:
    """Render the page of an evaluation."""
    rows: list[dict[str, Any]] = result["rows"]
    plots = [_plot(rows, *panel) for panel in _PANELS]
    return render_page("moray.bench.sparse", "sparse.html.jinja", result=result, plots=plots)


def _plot(rows: Sequence[Mapping[str, Any]], name: str, title: str, key: str, wording: str) -> Plot:
    names = [shorten(row["name"]) for row in rows]
    values = [float(row[key]) for row in rows]
    said = "; ".join(f"{way} {wording.format(value)}" for way, value in zip(names, values, strict=True))
    svg = render_svg(name, _painter(names, values, wording), bar_height(len(rows)))
    return Plot(name, title, f"{title}: {said}.", svg)


def _painter(names: list[str], values: list[float], wording: str) -> Callable[["Figure"], None]:
    def draw(figure: "Figure") -> None:
        axes = labelled_bars(figure, names)
        for index, value in enumerate(values):
            axes.barh(index, value, height=0.42, color=COLOURS[0])
            annotate(axes, wording.format(value), value, index)
        axes.set_xlim(0, 1.15 * max(values))

    return draw
