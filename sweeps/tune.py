"""Find the drafter settings that decode fastest, with Ray Tune.

    python -m sweeps.tune configs/sweeps/target-layer-and-mask-width.yaml

Writes summary.json, sweep.parquet, report.html and best/ (the winning drafter) into `output`. After a kill, the same
command with --resume continues without repeating measurements.
"""

import sys

from moray.config import run_entry_point
from sweeps.trainings.configs import SweepConfig
from sweeps.tuning.spaces import corners_of


def main(config: SweepConfig) -> None:
    """Run or resume the sweep, then print the winner."""
    from moray.bench.lossless import check_lossless
    from moray.cluster.session import ray_session
    from moray.console import open_console
    from moray.provenance import read_json
    from sweeps.reports.lossless import lossless_rows
    from sweeps.trainings.console import print_summary

    for choices in corners_of(config.space):  # reports misspelt keys before Ray starts
        config.trial(choices)
    console = open_console()
    with ray_session(config.ray):
        from sweeps.trainings.run import is_complete, run_sweep, summary_path

        done = is_complete(config)
        if done:
            console.print("this sweep is finished: its answer as it was", highlight=False)
        summary = read_json(summary_path(config)) if done else run_sweep(config, console)
    print_summary(summary, console)
    check_lossless(lossless_rows(summary))


CONFIG = SweepConfig

if __name__ == "__main__":
    words = ["resume=true" if word == "--resume" else word for word in sys.argv[1:]]
    run_entry_point(CONFIG, __doc__ or "", main, words, again="the same command with --resume continues")
