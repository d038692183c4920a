"""Benchmarks of the application; they start their own Ray and deploy the application themselves.

    python -m serve.benchmark scaling --json runs/scaling.json
    python -m serve.benchmark side-by-side --json runs/placement.json
    python -m serve.benchmark side-by-side configs/benchmarks/groups-demo.yaml --json runs/groups.json
    python -m serve.benchmark edge configs/benchmarks/edge-smollm2.yaml --json runs/edge.json
    python -m serve.benchmark edge-offline configs/benchmarks/edge-offline-smollm2.yaml --json runs/edge-offline.json
    python -m serve.benchmark edge-private configs/benchmarks/edge-private-smollm2.yaml --json runs/edge-private.json

`scaling` adds targets and drafters, separately and together, with synthetic costs of passes and drafts, and prints the
pool model's predictions next to the measurements. `side-by-side` sends requests to several applications in turn; by
default it compares drafters in a pool with drafters in the target's process. `edge` measures devices that draft
themselves, over emulated networks, beside the streaming API; it needs Linux and root. `edge-offline` cuts connections
and measures what drafters write alone. `edge-private` asks with and without placeholders for private text.
"""

import sys
from pathlib import Path

from moray.bench.recording import reported
from moray.commands import Command, run_commands
from serve.bench.configs import (
    EdgeBenchmarkConfig,
    EdgeOfflineConfig,
    EdgePrivateConfig,
    ScalingBenchmarkConfig,
    SideBySideConfig,
)

_BENCHMARKS = Path(__file__).parents[1] / "configs" / "benchmarks"


def main(config: ScalingBenchmarkConfig) -> None:
    """Measure scaling with targets and drafters, with synthetic costs; by default on the demo."""
    from moray.console import open_console
    from serve.bench.scaling import benchmark_scaling, print_scaling

    console = open_console()
    print_scaling(reported(config.report, lambda: benchmark_scaling(config, console)), console)


def main_side_by_side(config: SideBySideConfig) -> None:
    """Compare applications side by side; by default the demo with drafters in a pool and in process.

    Ctrl-C still prints and writes the levels measured so far; the exit code shows that the run is incomplete.
    """
    from moray.console import open_console
    from serve.bench.side_by_side import benchmark_side_by_side, print_side_by_side

    console = open_console()
    result = reported(config.report, lambda: benchmark_side_by_side(config, console))
    print_side_by_side(result, console)
    if result["interrupted"]:
        raise KeyboardInterrupt


def main_edge(config: EdgeBenchmarkConfig) -> None:
    """Measure devices that run the drafter over emulated networks; by default with the demo.

    With `--json FILE`, a page with plots is written beside FILE.
    """
    from moray.console import open_console
    from serve.bench.edge import benchmark_edge
    from serve.bench.edge_page import render_edge

    console = open_console()
    result = reported(config.report, lambda: benchmark_edge(config, console))
    if config.report is not None:
        page = Path(config.report).with_suffix(".html")
        page.write_text(render_edge(result), encoding="utf-8")
        console.print(f"report: {config.report} and {page}")


def main_offline(config: EdgeOfflineConfig) -> None:
    """Measure what drafters write alone while their connection is lost; by default with the demo."""
    from moray.console import open_console
    from serve.bench.edge_offline import benchmark_offline

    console = open_console()
    reported(config.report, lambda: benchmark_offline(config, console))


def main_private(config: EdgePrivateConfig) -> None:
    """Measure what it costs an answer that marked text stays on the device; by default with the demo."""
    from moray.console import open_console
    from serve.bench.edge_private import benchmark_private

    console = open_console()
    reported(config.report, lambda: benchmark_private(config, console))


_SCALING = Command(ScalingBenchmarkConfig, main, default=_BENCHMARKS / "scaling-demo.yaml")
COMMANDS = {
    "": _SCALING,
    "scaling": _SCALING,
    "edge-offline": Command(EdgeOfflineConfig, main_offline, default=_BENCHMARKS / "edge-offline-demo.yaml"),
    "edge-private": Command(EdgePrivateConfig, main_private, default=_BENCHMARKS / "edge-private-demo.yaml"),
    "edge": Command(EdgeBenchmarkConfig, main_edge, default=_BENCHMARKS / "edge-demo.yaml"),
    "side-by-side": Command(SideBySideConfig, main_side_by_side, default=_BENCHMARKS / "placement-demo.yaml"),
}

if __name__ == "__main__":
    run_commands(COMMANDS, __doc__ or "", sys.argv[1:], again="the same command starts again")
