"""What the plots of every report share: colours, markers, names that fit and legends that stand apart.

This module refuses to know what is plotted.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0a7fc2", "#e08a00", "#009e73", "#d9480f", "#b75fa5", "#6a7f96")  # apart for the colour-blind as well
LABEL_LENGTH = 52
_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Plot:
    """One picture of the page; `missing` says why there is none."""

    name: str
    title: str
    description: str  # what a reader who cannot see it should know
    svg: str | None = None
    missing: str | None = None


def line(index: int) -> dict[str, Any]:
    """Colour, dash and marker of one of several lines."""
    dash = _DASHES[(index // len(COLOURS)) % len(_DASHES)]
    marker = _MARKERS[index % len(_MARKERS)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dash, "marker": marker}


def shorten(name: str, length: int = LABEL_LENGTH) -> str:
    """A name that fits, and that matplotlib shows."""
    name = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    if name.startswith("_"):
        name = " " + name  # matplotlib would hide it from legends
    return name if len(name) <= length else name[: length - 1] + "…"


def labelled_bars(figure: "Figure", names: Sequence[str]) -> "Axes":
    """Axes for horizontal bars, first on top, each under its own name: long names need no margin."""
    axes = figure.subplots()
    axes.set_yticks([])
    axes.set_ylim(len(names) - 0.6, -0.7)
    for index, name in enumerate(names):
        place = axes.get_yaxis_transform()
        axes.text(0.0, index - 0.24, " " + name, transform=place, va="bottom", fontsize=9.5)
    return axes


def bar_height(num_bars: int) -> float:
    """Inches that they take."""
    return 0.6 + 0.48 * num_bars


def annotate(axes: "Axes", text: str, end: float, index: float) -> None:
    """Text behind the end of a bar."""
    axes.annotate(text, (end, index), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9.5)


def legend_below(figure: "Figure", handles: dict[str, Any]) -> None:
    """One legend for all panels, below them."""
    figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=_legend_columns(handles))


def legend_height(names: Collection[str]) -> float:
    """Inches that it takes."""
    return 0.15 + 0.21 * -(-len(names) // _legend_columns(names))


def _legend_columns(names: Collection[str]) -> int:
    return 2 if max(map(len, names)) <= 20 else 1
