"""The plots of a report: what was reached, where the time went and how the drafters learnt.

Every plot takes the same steps: collect what it shows, draw that, describe it. Widths suit a phone; what grows with
the number of rows is the height. A plot without its figures is left out with the reason. The plots of training are in
`plots_of_training`. This module does not depend on the page or on how SVG is embedded in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from moray.bench.reports.plots_of_training import plot_learning, plot_trainings
from moray.bench.reports.schema import CategoryRow, Measure, Phases, Report, ResultRow, RowKey
from moray.bench.reports.series import has_figures, with_nan
from moray.bench.reports.svg import INK, render_svg
from moray.bench.reports.wording import temperature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR_THICKNESS = 0.36  # of the distance between two bars
_PHASES = tuple(Phases.model_fields)


def draw_plots(report: Report) -> list[Plot]:
    """Draw every plot that the report has figures for, in the order of the page."""
    return [
        _plot_speedups(report),
        _plot_acceptance(report),
        _plot_phases(report),
        _plot_categories(report),
        *plot_learning(report),
        *plot_trainings(report),
    ]


@dataclass(frozen=True)
class _SpeedupBar:
    """The speed-up of one row, and what the plot shows around it."""

    name: str
    speedup: float
    ideal_speedup: Measure  # what the drafter's tau would allow
    interval: list[float]  # both ends of the 95 % interval, or those of them that are known

    @property
    def text(self) -> str:
        """The text next to the bar."""
        if self.ideal_speedup is None:
            return f"{self.speedup:.2f}x"
        return f"{self.speedup:.2f}x of {self.ideal_speedup:.2f}x"

    @property
    def end(self) -> float:
        """Where the longest of bar, outline and interval ends."""
        ends = [self.speedup, *self.interval]
        if self.ideal_speedup is not None:
            ends.append(self.ideal_speedup)
        return max(ends)


def _plot_speedups(report: Report) -> Plot:
    """Plot what each row reached as a bar, and what its drafter's tau would allow as an outline."""
    name, title = "speedup", "Speed-up by tree shape"
    bars = _speedup_bars(report)
    if not bars:
        return Plot(name, title, "", missing="no row has a speed-up over plain decoding")
    svg = render_svg(name, partial(_draw_speedups, bars), bar_height(len(bars)) + 0.15)
    return Plot(name, title, _describe_speedups(bars), svg)


def _speedup_bars(report: Report) -> list[_SpeedupBar]:
    bars: list[_SpeedupBar] = []
    for row in report.rows:
        if row.speedup_vs_plain is not None:
            interval = [end for end in row.speedup_spread or () if end is not None]
            bars.append(_SpeedupBar(_row_name(row, report), row.speedup_vs_plain, row.ideal_speedup, interval))
    return bars


def _draw_speedups(bars: Sequence[_SpeedupBar], figure: "Figure") -> None:
    axes = labelled_bars(figure, [bar.name for bar in bars])
    outline: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 1.0, "linestyle": "--"}
    for index, bar in enumerate(bars):
        axes.barh(index, bar.speedup, height=_BAR_THICKNESS, color=COLOURS[0])
        if bar.ideal_speedup is not None:
            axes.barh(index, bar.ideal_speedup, height=_BAR_THICKNESS, **outline)
        heights = [index] * len(bar.interval)
        axes.plot(bar.interval, heights, color=INK, linewidth=1.2, marker="|", markersize=6)
        annotate(axes, bar.text, bar.end, index)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, axes.get_xlim()[1] * 1.26)  # room for the last label
    axes.set_xlabel("speed-up over plain decoding (dotted line: no gain)")


def _describe_speedups(bars: Sequence[_SpeedupBar]) -> str:
    best = max(bars, key=lambda bar: bar.speedup)
    return (
        f"Bar: measured speed-up over plain decoding. Dashed outline: tau / (1 + gamma*c), what the drafter's tau "
        f"would allow; the gap is the engine's. Thin line: 95 % interval by bootstrap over the prompts. "
        f"Best: {best.name} with {best.speedup:.2f}x."
    )


