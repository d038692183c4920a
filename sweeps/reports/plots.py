"""The plots of a sweep of trainings: the objective of each combination, learning curves, and gain against cost.

Wherever trials that were stopped early appear next to finished ones, they are marked. A plot without figures is
replaced by the reason. This module does not depend on the page.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moray.bench.reports.drawing import COLOURS, Plot, legend_below, legend_height, line, shorten
from moray.bench.reports.svg import INK, render_svg
from moray.bench.reports.wording import number, percent
from sweeps.reports.plots_of_orders import parallel_plot, rank_plot
from sweeps.reports.results import Trial, pareto
from sweeps.reports.summaries import RankAgreement
from sweeps.reports.views import WORDS, SearchTrials, cells, figure
from sweeps.tuning.spaces import short, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_NAMED = 6  # maximum number of lines with a colour and a name
_NUM_NUMBERED = 10  # maximum number of numbered points on a front
_NUM_COLOURS = 24  # few enough that the colour bar is drawn as shapes instead of pixels
_FADED = 0.3
_FRONT = "What is gained, and what drafting costs"


def draw_plots(search: SearchTrials, ranks: Sequence[RankAgreement]) -> list[Plot]:
    """Draw all plots in the order of the page."""
    return [
        *(_map(search, key) for key in ("tau", "speedup")),
        _curves(search),
        front_plot("pareto", _FRONT, search.ranked, search.is_whole, lambda one: search.brief(one, 46), search.naming),
        parallel_plot(search),
        rank_plot(search, ranks),
    ]


def _map(search: SearchTrials, key: str) -> Plot:
    """Draw a heat map over the first two keys with lists; pale and hatched where a trial was stopped."""
    name, word = f"map-{key}", WORDS[key]
    lists = list(search.lists)
    if not lists:
        return Plot(name, f"Map of {word}", "", missing="no key of the space has a list of at least two values")
    down, across = lists[0], lists[1] if len(lists) > 1 else None
    if across and len(search.lists[across]) > len(search.lists[down]):
        down, across = across, down  # the longer list goes down, because a page is taller than wide
    names = [short(one, search.space) for one in (down, across) if one]
    title = f"Map of {word}: {' by '.join(names)}"
    table = cells(search, down, across)
    if not any(trial and figure(trial.last, key) is not None for row in table for trial in row):
        return Plot(name, title, "", missing=f"no trial has a {word}")

    def draw(canvas: "Figure") -> None:
        axes = canvas.subplots()
        _paint_cells(canvas, axes, search, table, key)
        axes.set_yticks(range(len(table)), [shorten(show(value), 16) for value in search.lists[down]])
        columns = [shorten(show(value), 14) for value in search.lists[across]] if across else [""]
        slanted = sum(map(len, columns)) > 44
        axes.set_xticks(range(len(columns)), columns, **({"rotation": 40, "ha": "right"} if slanted else {}))
        axes.set_ylabel(shorten(names[0], 30))
        axes.set_xlabel(shorten(names[1], 40) if across else "")

    whole = [trial for row in table for trial in row if trial and search.is_whole(trial)]
    best = max(whole, key=lambda trial: figure(trial.last, key) or 0.0, default=None)
    description = f"Each cell: the {word} on the highest rung that its trial has come to."
    if best is not None:
        description += f" Highest of those trained to the end: {number(figure(best.last, key))} with {best.name}."
    if any(trial and trial.rows and not search.is_whole(trial) for row in table for trial in row):
        description += (
            " Pale and hatched: did not come to the last rung, measured at the share of training that stands below; "
            "not comparable with the others."
        )
    if len(search.space) > len(names):
        others = ", ".join(short(one, search.space) for one in search.space if one not in (down, across))
        description += f" A cell shows the best of its trials over {others}: of those trained longest, the best."
    height = 1.35 + len(table) * (0.5 if len(table) <= 8 else 0.36)
    return Plot(name, title, description, render_svg(name, draw, height))


def _paint_cells(
    canvas: "Figure", axes: "Axes", search: SearchTrials, table: list[list[Trial | None]], key: str
) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    values = [value for row in table for trial in row if trial and (value := figure(trial.last, key)) is not None]
    norm, scale = Normalize(min(values), max(values)), colormaps["viridis"].resampled(_NUM_COLOURS)
    width = len(table[0])
    size = 9.5 if width <= 5 else 8 if width <= 8 else 6.5
    for y, row in enumerate(table):
        for x, trial in enumerate(row):
            if trial is None:
                continue
            value = figure(trial.last, key)
            if value is None:
                axes.text(x, y, trial.state, ha="center", va="center", fontsize=min(size, 8))
                continue
            colour, whole = scale(float(norm(value))), search.is_whole(trial)
            place = (x - 0.48, y - 0.46)
            axes.add_patch(Rectangle(place, 0.96, 0.92, facecolor=colour, alpha=1 if whole else _FADED, linewidth=0))
            if not whole:
                edge: dict[str, Any] = {"fill": False, "edgecolor": INK, "alpha": 0.35, "linewidth": 0.5}
                axes.add_patch(Rectangle(place, 0.96, 0.92, hatch="//", **edge))
            dark = 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2] < 0.5
            text = number(value) if whole else f"{number(value)}\n{percent(search.share(trial))}"
            ink = INK if not whole else "#ffffff" if dark else "#111111"
            axes.text(x, y, text, ha="center", va="center", fontsize=size, color=ink, linespacing=1.1)
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    bar = canvas.colorbar(ScalarMappable(norm, scale), ax=axes, orientation="horizontal", aspect=40, pad=0.02)
    bar.set_label(WORDS[key])
    bar.outline.set_visible(False)  # type: ignore[operator]


def _curves(search: SearchTrials) -> Plot:
    """Draw learning curves: the best trials in colour, all others as thin lines."""
    keys = ["tau", "speedup"] if search.objective == "tau" else ["objective", "tau"]
    title = f"Learning: {WORDS[search.objective]} and {WORDS['speedup' if search.objective == 'tau' else 'tau']}"
    ranked = [trial for trial in search.ranked if any(figure(row, keys[0]) is not None for row in trial.rows)]
    if not ranked:
        return Plot("curves", title, "", missing="no trial was measured")
    named = ranked[:_NUM_NAMED]
    names = _apart([search.brief(trial, 48) for trial in named])
    tokens = {row.get("rung_tokens", 0) for trial in ranked for row in trial.rows}

    def draw(canvas: "Figure") -> None:
        panels = canvas.subplots(len(keys), 1, sharex=True)
        handles: dict[str, Any] = {}
        for axes, key in zip(panels, keys, strict=True):
            for trial in reversed(ranked[_NUM_NAMED:]):
                axes.plot(*_points(trial, key), color=INK, alpha=_FADED, linewidth=0.8, marker=".", markersize=4)
            for index, (trial, name) in enumerate(zip(named, names, strict=True)):
                handles[name] = axes.plot(*_points(trial, key), **line(index))[0]
            axes.set_title(WORDS[search.objective if key == "objective" else key], loc="left")
            if len(tokens) > 2:
                axes.set_xscale("log")
            axes.set_xticks(sorted(tokens), [_thousands(count) for count in sorted(tokens)])
            axes.minorticks_off()
        panels[-1].set_xlabel("training tokens, padding included")
        legend_below(canvas, handles)

    stopped = sum(not search.is_whole(trial) for trial in ranked)
    description = f"A line for every trial ({len(ranked)}), a mark for every rung at which it was measured."
    if stopped:
        description += f" Lines of those that did not come to the last rung ({stopped}) end where they were stopped."
    if len(ranked) > _NUM_NAMED:
        description += f" The {_NUM_NAMED} that were trained longest and are best have a colour and a name."
    description += f" Names: {search.naming}."
    return Plot("curves", title, description, render_svg("curves", draw, 3.8 + legend_height(names)))


def _points(trial: Trial, key: str) -> tuple[list[float], list[float]]:
    pairs = [(row.get("rung_tokens", 0), value) for row in trial.rows if (value := figure(row, key)) is not None]
    return [tokens for tokens, _ in pairs], [value for _, value in pairs]


def front_plot(
    name: str,
    title: str,
    trials: Sequence[Trial],
    is_whole: Callable[[Trial], bool],
    brief: Callable[[Trial], str],
    naming: str,
) -> Plot:
    """Plot tau against drafting cost, with the Pareto front.

    Args:
        name: name of the plot, unique on the page.
        title: title of the plot.
        trials: all trials that may be drawn.
        is_whole: whether a trial reached the last rung; only these can be on the front.
        brief: a short name of a trial, at most 46 characters.
        naming: explains what the short names consist of.
    """
    known = [trial for trial in trials if _cost(trial.last) is not None and figure(trial.last, "tau")]
    if not known:
        return Plot(name, title, "", missing="no trial has both its tau and its draft cost")
    whole = [trial for trial in known if is_whole(trial) and trial.last.get("lossless") is not False]
    front = pareto(whole, gain=lambda row: figure(row, "tau") or 0.0, cost=lambda row: _cost(row) or 0.0)
    names = [f"{index + 1}  {brief(one)}" for index, one in enumerate(front[:_NUM_NUMBERED])]

    def draw(canvas: "Figure") -> None:
        axes = canvas.subplots()
        others = [trial for trial in known if trial not in whole]
        hollow: dict[str, Any] = {"facecolors": "none", "edgecolors": INK, "linewidths": 0.8, "alpha": 0.45, "s": 22}
        axes.scatter(*_places(others), **hollow)
        axes.scatter(*_places(whole), color=COLOURS[5], s=24)
        axes.plot(*_places(front), color=COLOURS[1], marker="o", markersize=6, drawstyle="steps-post")
        marks = axes.lines[-1]
        for index, trial in enumerate(front[:_NUM_NUMBERED]):
            (x,), (y,) = _places([trial])
            axes.annotate(str(index + 1), (x, y), xytext=(5, 5), textcoords="offset points", fontsize=9.5)
        axes.margins(0.12)
        _draw_speedups(axes)
        axes.grid(axis="y", visible=True)
        axes.set_xlabel("draft cost per cycle, in plain steps of the target")
        axes.set_ylabel("tau")
        for index, text in enumerate(names):
            axes.annotate(text, (0, 0), xycoords="axes fraction", xytext=(0, -46 - 14 * index),
                          textcoords="offset points", fontsize=9.5, annotation_clip=False)  # fmt: skip
        marks.set_label("front")

    description = (
        "Tau against draft steps times draft cost. Line: the front, trials of which none other has a higher tau for "
        "less cost; its points are numbered from the cheapest on, and named by "
        f"{naming}. Dotted: equal ideal speed-up, "
        "tau / (1 + draft cost per cycle), if verifying cost one plain step and all else nothing."
    )
    if len(whole) < len(known):
        description += " Hollow: stopped early, or not lossless; these are not part of the front."
    return Plot(name, title, description, render_svg(name, draw, 3.1 + 0.2 * len(names)))


def _draw_speedups(axes: "Axes") -> None:
    """Draw lines of equal ideal speed-up across the visible area."""
    from matplotlib.ticker import MaxNLocator

    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    left = max(left, 0.0)
    for speedup in MaxNLocator(5).tick_values(bottom / (1 + right), top / (1 + left)):
        if speedup > 0:
            axes.plot([left, right], [speedup * (1 + left), speedup * (1 + right)], ":", color=INK, alpha=0.4, lw=0.8)
            end = min(right, top / speedup - 1)
            if left < end and speedup * (1 + end) > bottom:
                place = (end, speedup * (1 + end))
                axes.annotate(f"{speedup:g}x", place, ha="right", va="top", fontsize=8, alpha=0.7)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)


def _cost(row: Mapping[str, Any]) -> float | None:
    steps, cost = figure(row, "draft_steps"), figure(row, "draft_cost")
    return None if steps is None or cost is None else steps * cost


def _places(trials: Sequence[Trial]) -> tuple[list[float], list[float]]:
    return [_cost(trial.last) or 0.0 for trial in trials], [figure(trial.last, "tau") or 0.0 for trial in trials]


def _apart(names: Sequence[str]) -> list[str]:
    """Make names unique by numbering repeated ones."""
    return [f"{name} ({names[:i].count(name) + 1})" if name in names[:i] else name for i, name in enumerate(names)]


def _thousands(tokens: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return f"{tokens:.3g}"
