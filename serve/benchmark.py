"""Benchmarks of the application, which they deploy themselves on a Ray of their own; nothing has to run before.

    python -m serve.benchmark scaling --json runs/scaling.json
    python -m serve.benchmark side-by-side --json runs/placement.json
    python -m serve.benchmark side-by-side configs/benchmarks/groups-demo.yaml --json runs/groups.json

`scaling` adds targets and drafters, each alone and together, with passes and drafts of a synthetic cost, and prints
what the model of pools predicts beside what is measured. `side-by-side` asks several applications in turn: without a
YAML file, drafters in a pool against drafters in the target's process.
"""

import sys
from pathlib import Path

from moray.bench.recording import reported
from moray.commands import Command, run_commands
from serve.bench.configs import ScalingBenchmarkConfig, SideBySideConfig

_BENCHMARKS = Path(__file__).parents[1] / "configs" / "benchmarks"


def main(config: ScalingBenchmarkConfig) -> None:
    """Measure what more targets and drafters are worth, with synthetic costs; without a YAML file on the demo."""
    from rich.console import Console

    from serve.bench.scaling import benchmark_scaling, print_scaling

    console = Console()
    print_scaling(reported(config.report, lambda: benchmark_scaling(config, console)), console)


def main_side_by_side(config: SideBySideConfig) -> None:
    """Ask several applications in turn; without a YAML file the demo's, drafters in a pool and in process.

    After Ctrl-C, what was measured is printed and written all the same; the exit code says that it is not all.
    """
    from rich.console import Console

    from serve.bench.side_by_side import benchmark_side_by_side, print_side_by_side

    console = Console()
    result = reported(config.report, lambda: benchmark_side_by_side(config, console))
    print_side_by_side(result, console)
    if result["interrupted"]:
        raise KeyboardInterrupt


_SCALING = Command(ScalingBenchmarkConfig, main, default=_BENCHMARKS / "scaling-demo.yaml")
COMMANDS = {
    "": _SCALING,
    "scaling": _SCALING,
    "side-by-side": Command(SideBySideConfig, main_side_by_side, default=_BENCHMARKS / "placement-demo.yaml"),
}

if __name__ == "__main__":
    run_commands(COMMANDS, __doc__ or "", sys.argv[1:], again="the same command begins anew")
