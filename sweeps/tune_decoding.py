"""Find the tree and draft vocabulary with which trained drafters decode fastest, by measurement with Ray Tune.

    python -m sweeps.tune_decoding configs/sweeps/decoding-demo.yaml

Nothing is trained. Writes summary.json, sweep.parquet, report.html and a best-<drafter>.yaml per drafter into `output`;
append the latter to the files of pipelines.evaluate. After a kill, the same command with --resume continues without
asking answered questions again.

On a machine without GPUs only one measurement runs at a time (max_concurrent), because parallel ones distort each
other's timings; keep other load off the machine, too.
"""

import sys

from moray.config import run_entry_point
from sweeps.decoding.configs import TuneDecodingConfig


def main(config: TuneDecodingConfig) -> None:
    """Run or resume the sweep, then print the winners."""
    from pathlib import Path

    from moray.bench.lossless import check_lossless
    from moray.cluster.session import ray_session
    from moray.console import open_console
    from moray.provenance import read_json
    from sweeps.decoding.console import print_decoding
    from sweeps.reports.lossless import lossless_rows
    from sweeps.tuning.resume import SUMMARY_FILE

    console = open_console()
    with ray_session(config.ray):
        from sweeps.decoding.run import is_complete, run_decoding

        done = is_complete(config)
        if done:
            console.print("this sweep is finished: its answer as it was", highlight=False)
        summary = read_json(Path(config.output) / SUMMARY_FILE) if done else run_decoding(config, console)
    print_decoding(summary, console)
    check_lossless(lossless_rows(summary))


CONFIG = TuneDecodingConfig

if __name__ == "__main__":
    words = ["resume=true" if word == "--resume" else word for word in sys.argv[1:]]
    run_entry_point(CONFIG, __doc__ or "", main, words, again="the same command with --resume continues")
