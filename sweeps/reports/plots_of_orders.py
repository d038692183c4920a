"""Two plots that compare the trials of a sweep: by the values chosen for them, and by their ranks rung by rung.

Each plot takes the same steps: collect what it shows, draw that, describe it. This module does not depend on the page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moray.bench.reports.drawing import Plot, shorten
from moray.bench.reports.svg import INK, render_svg
from moray.bench.reports.wording import number
from sweeps.reports.results import Trial
from sweeps.reports.summaries import RankAgreement
from sweeps.reports.views import WORDS, SearchTrials, at_height, figure, height
from sweeps.tuning.records import TrialRow
from sweeps.tuning.spaces import Range, short, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

_SCALE = ("#8796ab", "#2f7fc4", "#009e8f", "#d99a00", "#e0561b")  # low to high; readable on white and on black
_NUM_COLOURS = 24
_RESULTS = ("tau", "speedup")  # the last columns of the parallel plot
_MAX_TICKS = 6  # of a column with a list of values
_MAX_THICK = 40  # trials that the parallel plot draws with thick lines
_MAX_UNSLANTED_WORDS = 4  # names of columns: more of them are slanted to fit
_MAX_UNSLANTED_LETTERS = 14  # of a name: if one is longer, all are slanted
_NUM_HIGHLIGHTED = 8  # best trials of the rank plot, with thick lines and names
_MAX_NAMED = 40  # trials in a rank plot whose lines are far enough apart for names
_MAX_RANK_TICKS = 12


class _Tick(NamedTuple):
    """A label beside a column."""

    height: float
    text: str


@dataclass(frozen=True)
class _Column:
    """A vertical axis of the parallel plot, for a key that was chosen or for a result."""

    word: str
    heights: list[float]  # where the line of each trial crosses it, between 0 and 1
    ticks: list[_Tick]


@dataclass(frozen=True)
class _TrialLine:
    """The line of one trial in the parallel plot."""

    heights: list[float]  # column by column
    objective: float
    is_whole: bool  # whether the trial came to the last rung


@dataclass(frozen=True)
class _Parallel:
    """What the parallel plot shows."""

    columns: list[_Column]
    lines: list[_TrialLine]  # the best trial last, so that its line is on top
    objective_word: str


def parallel_plot(search: SearchTrials) -> Plot:
    """Plot each trial as a line through the values that were chosen for it and the results that it reached."""
    name, title = "parallel", "What was chosen, and what came of it"
    trials = [trial for trial in reversed(search.ranked) if _has_results(trial)]
    if not trials:
        return Plot(name, title, "", missing="no trial was measured")
    keys = [key for key, dimension in search.space.items() if isinstance(dimension, Range) or key in search.lists]
    if not keys:
        return Plot(name, title, "", missing="no key has more than one value")
    columns = [_chosen_column(search, key, trials) for key in keys]
    columns += [_result_column(key, trials) for key in _RESULTS]
    shown = _Parallel(columns, _trial_lines(search, trials, columns), WORDS[search.objective])
    return Plot(name, title, _describe_parallel(shown), render_svg(name, partial(_draw_parallel, shown), 4.4))


def _has_results(trial: Trial) -> bool:
    return all(figure(trial.last, key) is not None for key in (*_RESULTS, "objective"))


def _chosen_column(search: SearchTrials, key: str, trials: Sequence[Trial]) -> _Column:
    """Place trials by the value chosen for a key: in a list by its position, in a range on the range's own scale."""
    dimension = search.space[key]
    values = [trial.choices[key] for trial in trials]
    if isinstance(dimension, Range):
        heights = [height(dimension, value) for value in values]
        ticks = [_Tick(share, show(at_height(dimension, share))) for share in (0.0, 0.5, 1.0)]
    else:
        last = max(1, len(dimension) - 1)
        heights = [dimension.index(value) / last for value in values]
        step = math.ceil(len(dimension) / _MAX_TICKS)
        labelled = range(0, len(dimension), step)
        ticks = [_Tick(index / last, shorten(show(dimension[index]), 12)) for index in labelled]
    return _Column(short(key, search.space), heights, ticks)


def _result_column(key: str, trials: Sequence[Trial]) -> _Column:
    """Place trials by a result, from the lowest to the highest; in the middle if all reached the same."""
    values = [figure(trial.last, key) or 0.0 for trial in trials]
    low, high = min(values), max(values)
    if low == high:
        return _Column(WORDS[key], [0.5] * len(values), [_Tick(0.5, number(low))])
    heights = [(value - low) / (high - low) for value in values]
    ticks = [_Tick(share, number(low + share * (high - low))) for share in (0.0, 0.5, 1.0)]
    return _Column(WORDS[key], heights, ticks)


