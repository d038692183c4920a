"""The plots of how drafters learnt: tau against what training has cost, and the curves of each training log.

Every plot takes the same steps: collect what it shows, draw that, describe it. This module does not depend on the page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from moray.bench.reports.drawing import Plot, legend_below, legend_height, line, shorten
from moray.bench.reports.schema import Measure, Report
from moray.bench.reports.series import average_in_buckets, bucket_size, has_figures, last_figure, with_nan
from moray.bench.reports.svg import render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TAU = "real_tau"  # the series of a validation that holds tau on held-out chats
_MAX_MARKED = 39  # points of a curve that has a mark at each


class _Cost(NamedTuple):
    """One way to count what training has cost."""

    key: str  # the series of a validation that holds it
    unit: float  # what it is divided by
    label: str


_COSTS = (_Cost("tokens", 1e6, "training tokens, millions"), _Cost("seconds", 60, "minutes of training"))


@dataclass(frozen=True)
class _Learning:
    """What one drafter had learnt whenever it was validated."""

    name: str
    series: Mapping[str, Sequence[Measure]]  # as in `Report.validation`


def plot_learning(report: Report) -> list[Plot]:
    """Plot tau on held-out chats against what training has cost, a line per drafter; no plot without validation."""
    drafters = [
        _Learning(shorten(drafter), series)
        for drafter, series in report.validation.items()
        if has_figures(series.get(_TAU, ()))
    ]
    if not drafters:
        return []
    height = 4.6 + legend_height([drafter.name for drafter in drafters])
    svg = render_svg("learning", partial(_draw_learning, drafters), height)
    return [Plot("learning", "What drafters learn", _describe_learning(drafters), svg)]


def _draw_learning(drafters: Sequence[_Learning], figure: "Figure") -> None:
    """Draw a panel for every way to count the cost."""
    handles: dict[str, Any] = {}
    all_axes = figure.subplots(len(_COSTS), 1, sharey=True)
    for axes, cost in zip(all_axes, _COSTS, strict=True):
        for index, drafter in enumerate(drafters):
            spent = [value / cost.unit for value in with_nan(drafter.series[cost.key])]
            (handles[drafter.name],) = axes.plot(spent, with_nan(drafter.series[_TAU]), **line(index))
        axes.set_xlim(left=0)
        axes.set_xlabel(cost.label)
        axes.set_ylabel("tau")
    legend_below(figure, handles)


def _describe_learning(drafters: Sequence[_Learning]) -> str:
    return f"Tau of chains on held-out chats while training. {'; '.join(map(_describe_end, drafters))}."


def _describe_end(drafter: _Learning) -> str:
    """The last tau of a drafter, and after how many tokens, if its validation counted them."""
    text = f"{drafter.name}: tau {last_figure(drafter.series[_TAU]):.2f}"
    tokens = drafter.series["tokens"]
    return f"{text} after {last_figure(tokens):,.0f} tokens" if has_figures(tokens) else text


@dataclass(frozen=True)
class _Log:
    """What the plot of one training log shows."""

    steps: Sequence[Measure]
    curves: dict[str, Sequence[Measure]]  # every other series that holds figures, by its key

    @property
    def panels(self) -> list[list[str]]:
        """The keys of the curves, panel by panel: all losses share the first panel, every other curve has its own."""
        losses = [key for key in self.curves if "loss" in key or key == "kl"]
        others = [[key] for key in self.curves if key not in losses]
        return [losses, *others] if losses else others


def plot_trainings(report: Report) -> list[Plot]:
    """Plot the training log of every drafter."""
    if not report.training:
        missing = "the report was made without the drafters' training logs"
        return [Plot("training", "Training", "", missing=missing)]
    return [
        _plot_training(f"training-{number}", drafter, series)
        for number, (drafter, series) in enumerate(report.training.items())
    ]


def _plot_training(name: str, drafter: str, series: Mapping[str, Sequence[Measure]]) -> Plot:
    title = f"Training of {drafter}"
    curves = {key: values for key, values in series.items() if key != "step" and has_figures(values)}
    log = _Log(series["step"], curves)
    if not log.curves or not has_figures(log.steps):
        return Plot(name, title, "", missing="its training log holds no figure")
    svg = render_svg(name, partial(_draw_training, log), 1.75 * len(log.panels) + 0.2)
    return Plot(name, title, _describe_training(log), svg)


def _draw_training(log: _Log, figure: "Figure") -> None:
    all_axes = figure.subplots(len(log.panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, keys in zip(all_axes, log.panels, strict=True):
        _draw_panel(log, keys, axes)
    all_axes[-1].set_xlabel("optimiser step")


def _draw_panel(log: _Log, keys: Sequence[str], axes: "Axes") -> None:
    """Draw some curves of a log into one panel."""
    for index, key in enumerate(keys):
        points = average_in_buckets(log.steps, log.curves[key])
        style: dict[str, Any] = {**line(index), "marker": "." if len(points) <= _MAX_MARKED else ""}
        axes.plot([point.x for point in points], [point.y for point in points], label=shorten(key), **style)
    axes.set_title(shorten(keys[0]) if len(keys) == 1 else "losses", loc="left")
    if any("loss" in key for key in keys) and _is_wide([log.curves[key] for key in keys]):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # the usual one needs math text
    if len(keys) > 1:
        axes.legend(loc="upper right")


def _is_wide(curves: Sequence[Sequence[Measure]]) -> bool:
    """Check whether a logarithmic scale shows the curves better: all are above zero, and they span a wide range."""
    figures = [value for values in curves for value in values if value is not None]
    return min(figures) > 0 and max(figures) > 20 * min(figures)


def _describe_training(log: _Log) -> str:
    ends = ", ".join(f"{key} {last_figure(values):.3g}" for key, values in log.curves.items())
    description = f"Training curves over optimiser steps; at the end: {ends}."
    size = bucket_size(len(log.steps))
    if size > 1:
        description += f" Every point is the mean of {size} logged values."
    return description
