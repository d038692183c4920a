"""Two plots of which trials come first: by the values chosen for them, and rung by rung."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moray.bench.reports.drawing import Plot, shorten
from moray.bench.reports.svg import INK, render_svg
from moray.bench.reports.wording import number
from sweeps.reports.results import Trial
from sweeps.reports.views import WORDS, Searched, at_height, figure, height
from sweeps.tuning.spaces import Range, short, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SCALE = ("#8796ab", "#2f7fc4", "#009e8f", "#d99a00", "#e0561b")  # readable on white and on black
_NUM_TICKS = 6
_NUM_NAMED = 8
_PALE = 0.25


def parallel_plot(search: Searched) -> Plot:
    """A line for every trial, through what was chosen for it and what came out."""
    name, title = "parallel", "What was chosen, and what came of it"
    results = ["tau", "speedup"]
    keys = [key for key, values in search.space.items() if isinstance(values, Range) or key in search.lists]
    trials = [
        trial for trial in search.ranked if all(figure(trial.last, key) is not None for key in (*results, "objective"))
    ][::-1]
    if not trials or not keys:
        return Plot(name, title, "", missing="no key has more than one value" if trials else "no trial was measured")

    def draw(canvas: "Figure") -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LinearSegmentedColormap, Normalize

        axes = canvas.subplots()
        objectives = [trial.last["objective"] for trial in trials]
        scale = LinearSegmentedColormap.from_list("objective", _SCALE, N=24)
        colours = ScalarMappable(Normalize(min(objectives), max(objectives)), scale)
        columns = [_chosen(search, key, trials) for key in keys] + [_reached(key, trials) for key in results]
        for index, trial in enumerate(trials):
            whole = search.is_whole(trial)
            thick = 1.5 if len(trials) <= 40 else 0.9
            style: dict[str, Any] = {"linewidth": thick} if whole else {"linewidth": 0.8, "alpha": 0.45}
            axes.plot(
                range(len(columns)), [heights[index] for heights, _ in columns],
                color=colours.to_rgba(trial.last["objective"]), linestyle="-" if whole else "--", **style,
            )  # fmt: skip
        for x, (_, ticks) in enumerate(columns):
            axes.axvline(x, color=INK, linewidth=0.8)
            for place, text in ticks:
                axes.annotate(text, (x, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        words = [short(key, search.space) for key in keys] + [WORDS[key] for key in results]
        slanted = len(words) > 4 or max(map(len, words)) > 14
        axes.set_xticks(
            range(len(words)), [shorten(word, 22) for word in words],
            **({"rotation": 30, "ha": "right"} if slanted else {}),
        )  # fmt: skip
        axes.set_yticks([])
        axes.set_xlim(-0.1, len(words) - 0.6)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.grid(visible=False)
        bar = canvas.colorbar(colours, ax=axes, orientation="horizontal", aspect=40, pad=0.02)
        bar.set_label(WORDS[search.objective])
        bar.outline.set_visible(False)  # type: ignore[operator]

    stopped = sum(not search.is_whole(trial) for trial in trials)
    description = (
        f"A line for every trial ({len(trials)}), from the values chosen for it to what was measured last, coloured "
        f"by {WORDS[search.objective]}; lists stand in their order, ranges by value (logarithmic for loguniform)."
    )
    if stopped:
        description += f" Thin and dashed: those that did not come to the last rung ({stopped})."
    return Plot(name, title, description, render_svg(name, draw, 4.4))


_Column = tuple[list[float], list[tuple[float, str]]]
"""Where every trial stands between 0 and 1, and the labels."""


def _chosen(search: Searched, key: str, trials: Sequence[Trial]) -> _Column:
    dimension = search.space[key]
    values = [trial.choices[key] for trial in trials]
    if isinstance(dimension, Range):
        ticks = [(share, show(at_height(dimension, share))) for share in (0.0, 0.5, 1.0)]
        return [height(dimension, value) for value in values], ticks
    last = max(1, len(dimension) - 1)
    step = -(-len(dimension) // _NUM_TICKS)
    ticks = [(index / last, shorten(show(dimension[index]), 12)) for index in range(0, len(dimension), step)]
    return [dimension.index(value) / last for value in values], ticks


def _reached(key: str, trials: Sequence[Trial]) -> _Column:
    values = [figure(trial.last, key) or 0.0 for trial in trials]
    low, high = min(values), max(values)
    if low == high:
        return [0.5] * len(values), [(0.5, number(low))]
    ticks = [(share, number(low + share * (high - low))) for share in (0.0, 0.5, 1.0)]
    return [(value - low) / (high - low) for value in values], ticks


def rank_plot(search: Searched, ranks: Sequence[Mapping[str, Any]]) -> Plot:
    """Lines from rung to rung; where they cross, an early order was not the last one."""
    name, title = "ranks", "Could it have been told early?"
    numbers = [rank["rung"] for rank in ranks]
    last = max((row["rung"] for trial in search.trials for row in trial.rows), default=0)
    numbers = [*numbers, last] if last not in numbers else numbers
    by_trial = [({row["rung"]: row for row in trial.rows}, trial) for trial in search.trials]
    by_trial = [
        (rows, trial)
        for rows, trial in by_trial
        if all(number in rows and figure(rows[number], "objective") is not None for number in numbers)
    ]
    if len(numbers) < 2:
        return Plot(name, title, "", missing="trials were measured at one rung alone")
    if len(by_trial) < 2:
        return Plot(name, title, "", missing="fewer than two trials came to the last rung")
    orders = {
        number: sorted(range(len(by_trial)), key=lambda i: -by_trial[i][0][number]["objective"]) for number in numbers
    }
    final = orders[numbers[-1]]

    def draw(canvas: "Figure") -> None:
        from matplotlib.colors import LinearSegmentedColormap

        axes = canvas.subplots()
        scale = LinearSegmentedColormap.from_list("rank", _SCALE[::-1], N=24)
        for place, index in reversed(list(enumerate(final))):
            colour = scale(place / max(1, len(final) - 1))
            heights = [orders[number].index(index) + 1 for number in numbers]
            best = place < _NUM_NAMED
            style: dict[str, Any] = {"marker": "o", "linewidth": 1.6} if best else {"linewidth": 0.8, "alpha": 0.6}
            axes.plot(range(len(numbers)), heights, color=colour, **style)
            if best and len(final) <= 40:
                text = search.brief(by_trial[index][1], 26)
                axes.annotate(text, (len(numbers) - 1, place + 1), xytext=(7, 0), textcoords="offset points",
                              va="center", fontsize=8, annotation_clip=False)  # fmt: skip
        tokens = [by_trial[0][0][number]["rung_tokens"] for number in numbers]
        axes.set_xticks(range(len(numbers)), [f"rung {n}\n{t:,.0f}" for n, t in zip(numbers, tokens, strict=True)])
        axes.set_xlim(-0.15, (len(numbers) - 1) * 1.75)
        axes.set_ylim(len(final) + 0.5, 0.5)
        axes.set_yticks(range(1, len(final) + 1, -(-len(final) // 12)))
        axes.set_ylabel("rank by objective, 1 is best")
        axes.set_xlabel("training tokens", loc="left")
        axes.spines["bottom"].set_visible(False)

    description = (
        f"The {len(final)} trials that came to the last rung, ranked among themselves at each rung. Lines that do not "
        f"cross: the early order was the last one. The best are named by {search.naming}."
    )
    return Plot(name, title, description, render_svg(name, draw, 1.2 + min(4.5, 0.24 * max(6, len(final)))))
