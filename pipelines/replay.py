"""Measure how many tokens drafters would be accepted for, without the target: over a log of what it has written.

    python -m pipelines.replay record configs/targets/smollm2.yaml configs/replay/record-smollm2.yaml
    python -m pipelines.replay configs/replay/smollm2.yaml
    python -m pipelines.replay import prompts=hellaswag.json outputs=llama-65b.txt tokenizer=FOLDER output=runs/log

A log holds the target's continuations, what drafters read of them, and the target's head and tokenizer. The acceptance
of every cycle is that of live decoding, with log and drafter in float32. A replay says nothing of speed.
"""

import sys

from moray.bench.recording import reported
from moray.bench.replay.configs import ImportConfig, RecordConfig, ReplayConfig
from moray.commands import Command, run_commands


def main(config: ReplayConfig) -> None:
    """Replay drafters and trees over a log, without its target."""
    from moray.bench.replay.evaluation import replay
    from moray.console import open_console

    reported(config.report, lambda: replay(config, open_console()))


def main_record(config: RecordConfig) -> None:
    """Write a log of a target's continuations, or go on with one."""
    from moray.bench.replay.record import record

    made = record(config)
    print(f"{made['output']}: {made['continuations']} continuations, {made['tokens']:,} tokens")


def main_import(config: ImportConfig) -> None:
    """Make a log of continuations that another program has written."""
    from moray.bench.replay.imported import import_log

    made = import_log(config)
    print(
        f"{made['output']}: {made['continuations']} continuations of {made['prompts']} prompts, "
        f"{made['tokens']:,} tokens"
    )
    if made["agreement"] is not None:
        print(f"{made['agreement']:.2%} of these tokens are the target's own greedy choice")
        if made["agreement"] < 0.99:
            print("warning: another target, or another number format, has written these continuations")


CONFIG = ReplayConfig
COMMANDS = {
    "": Command(ReplayConfig, main),
    "record": Command(RecordConfig, main_record),
    "import": Command(ImportConfig, main_import),
}

if __name__ == "__main__":
    run_commands(COMMANDS, __doc__ or "", sys.argv[1:])
