"""The plots of a sweep over decoding choices: the objective of each way to decode, and gain against cost.

Each drafter gets both plots, because only the winners of different drafters are compared. A plot without figures is
replaced by the reason. This module does not depend on the page.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moray.bench.reports.drawing import (
    COLOURS,
    Plot,
    annotate,
    bar_height,
    labelled_bars,
    legend_below,
    legend_height,
    shorten,
)
from moray.bench.reports.svg import INK, render_svg
from moray.bench.reports.wording import number
from sweeps.decoding.results import spread_of
from sweeps.decoding.summaries import FinalistRow
from sweeps.reports.plots import front_plot
from sweeps.reports.results import Trial
from sweeps.reports.views import WORDS, figure
from sweeps.tuning.configs import Objective

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_BARS = 24
_FADED = 0.3
_FINALIST, _WHOLE, _STOPPED = "finalist, in the search", "asked all questions", "asked fewer questions"
_AGAIN = "finalist, side by side"


def draw_plots(
    groups: Mapping[str, Sequence[Trial]],
    finalists: Mapping[str, Sequence[FinalistRow]],
    objective: Objective,
    top: int,
) -> list[Plot]:
    """Draw the plots for each drafter.

    Args:
        groups: trials by drafter, ranked by rung and then by objective, best first.
        finalists: rows of the final side-by-side measurement by drafter, as in summary.json.
        objective: objective of the sweep.
        top: the highest rung.
    """
    found = []
    for index, (drafter, trials) in enumerate(groups.items()):
        found.append(_bars(f"objective-{index}", drafter, trials, finalists.get(drafter, ()), objective, top))
        found.append(
            front_plot(
                f"pareto-{index}",
                f"{drafter}: what is gained, and what drafting costs",
                trials,
                lambda trial: trial.rows[-1]["rung"] == top,
                lambda trial: shorten(short_name(trial.name, trial.choices["drafter"]), 46),
                "tree and size of the draft vocabulary (where it is not the trained one)",
            )
        )
    return found


def short_name(name: str, drafter: str) -> str:
    """The name of a combination without its drafter."""
    return name.removeprefix(f"{drafter}, ")


def _bars(
    name: str,
    drafter: str,
    trials: Sequence[Trial],
    finalists: Sequence[FinalistRow],
    objective: Objective,
    top: int,
) -> Plot:
    """Draw a bar for every measured trial in the order of the table; pale if it was asked fewer questions."""
    word = WORDS[objective]
    title = f"{drafter}: {word} by way to decode"
    measured = [trial for trial in trials if figure(trial.last, "objective") is not None]
    if not measured:
        return Plot(name, title, "", missing=f"no trial has a {word}")
    shown = measured[:_MAX_BARS]
    again = {row["name"]: row for row in finalists}
    kinds = {trial.name: _kind(trial, again, top) for trial in shown}
    legend = [kind for kind in (_FINALIST, _WHOLE, _STOPPED) if kind in kinds.values()]
    legend += [_AGAIN] if any(trial.name in again for trial in shown) else []

    def draw(canvas: "Figure") -> None:
        axes = labelled_bars(canvas, [shorten(short_name(trial.name, drafter)) for trial in shown])
        handles: dict[str, Any] = dict.fromkeys(legend)
        for index, trial in enumerate(shown):
            value, spread = figure(trial.last, "objective") or 0.0, spread_of(objective, trial.last) or []
            kind = kinds[trial.name]
            bar = axes.barh(index, value, height=0.36, **_look(kind, trial.rows[-1]["rung"] == top))
            handles[kind] = handles[kind] or bar
            axes.plot(spread, [index] * len(spread), color=INK, linewidth=1.2, marker="|", markersize=6)
            end, text = max(value, *spread), number(value)
            if trial.name in again:
                row = again[trial.name]
                ends = row["spread"] or []
                place = index + 0.27
                axes.plot(ends, [place] * len(ends), color=COLOURS[3], linewidth=1.2, marker="|", markersize=6)
                handles[_AGAIN] = axes.plot([row["objective"]], [place], "D", color=COLOURS[3], markersize=5)[0]
                end, text = max(end, row["objective"], *ends), f"{text}, then {number(row['objective'])}"
            annotate(axes, text, end, index)
        if objective == "speedup":
            axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, axes.get_xlim()[1] * 1.3)  # room for the last label
        axes.set_xlabel(f"{word} (dotted line: no gain)" if objective == "speedup" else word)
        legend_below(canvas, handles)

    description = _description(shown, len(measured), word, top, again)
    return Plot(name, title, description, render_svg(name, draw, bar_height(len(shown)) + legend_height(legend)))


def _kind(trial: Trial, again: Mapping[str, FinalistRow], top: int) -> str:
    if trial.name in again:
        return _FINALIST
    return _WHOLE if trial.rows[-1]["rung"] == top else _STOPPED


def _look(kind: str, is_whole: bool) -> dict[str, Any]:
    colour = COLOURS[1] if kind == _FINALIST else COLOURS[0]
    return {"color": colour, "alpha": 1 if is_whole else _FADED}


def _description(
    shown: Sequence[Trial], num_measured: int, word: str, top: int, again: Mapping[str, FinalistRow]
) -> str:
    best = shown[0]
    text = (
        f"A bar for every way to decode, on the highest rung that it came to: its {word} in the search. Thin line: "
        f"95 % interval by bootstrap over the prompts, where it is known. First: {best.name} with "
        f"{number(figure(best.last, 'objective'))}."
    )
    if any(trial.name in again for trial in shown):
        text += " Diamond: what finalists came to when they were measured again side by side, which alone decides."
    if any(trial.rows[-1]["rung"] < top for trial in shown):
        text += " Pale: stopped early, asked fewer questions than the others, and not comparable with them."
    if num_measured > len(shown):
        text += f" The last {num_measured - len(shown)} are left out here; the table has them."
    return text
