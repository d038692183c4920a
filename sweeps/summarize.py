"""Summarise sweeps, finished or not: their winners, how certain those are, and the objective by value.

    python -m sweeps.summarize runs/sweeps/target-layer-and-mask-width runs/sweeps/decoding-demo

Takes any number of folders of `sweeps.tune` and `sweeps.tune_decoding`. It only reads them and may run alongside a
sweep. `--json out.json` also writes the figures: those of `sweeps.tune` under `sweeps`, the others under `decoding`.
"""

import sys

from pydantic import Field

from moray.commands import Command
from moray.config import Config, run_command


class SummarizeConfig(Config):
    """The sweeps to summarise."""

    sweeps: tuple[str, ...] = Field(min_length=1)
    """Folders of the sweeps."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


def main(config: SummarizeConfig) -> None:
    """Print an overview of the sweeps; sweeps of trainings also get the objective by value."""
    from pathlib import Path

    from moray.console import open_console
    from moray.provenance import write_json_atomically
    from sweeps.decoding.overview import decoding_overview, is_decoding, print_decoding_overviews
    from sweeps.reports.overview import overview, print_overviews

    console = open_console()
    decoding = [folder for folder in config.sweeps if is_decoding(folder)]
    trained = [overview(folder) for folder in config.sweeps if folder not in decoding]
    decoded = [decoding_overview(folder) for folder in decoding]
    if trained:
        print_overviews(trained, console)
    if decoded:
        print_decoding_overviews(decoded, console)
    if config.report:
        write_json_atomically(Path(config.report), {"sweeps": trained, "decoding": decoded})


COMMAND = Command(SummarizeConfig, main, folders="sweeps")

if __name__ == "__main__":
    run_command(lambda: COMMAND.main(COMMAND.load(sys.argv[1:], description=__doc__ or "")))
