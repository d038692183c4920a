"""Where commands print tables: as wide as the terminal, and wide enough for a table in a log."""

import os
import sys

from rich.console import Console

_LOG_WIDTH = 160


def open_console() -> Console:
    """A console on standard output. Where that is no terminal, as in the log of a Ray job, it has 160 columns unless
    COLUMNS is set; rich's default of 80 would cut tables."""
    is_redirected = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_LOG_WIDTH if is_redirected else None)
