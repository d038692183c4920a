"""Where commands print tables: as wide as the terminal, and wide enough for a table in a log."""

import os
import sys

from rich.console import Console

_LOG_WIDTH = 160


def open_console() -> Console:
    """Standard output. A file, such as the log of a Ray job, gets 160 columns unless COLUMNS says otherwise; rich
    itself would cut tables there to 80."""
    is_log = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_LOG_WIDTH if is_log else None)
