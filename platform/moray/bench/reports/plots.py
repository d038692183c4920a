"""The plots of a report: what was reached, where the time went and how the drafters learnt.

Widths suit a phone; what grows with the number of rows is the height. A plot without its figures is left
out with the reason. This module refuses to know the page and how SVG comes to stand in it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moray.bench.reports.drawing import (
    COLOURS,
    LABEL_LENGTH,
    Plot,
    annotate,
    bar_height,
    labelled_bars,
    legend_below,
    legend_height,
    line,
    shorten,
)  # fmt: skip
from moray.bench.reports.schema import CategoryRow, Measure, Phases, Report, Row, RowKey
from moray.bench.reports.svg import INK, render_svg
from moray.bench.reports.wording import temperature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_POINTS = 300  # of a curve; longer ones are averaged in buckets
_PHASES = tuple(Phases.model_fields)
_COSTS = {"tokens": (1e6, "training tokens, millions"), "seconds": (60, "minutes of training")}


def draw_plots(report: Report) -> list[Plot]:
    """Draw every plot that the report has figures for, in the order of the page."""
    reached = [_speedups(report), _acceptance(report), _phases(report), _categories(report)]
    return [*reached, *_learning(report), *_training(report)]


def _speedups(report: Report) -> Plot:
    """Bars: what was reached; outlines: what the drafter's tau would allow."""
    title = "Speed-up by tree shape"
    rows = [row for row in report.rows if row.speedup_vs_plain is not None]
    if not rows:
        return Plot("speedup", title, "", missing="no row has a speed-up over plain decoding")

    def draw(figure: "Figure") -> None:
        axes = labelled_bars(figure, [_row_name(row, report) for row in rows])
        for index, row in enumerate(rows):
            speedup, ideal = row.speedup_vs_plain or 0.0, row.ideal_speedup
            axes.barh(index, speedup, height=0.36, color=COLOURS[0])
            text, ends = f"{speedup:.2f}x", [speedup]
            if ideal is not None:
                axes.barh(index, ideal, height=0.36, fill=False, edgecolor=INK, linewidth=1.0, linestyle="--")
                text, ends = f"{text} of {ideal:.2f}x", [speedup, ideal]
            spread = [bound for bound in row.speedup_spread or () if bound is not None]
            axes.plot(spread, [index] * len(spread), color=INK, linewidth=1.2, marker="|", markersize=6)
            annotate(axes, text, max(ends + spread), index)
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, axes.get_xlim()[1] * 1.26)  # room for the last label
        axes.set_xlabel("speed-up over plain decoding (dotted line: no gain)")

    best = max(rows, key=lambda row: row.speedup_vs_plain or 0.0)
    description = (
        f"Bar: measured speed-up over plain decoding. Dashed outline: tau / (1 + gamma*c), what the drafter's tau "
        f"would allow; the gap is the engine's. Thin line: 95 % interval by bootstrap over the prompts. "
        f"Best: {_row_name(best, report)} with {best.speedup_vs_plain:.2f}x."
    )
    return Plot("speedup", title, description, render_svg("speedup", draw, bar_height(len(rows)) + 0.15))


def _acceptance(report: Report) -> Plot:
    title = "Acceptance by position"
    rows = [row for row in report.rows if _has_figures(row.acceptance_by_position)]
    if not rows:
        return Plot("acceptance", title, "", missing="no row has its acceptance by position")
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    shapes = list(dict.fromkeys(_row_name(row, report, with_drafter=False) for row in rows))

    lowest = min(value for row in rows for value in row.acceptance_by_position if value is not None)
    bottom = max(0.0, int(10 * lowest - 0.5) / 10)

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(len(drafters), 1, sharex=True, squeeze=False)[:, 0]
        handles: dict[str, Any] = {}  # a tree looks the same in every panel, so one legend serves all
        for axes, drafter in zip(panels, drafters, strict=True):
            for row in (row for row in rows if row.drafter == drafter):
                name = _row_name(row, report, with_drafter=False)
                positions = range(1, len(row.acceptance_by_position) + 1)
                style = line(shapes.index(name))
                handles[name] = axes.plot(positions, _numbers(row.acceptance_by_position), **style)[0]
            axes.set_ylim(bottom, 1.02)
            axes.set_title(shorten(drafter), loc="left")
            axes.xaxis.get_major_locator().set_params(integer=True)
        panels[-1].set_xlabel("depth of the draft token")
        legend_below(figure, handles)

    description = (
        "For each drafter and tree: the share of draft tokens accepted at each depth, counting only cycles in which "
        "the token before was accepted. A line that stays flat means the drafter does not tire with depth."
    )
    height = 0.4 + 1.55 * len(drafters) + legend_height(shapes)
    return Plot("acceptance", title, description, render_svg("acceptance", draw, height))