def _trial_lines(search: SearchTrials, trials: Sequence[Trial], columns: Sequence[_Column]) -> list[_TrialLine]:
    lines: list[_TrialLine] = []
    for index, trial in enumerate(trials):
        heights = [column.heights[index] for column in columns]
        lines.append(_TrialLine(heights, trial.rows[-1]["objective"], search.is_whole(trial)))
    return lines


def _draw_parallel(shown: _Parallel, canvas: "Figure") -> None:
    axes = canvas.subplots()
    colours = _colours_for([line.objective for line in shown.lines])
    _draw_trial_lines(shown.lines, colours, axes)
    _draw_columns(shown.columns, axes)
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(shown.columns) - 0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(visible=False)
    bar = canvas.colorbar(colours, ax=axes, orientation="horizontal", aspect=40, pad=0.02)
    bar.set_label(shown.objective_word)
    bar.outline.set_visible(False)  # type: ignore[operator]


def _colours_for(objectives: Sequence[float]) -> "ScalarMappable":
    """Create the colour scale from the lowest to the highest objective."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    scale = LinearSegmentedColormap.from_list("objective", _SCALE, N=_NUM_COLOURS)
    return ScalarMappable(Normalize(min(objectives), max(objectives)), scale)


def _draw_trial_lines(lines: Sequence[_TrialLine], colours: "ScalarMappable", axes: "Axes") -> None:
    """Draw the lines of whole trials solid, and all others thin and dashed."""
    solid: dict[str, Any] = {"linestyle": "-", "linewidth": 1.5 if len(lines) <= _MAX_THICK else 0.9}
    dashed: dict[str, Any] = {"linestyle": "--", "linewidth": 0.8, "alpha": 0.45}
    line_colours = colours.to_rgba(np.array([line.objective for line in lines]))
    for line, colour in zip(lines, line_colours, strict=True):
        axes.plot(range(len(line.heights)), line.heights, color=colour, **(solid if line.is_whole else dashed))


def _draw_columns(columns: Sequence[_Column], axes: "Axes") -> None:
    """Draw a vertical line for every column, with its ticks beside it and its name below."""
    for x, column in enumerate(columns):
        axes.axvline(x, color=INK, linewidth=0.8)
        for tick in column.ticks:
            place = (x, tick.height)
            axes.annotate(tick.text, place, xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    words = [column.word for column in columns]
    is_slanted = len(words) > _MAX_UNSLANTED_WORDS or max(map(len, words)) > _MAX_UNSLANTED_LETTERS
    slant: dict[str, Any] = {"rotation": 30, "ha": "right"} if is_slanted else {}
    axes.set_xticks(range(len(words)), [shorten(word, 22) for word in words], **slant)


def _describe_parallel(shown: _Parallel) -> str:
    description = (
        f"A line for every trial ({len(shown.lines)}), from the values chosen for it to what was measured last, "
        f"coloured by {shown.objective_word}; lists stand in their order, ranges by value (logarithmic for loguniform)."
    )
    num_stopped = sum(not line.is_whole for line in shown.lines)
    if num_stopped:
        description += f" Thin and dashed: those that did not come to the last rung ({num_stopped})."
    return description


class _Measured(NamedTuple):
    """A trial, and what was measured on each rung that it came to."""

    trial: Trial
    rows_by_rung: dict[int, TrialRow]


@dataclass(frozen=True)
class _RankLine:
    """The line of one trial in the rank plot."""

    ranks: list[int]  # rung by rung; 1 is best
    name: str | None  # written at the end of the line, if at all

    @property
    def last_rank(self) -> int:
        """The rank on the last rung."""
        return self.ranks[-1]


@dataclass(frozen=True)
class _Ranks:
    """What the rank plot shows."""

    rungs: list[int]
    tokens: list[int]  # training tokens of each rung
    lines: list[_RankLine]  # ordered by their ranks on the last rung, the best first


def rank_plot(search: SearchTrials, ranks: Sequence[RankAgreement]) -> Plot:
    """Plot the rank of every trial on each rung: if lines cross, an early order was not the last one.

    Args:
        search: the trials.
        ranks: a row for every rung that was compared with the last one, as summary.json has them.
    """
    name, title = "ranks", "Could it have been told early?"
    rungs = _rungs_to_show(search, ranks)
    if len(rungs) < 2:
        return Plot(name, title, "", missing="trials were measured at one rung alone")
    trials = _trials_measured_on(rungs, search)
    if len(trials) < 2:
        return Plot(name, title, "", missing="fewer than two trials came to the last rung")
    tokens = [trials[0].rows_by_rung[rung].get("rung_tokens", 0) for rung in rungs]
    shown = _Ranks(rungs, tokens, _rank_lines(search, trials, rungs))
    description = (
        f"The {len(trials)} trials that came to the last rung, ranked among themselves at each rung. Lines that do not "
        f"cross: the early order was the last one. The best are named by {search.naming}."
    )
    svg = render_svg(name, partial(_draw_ranks, shown), 1.2 + min(4.5, 0.24 * max(6, len(trials))))
    return Plot(name, title, description, svg)


def _rungs_to_show(search: SearchTrials, ranks: Sequence[RankAgreement]) -> list[int]:
    """List the rungs that were compared, and the highest rung that any trial came to."""
    rungs = [rank["rung"] for rank in ranks]
    highest = max((row["rung"] for trial in search.trials for row in trial.rows), default=0)
    return rungs if highest in rungs else [*rungs, highest]


def _trials_measured_on(rungs: Sequence[int], search: SearchTrials) -> list[_Measured]:
    """Select the trials that have an objective on every one of the rungs."""
    trials = [_Measured(trial, {row["rung"]: row for row in trial.rows}) for trial in search.trials]
    return [trial for trial in trials if all(_has_objective(trial, rung) for rung in rungs)]


def _has_objective(trial: _Measured, rung: int) -> bool:
    return rung in trial.rows_by_rung and figure(trial.rows_by_rung[rung], "objective") is not None


def _rank_lines(search: SearchTrials, trials: Sequence[_Measured], rungs: Sequence[int]) -> list[_RankLine]:
    """Rank the trials on every rung, and name the best of the last rung if the lines are far enough apart."""
    ranks_by_rung = [_ranks_on(rung, trials) for rung in rungs]
    lines: list[_RankLine] = []
    for index, measured in enumerate(trials):
        ranks = [ranks_of_trials[index] for ranks_of_trials in ranks_by_rung]
        is_named = len(trials) <= _MAX_NAMED and ranks[-1] <= _NUM_HIGHLIGHTED
        lines.append(_RankLine(ranks, search.brief(measured.trial, 26) if is_named else None))
    return sorted(lines, key=lambda line: line.last_rank)


def _ranks_on(rung: int, trials: Sequence[_Measured]) -> list[int]:
    """Rank the trials by their objective on one rung; the ranks are in the order of the trials."""
    best_first = sorted(range(len(trials)), key=lambda index: -trials[index].rows_by_rung[rung]["objective"])
    ranks = [0] * len(trials)
    for rank, index in enumerate(best_first, start=1):
        ranks[index] = rank
    return ranks


def _draw_ranks(shown: _Ranks, canvas: "Figure") -> None:
    axes = canvas.subplots()
    _draw_rank_lines(shown.lines, axes)
    num_rungs, num_lines = len(shown.rungs), len(shown.lines)
    labels = [f"rung {rung}\n{tokens:,.0f}" for rung, tokens in zip(shown.rungs, shown.tokens, strict=True)]
    axes.set_xticks(range(num_rungs), labels)
    axes.set_xlim(-0.15, (num_rungs - 1) * 1.75)  # room for the names
    axes.set_ylim(num_lines + 0.5, 0.5)
    axes.set_yticks(range(1, num_lines + 1, math.ceil(num_lines / _MAX_RANK_TICKS)))
    axes.set_ylabel("rank by objective, 1 is best")
    axes.set_xlabel("training tokens", loc="left")
    axes.spines["bottom"].set_visible(False)


def _draw_rank_lines(lines: Sequence[_RankLine], axes: "Axes") -> None:
    """Draw the lines of the best trials thick, with their names, and the line of the very best last, on top."""
    from matplotlib.colors import LinearSegmentedColormap

    scale = LinearSegmentedColormap.from_list("rank", _SCALE[::-1], N=_NUM_COLOURS)
    thick: dict[str, Any] = {"marker": "o", "linewidth": 1.6}
    thin: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.6}
    for line in reversed(lines):
        colour = scale((line.last_rank - 1) / max(1, len(lines) - 1))
        style = thick if line.last_rank <= _NUM_HIGHLIGHTED else thin
        axes.plot(range(len(line.ranks)), line.ranks, color=colour, **style)
        if line.name is not None:
            end = (len(line.ranks) - 1, line.last_rank)
            axes.annotate(line.name, end, xytext=(7, 0), textcoords="offset points", va="center", fontsize=8,
                          annotation_clip=False)  # fmt: skip