@dataclass(frozen=True)
class _AcceptanceLine:
    """How the draft tokens of one tree were accepted."""

    tree: str  # as the legend calls it
    shares: list[float]  # [k]: of draft tokens at depth k + 1; NaN where none was measured


@dataclass(frozen=True)
class _AcceptancePanels:
    """What the plot of acceptance shows: a panel for every drafter, with a line for every tree."""

    lines_by_drafter: dict[str, list[_AcceptanceLine]]
    trees: list[str]  # of all panels, each once, as the legend calls them
    bottom: float  # where every panel begins: a round number a little below the lowest share


def _plot_acceptance(report: Report) -> Plot:
    """Plot how often draft tokens were accepted at each depth."""
    name, title = "acceptance", "Acceptance by position"
    rows = [row for row in report.rows if has_figures(row.acceptance_by_position)]
    if not rows:
        return Plot(name, title, "", missing="no row has its acceptance by position")
    panels = _acceptance_panels(rows, report)
    description = (
        "For each drafter and tree: the share of draft tokens accepted at each depth, counting only cycles in which "
        "the token before was accepted. A line that stays flat means the drafter does not tire with depth."
    )
    height = 0.4 + 1.55 * len(panels.lines_by_drafter) + legend_height(panels.trees)
    return Plot(name, title, description, render_svg(name, partial(_draw_acceptance, panels), height))


def _acceptance_panels(rows: Sequence[ResultRow], report: Report) -> _AcceptancePanels:
    lines_by_drafter: dict[str, list[_AcceptanceLine]] = {}
    trees: list[str] = []
    known_shares: list[float] = []
    for row in rows:
        tree = _tree_name(row, report)
        if tree not in trees:
            trees.append(tree)
        lines = lines_by_drafter.setdefault(row.drafter, [])
        lines.append(_AcceptanceLine(tree, with_nan(row.acceptance_by_position)))
        known_shares += [share for share in row.acceptance_by_position if share is not None]
    bottom = max(0.0, int(10 * min(known_shares) - 0.5) / 10)
    return _AcceptancePanels(lines_by_drafter, trees, bottom)


def _draw_acceptance(panels: _AcceptancePanels, figure: "Figure") -> None:
    all_axes = figure.subplots(len(panels.lines_by_drafter), 1, sharex=True, squeeze=False)[:, 0]
    handles: dict[str, Any] = {}  # a tree looks the same in every panel, so one legend serves all
    for axes, (drafter, lines) in zip(all_axes, panels.lines_by_drafter.items(), strict=True):
        for shown in lines:
            depths = range(1, len(shown.shares) + 1)
            style = line(panels.trees.index(shown.tree))
            (handles[shown.tree],) = axes.plot(depths, shown.shares, **style)
        axes.set_ylim(panels.bottom, 1.02)
        axes.set_title(shorten(drafter), loc="left")
        axes.xaxis.get_major_locator().set_params(integer=True)
    all_axes[-1].set_xlabel("depth of the draft token")
    legend_below(figure, handles)


@dataclass(frozen=True)
class _PhaseBar:
    """The time of one row's average cycle."""

    name: str
    times: list[float]  # milliseconds, in the order of `_PHASES`


def _plot_phases(report: Report) -> Plot:
    """Plot an average cycle of each row as a bar, divided into its phases."""
    name, title = "phases", "Where a cycle's time goes"
    bars = _phase_bars(report)
    if not bars:
        return Plot(name, title, "", missing="no row has the times of its phases")
    description = (
        "Milliseconds of an average cycle by phase, first phase on the left. The table of costs holds the figures."
    )
    svg = render_svg(name, partial(_draw_phases, bars), bar_height(len(bars)) + 0.5)
    return Plot(name, title, description, svg)


def _phase_bars(report: Report) -> list[_PhaseBar]:
    bars: list[_PhaseBar] = []
    for row in report.rows:
        if row.phases_ms is not None:
            times = _phase_times(row.phases_ms)
            if sum(times) > 0:
                bars.append(_PhaseBar(_row_name(row, report), times))
    return bars


