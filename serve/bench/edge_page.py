"""Renders the edge benchmark as a self-contained HTML page: a table per network, and plots over all networks."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from moray.bench.reports.drawing import Plot, legend_below, legend_height, line
from moray.bench.reports.page import render_page
from moray.bench.reports.svg import render_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from serve.bench.edge import EdgeNetwork

_PANELS = (
    ("speed", "Tokens per second", "tokens_per_second"),
    ("server", "Server: processor time per token, ms", "server_cpu_ms"),
    ("down", "Bytes down per token, packet headers included", "bytes_down"),
    ("up", "Bytes up per token, packet headers included", "bytes_up"),
    ("calls", "Messages to the server per token", "calls"),
)


def render_edge(result: Mapping[str, Any]) -> str:
    """Render the page of a benchmark."""
    networks: list[EdgeNetwork] = result["networks"]
    plots = [_plot(name, title, key, networks) for name, title, key in _PANELS]
    return render_page("serve.bench", "edge.html.jinja", result=result, networks=networks, plots=plots)


def _plot(name: str, title: str, key: str, networks: "list[EdgeNetwork]") -> Plot:
    ways = [row["way"] for row in networks[0]["rows"]]
    rows: list[dict[str, Mapping[str, Any]]] = [{row["way"]: row for row in table["rows"]} for table in networks]
    figures = {way: [own[way][key] for own in rows] for way in ways}
    labels = [table["network"]["name"] for table in networks]
    description = f"{title}, by network; one line per way to get answers."
    return Plot(name, title, description, render_svg(name, _painter(figures, labels), 2.6 + legend_height(ways)))


def _painter(figures: Mapping[str, list[float]], labels: list[str]) -> Callable[["Figure"], None]:
    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        handles = {}
        for index, (way, values) in enumerate(figures.items()):
            handles[way] = axes.plot(range(len(values)), values, **line(index))[0]
        axes.set_xticks(range(len(labels)), labels)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.15)
        legend_below(figure, handles)

    return draw
