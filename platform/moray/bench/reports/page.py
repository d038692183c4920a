"""Renders a self-contained HTML page from a template, with the style that all our reports share.

All inserted values are escaped. The page needs no network, no script and no other file. This module does not depend on
the content of the page.
"""

from importlib import resources
from typing import Any

import jinja2

from moray.bench.reports.wording import count, duration, interval, number, percent, temperature, times


def render_page(package: str, template: str, **values: Any) -> str:
    """Fill in a template that is stored in a package."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=number, times=times, percent=percent, count=count,
        temperature=temperature, duration=duration, interval=interval,
    )  # fmt: skip
    text = _read(package, template)
    return environment.from_string(text).render(style=_read("moray.bench.reports", "page.css").strip(), **values)


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