def _phase_times(phases: Phases) -> list[float]:
    """List the milliseconds of all phases; a phase without a time, or with a negative one, took none."""
    return [max(0.0, getattr(phases, phase) or 0.0) for phase in _PHASES]


def _draw_phases(bars: Sequence[_PhaseBar], figure: "Figure") -> None:
    axes = labelled_bars(figure, [bar.name for bar in bars])
    ends = [0.0] * len(bars)  # of what has been drawn so far
    for index, phase in enumerate(_PHASES):
        times = [bar.times[index] for bar in bars]
        axes.barh(range(len(bars)), times, left=ends, height=_BAR_THICKNESS, color=COLOURS[index], label=phase)
        ends = [end + time for end, time in zip(ends, times, strict=True)]
    for index, end in enumerate(ends):
        annotate(axes, f"{end:.2f} ms", end, index)
    axes.set_xlim(0, max(ends) * 1.2)
    axes.set_xlabel("milliseconds per cycle")
    figure.legend(loc="outside upper left", ncols=3)


@dataclass(frozen=True)
class _CategoryMarks:
    """The marks of one drafter, tree and temperature: one for every category with a tau."""

    name: str
    taus: list[float]
    heights: list[int]  # where each mark stands: the index of its category


def _plot_categories(report: Report) -> Plot:
    """Plot a line for every category, with a mark on it for every drafter, tree and temperature."""
    name, title = "categories", "Tau by category"
    rows = [row for row in report.categories if row.tau is not None]
    if not rows:
        return Plot(name, title, "", missing="the questions had no categories, or none was measured")
    categories = list(dict.fromkeys(row.category for row in rows))
    all_marks = _category_marks(rows, categories, report)
    description = (
        "Tokens per target pass by category, a mark per drafter, tree and temperature. The table has the figures."
    )
    height = 0.6 + 0.27 * len(categories) + legend_height([marks.name for marks in all_marks])
    svg = render_svg(name, partial(_draw_categories, categories, all_marks), height)
    return Plot(name, title, description, svg)


def _category_marks(rows: Sequence[CategoryRow], categories: Sequence[str], report: Report) -> list[_CategoryMarks]:
    rows_by_key: dict[RowKey, list[CategoryRow]] = {}
    for row in rows:
        rows_by_key.setdefault(row.key, []).append(row)
    all_marks: list[_CategoryMarks] = []
    for own_rows in rows_by_key.values():
        taus = [row.tau or 0.0 for row in own_rows]
        heights = [categories.index(row.category) for row in own_rows]
        all_marks.append(_CategoryMarks(_row_name(own_rows[0], report), taus, heights))
    return all_marks


def _draw_categories(categories: Sequence[str], all_marks: Sequence[_CategoryMarks], figure: "Figure") -> None:
    axes = figure.subplots()
    handles: dict[str, Any] = {}
    for index, marks in enumerate(all_marks):
        style: dict[str, Any] = {**line(index), "linestyle": "none"}
        (handles[marks.name],) = axes.plot(marks.taus, marks.heights, **style)
    axes.set_yticks(range(len(categories)), [shorten(category, 18) for category in categories])
    axes.set_ylim(len(categories) - 0.5, -0.5)
    axes.set_xlabel("tau, tokens per target pass")
    axes.grid(axis="y", visible=True)
    legend_below(figure, handles)


def _row_name(row: ResultRow | CategoryRow, report: Report) -> str:
    """Name a row by drafter and tree, and by temperature where the report has several."""
    return _with_temperature(f"{row.drafter} · {row.tree}", row, report)


def _tree_name(row: ResultRow, report: Report) -> str:
    """Name a row by its tree, and by temperature where the report has several."""
    return _with_temperature(row.tree, row, report)


def _with_temperature(name: str, row: ResultRow | CategoryRow, report: Report) -> str:
    """Shorten the name alone: the temperature behind it stays whole."""
    suffix = f" · T {temperature(row.temperature)}" if len(report.temperatures) > 1 else ""
    return shorten(name, LABEL_LENGTH - len(suffix)) + suffix
