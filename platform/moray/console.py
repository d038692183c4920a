"""Where commands print tables: as wide as the terminal, and wide enough for a table in a log."""

import os

from rich.console import Console

_LOG_WIDTH = 160


def open_console() -> Console:
    """A console on standard output. Without any terminal, as in a Ray job, it has 160 columns unless COLUMNS is set;
    rich's default of 80 would cut tables."""
    has_terminal = any(os.isatty(descriptor) for descriptor in (0, 1, 2))
    return Console(width=None if has_terminal or "COLUMNS" in os.environ else _LOG_WIDTH)
