"""Say what one or many sweeps have found, finished or not: winners, how sure, and what each value was worth.

    python -m sweeps.summarize runs/sweeps/target-layer-and-mask-width runs/sweeps/decoding-demo

Takes any number of folders of `sweeps.tune` and `sweeps.tune_decoding`; reads them, changes nothing, and may run beside
a sweep. With `--json out.json` the figures are written as well: those of the first kind as `sweeps`, of the other as
`decoding`.
"""

import sys

from pydantic import Field

from moray.commands import Command
from moray.config import Config, run_command


class SummarizeConfig(Config):
    """Which sweeps to look at."""

    sweeps: tuple[str, ...] = Field(min_length=1)
    """Folders of the sweeps."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


def main(config: SummarizeConfig) -> None:
    """Print the sweeps side by side, those of trainings with the worth of every value."""
    from pathlib import Path

    from rich.console import Console

    from moray.provenance import write_json_atomically
    from sweeps.decoding.overview import decoding_overview, is_decoding, print_decoding_overviews
    from sweeps.reports.overview import overview, print_overviews

    console = Console()
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
