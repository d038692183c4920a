"""Shared parts of all report plots: colours, markers, shortened names and legends.

This module does not depend on what is plotted.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0a7fc2", "#e08a00", "#009e73", "#d9480f", "#b75fa5", "#6a7f96")  # distinct for colour-blind readers too
LABEL_LENGTH = 52
_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Plot:
    """One plot of the page; `missing` gives the reason if there is none."""

    name: str
    title: str
    description: str  # alternative text for readers who cannot see the plot
    svg: str | None = None
    missing: str | None = None


def line(index: int) -> dict[str, Any]:
    """Colour, dash style and marker of the line with this index."""
    dash = _DASHES[(index // len(COLOURS)) % len(_DASHES)]
    marker = _MARKERS[index % len(_MARKERS)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dash, "marker": marker}


def shorten(name: str, length: int = LABEL_LENGTH) -> str:
    """Shorten a name to fit, and make sure that matplotlib displays it."""
    name = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    if name.startswith("_"):
        name = " " + name  # matplotlib hides labels that start with an underscore from legends
    return name if len(name) <= length else name[: length - 1] + "…"


def labelled_bars(figure: "Figure", names: Sequence[str]) -> "Axes":
    """Create axes for horizontal bars, the first on top, each below its own name, so that long names need no margin."""
    axes = figure.subplots()
    axes.set_yticks([])
    axes.set_ylim(len(names) - 0.6, -0.7)
    for index, name in enumerate(names):
        place = axes.get_yaxis_transform()
        axes.text(0.0, index - 0.24, " " + name, transform=place, va="bottom", fontsize=9.5)
    return axes


def bar_height(num_bars: int) -> float:
    """Height in inches that this many bars take."""
    return 0.6 + 0.48 * num_bars


def annotate(axes: "Axes", text: str, end: float, index: float) -> None:
    """Write text next to the end of a bar."""
    axes.annotate(text, (end, index), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9.5)


def legend_below(figure: "Figure", handles: dict[str, Any]) -> None:
    """Draw one legend for all panels below them."""
    figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=_legend_columns(handles))


def legend_height(names: Collection[str]) -> float:
    """Height in inches of a legend with these names."""
    return 0.15 + 0.21 * -(-len(names) // _legend_columns(names))


def _legend_columns(names: Collection[str]) -> int:
    return 2 if max(map(len, names)) <= 20 else 1
