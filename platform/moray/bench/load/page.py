"""Renders the figures as a self-contained HTML page: latency against throughput, level by level."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moray.bench.load.benchmark import name_of
from moray.bench.load.results import LevelResult, LoadFigures, load_of
from moray.bench.reports.drawing import Plot, legend_below, legend_height, line
from moray.bench.reports.page import render_page
from moray.bench.reports.svg import render_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = (
    ("throughput", "Output tokens per second", (("", ("output_throughput",)),)),
    ("user", "Tokens per second and user", (("", ("tokens_per_second_per_user",)),)),
    ("ttft", "Time to first token, ms", (("median", ("ttft_ms", "median")), ("P99", ("ttft_ms", "p99")))),
    ("tpot", "Time per output token, ms", (("median", ("tpot_ms", "median")), ("P99", ("tpot_ms", "p99")))),
    ("e2e", "End-to-end latency, ms", (("median", ("e2e_ms", "median")), ("P99", ("e2e_ms", "p99")))),
)


def render_load(result: dict[str, Any]) -> str:
    """Render the HTML page of a benchmark."""
    levels: list[LevelResult] = result["levels"]
    names = [name_of(load_of(level)) for level in levels]
    rows = [
        (name, variant, figures)
        for name, level in zip(names, levels, strict=True)
        for variant, figures in level["variants"].items()
    ]
    plots = [_plot(name, title, series, levels) for name, title, series in _PANELS]
    ratios = [
        (name, pair, found)
        for name, level in zip(names, levels, strict=True)
        for pair, found in level["ratios"].items()
    ]
    return render_page("moray.bench.load", "load.html.jinja", result=result, rows=rows, plots=plots, ratios=ratios)


def _plot(name: str, title: str, series: tuple[tuple[str, tuple[str, ...]], ...], levels: list[LevelResult]) -> Plot:
    variants = list(levels[0]["variants"])
    lines: dict[str, list[tuple[float, float]]] = {}
    for label, keys in series:
        for variant in variants:
            points = [_point(level["variants"][variant], keys) for level in levels]
            lines[f"{variant} {label}".strip()] = sorted(point for point in points if point is not None)
    if not any(lines.values()):
        return Plot(name, title, "", missing="no request was answered")
    description = f"{title}, against the mean number of requests under way; one mark per level."
    height = 2.4 + legend_height(lines)
    return Plot(name, title, description, render_svg(name, _painter(lines), height))


def _painter(lines: dict[str, list[tuple[float, float]]]) -> Callable[["Figure"], None]:
    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        handles = {}
        for index, (label, points) in enumerate(lines.items()):
            handles[label] = axes.plot([x for x, _ in points], [y for _, y in points], **line(index))[0]
        axes.set_ylim(bottom=0)
        axes.set_xlabel("mean concurrent requests")
        legend_below(figure, handles)

    return draw


def _point(figures: LoadFigures, keys: tuple[str, ...]) -> tuple[float, float] | None:
    value: Any = figures
    for key in keys:
        value = value[key]
    return None if value is None else (figures["mean_concurrent_requests"], value)
