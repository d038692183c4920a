"""Say what one or many sweeps have found, finished or not: winners, how sure, and what each value was worth.

    python -m sweeps.summarize runs/sweeps/target-layer-and-mask-width

Takes any number of folders of `python -m sweeps.tune`; reads them, changes nothing, and may run beside a sweep. With
`--json out.json` the figures are written as well.
"""

import sys

from pydantic import Field

from moray.commands import Command
from moray.config import Config, run_command


class SummarizeConfig(Config):
    """Which sweeps to look at."""

    sweeps: tuple[str, ...] = Field(min_length=1)
    """Their folders."""
    report: str | None = None
    """JSON file to write; the same as `--json FILE`."""


def main(config: SummarizeConfig) -> None:
    """Print the sweeps side by side, then the worth of every value, sweep by sweep."""
    from pathlib import Path

    from rich.console import Console

    from moray.provenance import write_json_atomically
    from sweeps.reports.overview import overview, print_overviews

    overviews = [overview(folder) for folder in config.sweeps]
    print_overviews(overviews, Console())
    if config.report:
        write_json_atomically(Path(config.report), {"sweeps": overviews})


COMMAND = Command(SummarizeConfig, main, folders="sweeps")

if __name__ == "__main__":
    run_command(lambda: COMMAND.main(COMMAND.load(sys.argv[1:], description=__doc__ or "")))