def _phases(report: Report) -> Plot:
    title = "Where a cycle's time goes"
    rows = [row for row in report.rows if row.phases_ms and sum(_phase_times(row)) > 0]
    if not rows:
        return Plot("phases", title, "", missing="no row has the times of its phases")

    def draw(figure: "Figure") -> None:
        axes = labelled_bars(figure, [_row_name(row, report) for row in rows])
        starts = [0.0] * len(rows)
        for phase, name in enumerate(_PHASES):
            times = [_phase_times(row)[phase] for row in rows]
            axes.barh(range(len(rows)), times, left=starts, height=0.36, color=COLOURS[phase], label=name)
            starts = [start + time for start, time in zip(starts, times, strict=True)]
        for index, total in enumerate(starts):
            annotate(axes, f"{total:.2f} ms", total, index)
        axes.set_xlim(0, max(starts) * 1.2)
        axes.set_xlabel("milliseconds per cycle")
        figure.legend(loc="outside upper left", ncols=3)

    description = (
        "Milliseconds of an average cycle by phase, first phase on the left. The table of costs holds the figures."
    )
    return Plot("phases", title, description, render_svg("phases", draw, bar_height(len(rows)) + 0.5))


def _categories(report: Report) -> Plot:
    title = "Tau by category"
    rows = [row for row in report.categories if row.tau is not None]
    if not rows:
        return Plot("categories", title, "", missing="the questions had no categories, or none was measured")
    categories = list(dict.fromkeys(row.category for row in rows))
    groups: dict[RowKey, list[CategoryRow]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    names = [_row_name(own[0], report) for own in groups.values()]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        handles: dict[str, Any] = {}
        for index, (own, name) in enumerate(zip(groups.values(), names, strict=True)):
            heights = [categories.index(row.category) for row in own]
            style: dict[str, Any] = {**line(index), "linestyle": "none"}
            handles[name] = axes.plot(_numbers([row.tau for row in own]), heights, **style)[0]
        axes.set_yticks(range(len(categories)), [shorten(name, 18) for name in categories])
        axes.set_ylim(len(categories) - 0.5, -0.5)
        axes.set_xlabel("tau, tokens per target pass")
        axes.grid(axis="y", visible=True)
        legend_below(figure, handles)

    description = (
        "Tokens per target pass by category, a mark per drafter, tree and temperature. The table has the figures."
    )
    height = 0.6 + 0.27 * len(categories) + legend_height(names)
    return Plot("categories", title, description, render_svg("categories", draw, height))


def _learning(report: Report) -> list[Plot]:
    """Tau on held-out chats against what training has cost, one line per drafter; none without validation."""
    curves = {name: series for name, series in report.validation.items() if _has_figures(series.get("real_tau", ()))}
    if not curves:
        return []
    names = [shorten(name) for name in curves]

    def draw(figure: "Figure") -> None:
        handles: dict[str, Any] = {}
        for axes, (cost, (unit, label)) in zip(figure.subplots(2, 1, sharey=True), _COSTS.items(), strict=True):
            for index, (name, series) in enumerate(zip(names, curves.values(), strict=True)):
                spent = [value / unit for value in _numbers(series[cost])]
                (handles[name],) = axes.plot(spent, _numbers(series["real_tau"]), **line(index))
            axes.set_xlim(left=0)
            axes.set_xlabel(label)
            axes.set_ylabel("tau")
        legend_below(figure, handles)

    ends = "; ".join(
        f"{name}: tau {_last(series['real_tau']):.2f} after {_last(series['tokens']):,.0f} tokens"
        for name, series in zip(names, curves.values(), strict=True)
    )
    svg = render_svg("learning", draw, 4.6 + legend_height(names))
    return [Plot("learning", "What drafters learn", f"Tau of chains on held-out chats while training. {ends}.", svg)]


def _training(report: Report) -> list[Plot]:
    """One plot per drafter: its losses in one panel, every other series in its own."""
    if not report.training:
        missing = "the report was made without the drafters' training logs"
        return [Plot("training", "Training", "", missing=missing)]
    plots = []
    for number, (drafter, series) in enumerate(report.training.items()):
        title, name = f"Training of {drafter}", f"training-{number}"
        curves = {key: values for key, values in series.items() if key != "step" and _has_figures(values)}
        losses = [key for key in curves if "loss" in key or key == "kl"]
        panels = ([losses] if losses else []) + [[key] for key in curves if key not in losses]
        if not panels or not _has_figures(series["step"]):
            plots.append(Plot(name, title, "", missing="its training log holds no figure"))
            continue
        ends = ", ".join(f"{key} {_last(values):.3g}" for key, values in curves.items())
        draw = _training_painter(series["step"], curves, panels)
        description = f"Training curves over optimiser steps; at the end: {ends}."
        if len(series["step"]) > _MAX_POINTS:
            description += f" Every point is the mean of {_bucket_size(len(series['step']))} logged values."
        plots.append(Plot(name, title, description, render_svg(name, draw, 1.75 * len(panels) + 0.2)))
    return plots


def _training_painter(
    steps: Sequence[Measure], curves: dict[str, tuple[Measure, ...]], panels: list[list[str]]
) -> Callable[["Figure"], None]:
    def draw(figure: "Figure") -> None:
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, keys in zip(all_axes, panels, strict=True):
            for index, key in enumerate(keys):
                points = _thin(steps, curves[key])
                style: dict[str, Any] = {**line(index), "marker": "." if len(points) < 40 else ""}
                axes.plot([x for x, _ in points], [y for _, y in points], label=shorten(key), **style)
            axes.set_title(shorten(keys[0]) if len(keys) == 1 else "losses", loc="left")
            values = [value for key in keys for value in curves[key] if value is not None]
            if "loss" in " ".join(keys) and min(values) > 0 and max(values) > 20 * min(values):
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # the usual one needs math text
            if len(keys) > 1:
                axes.legend(loc="upper right")
        all_axes[-1].set_xlabel("optimiser step")

    return draw


def _row_name(row: Row | CategoryRow, report: Report, with_drafter: bool = True) -> str:
    end = f" · T {temperature(row.temperature)}" if len(report.temperatures) > 1 else ""
    name = f"{row.drafter} · {row.tree}" if with_drafter else row.tree
    return shorten(name, LABEL_LENGTH - len(end)) + end


def _phase_times(row: Row) -> list[float]:
    return [max(0.0, getattr(row.phases_ms, phase) or 0.0) for phase in _PHASES]


def _numbers(values: Sequence[Measure]) -> list[float]:
    return [float("nan") if value is None else value for value in values]  # matplotlib leaves a gap at NaN


def _has_figures(values: Sequence[Measure]) -> bool:
    return any(value is not None for value in values)


def _last(values: Sequence[Measure]) -> float:
    return next(value for value in reversed(values) if value is not None)


def _bucket_size(num_points: int) -> int:
    return -(-num_points // _MAX_POINTS)


def _thin(steps: Sequence[Measure], values: Sequence[Measure]) -> list[tuple[float, float]]:
    """At most `_MAX_POINTS` points: means of equal buckets. Values that are missing are left out."""
    size = _bucket_size(len(steps))
    points = []
    for start in range(0, len(steps), size):
        pairs = zip(steps[start : start + size], values[start : start + size], strict=True)
        bucket = [(x, y) for x, y in pairs if x is not None and y is not None]
        if bucket:
            points.append((sum(x for x, _ in bucket) / len(bucket), sum(y for _, y in bucket) / len(bucket)))
    return points
