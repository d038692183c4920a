"""Compare sparse targets with Ray Tune: how much quality each share of the layers and each kind of router costs.

    python -m sweeps.tune_sparse configs/sweeps/sparse-demo.yaml

Writes summary.json, sweep.parquet and report.html into `output`; the folder of every finished trial below it is a
sparse target. After a kill, the same command with --resume continues without training anything twice.
"""

import sys

from moray.config import run_entry_point
from sweeps.sparse.configs import SparseSweepConfig
from sweeps.tuning.spaces import corners_of


def main(config: SparseSweepConfig) -> None:
    """Run or resume the sweep, then print its trials."""
    from pathlib import Path

    from moray.cluster.session import ray_session
    from moray.console import open_console
    from moray.provenance import read_json
    from sweeps.sparse.results import print_sparse_summary
    from sweeps.tuning.resume import SUMMARY_FILE

    for choices in corners_of(config.space):  # reports misspelt keys before Ray starts
        config.trial(choices)
    console = open_console()
    with ray_session(config.ray):
        from sweeps.sparse.run import is_complete, run_sparse_sweep

        done = is_complete(config)
        if done:
            console.print("this sweep is finished; these are its stored results", highlight=False)
        summary = read_json(Path(config.output) / SUMMARY_FILE) if done else run_sparse_sweep(config, console)
    print_sparse_summary(summary, console)


CONFIG = SparseSweepConfig

if __name__ == "__main__":
    words = ["resume=true" if word == "--resume" else word for word in sys.argv[1:]]
    run_entry_point(CONFIG, __doc__ or "", main, words, again="the same command with --resume continues")
