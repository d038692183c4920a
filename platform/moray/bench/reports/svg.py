"""Draws a figure as SVG that can be embedded in a page.

Text stays text and takes the colour of the page (light or dark), ids are unique within the page, nothing is loaded from
elsewhere, and the output is deterministic. This module does not depend on what is plotted.
"""

import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"  # placeholder for the page's text colour; becomes `currentColor` in the SVG
_WIDTH = 5.2  # inches at 72 units each: 374 units, about a phone's width
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text: selectable, in the page's colour
    "svg.hashsalt": "moray",  # fixed ids: the same report gives the same page
    "text.parse_math": False,  # a "$" in a name is a dollar sign
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
    """Run `draw` on a new figure and return its SVG, ready to embed in a page."""
    import matplotlib as mpl  # imported only when plotting, because it takes a second
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
    """Reduce the file to its <svg> element, with ids unique within the page, text in its colour and width up to it."""
    svg = svg[svg.index("<svg") :].strip()
    head, _, body = svg.partition(">")
    view = re.search(r'viewBox="[^"]*"', head)
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'(<[a-zA-Z][^<>]*?\sid=")', rf"\g<1>{name}-", body)
    body = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{name}-", body)
    body = body.replace("xlink:href", "href").replace(INK, "currentColor")
    label = f'role="img" aria-labelledby="{name}-title" aria-describedby="{name}-description"'
    return f"<svg {view[0] if view else ''} {label}>{body}"
