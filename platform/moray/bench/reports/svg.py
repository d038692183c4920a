"""Draws a figure as SVG that can stand inside a page.

Text stays text and takes the colour of the page (light and dark alike), ids are unique within the page, and
nothing is fetched from elsewhere; a page that is written twice is the same twice. This module refuses to
know what is plotted.
"""

import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"  # stands for the page's text colour; replaced by `currentColor` in the SVG
_WIDTH = 5.2  # inches at 72 units each: 374 units, about a phone's width
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text as text: selectable, in the page's colour
    "svg.hashsalt": "moray",  # the same report gives the same page
    "text.parse_math": False,  # a "$" in a name is a dollar
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}


def render_svg(name: str, draw: Callable[["Figure"], None], height: float) -> str:
    """Run a painter on a fresh figure and return its SVG, ready to stand inside a page."""
    import matplotlib as mpl  # only when plotting: it takes a second
    from matplotlib.figure import Figure

    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the page's font has it
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return _embed(buffer.getvalue(), name)


def _embed(svg: str, name: str) -> str:
    """The bare <svg> element: ids unique within the page, ink in the page's colour, width up to the page."""
    svg = svg[svg.index("<svg") :].strip()
    head, _, body = svg.partition(">")
    view = re.search(r'viewBox="[^"]*"', head)
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'(<[a-zA-Z][^<>]*?\sid=")', rf"\g<1>{name}-", body)
    body = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{name}-", body)
    body = body.replace("xlink:href", "href").replace(INK, "currentColor")
    label = f'role="img" aria-labelledby="{name}-title" aria-describedby="{name}-description"'
    return f"<svg {view[0] if view else ''} {label}>{body}"
