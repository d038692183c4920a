"""Benchmarks that measure the alternatives side by side in one run and report their ratios.

    python -m pipelines.benchmark decode --json runs/benchmark.json
    python -m pipelines.benchmark decode configs/benchmarks/decode-demo.yaml compile=default

`decode` times each phase of a decoding cycle, by default for the demo's drafters. `shaped` measures a target with
random weights in the shape of a real model, with synthetic acceptance:

    python -m pipelines.benchmark shaped configs/benchmarks/llama-3-8b-shaped.yaml --json runs/shaped.json

`tree` measures how often each of a drafter's candidates is right and builds the best sparse tree from that. Append the
YAML file that it writes to the files of any command with the key `trees`:

    python -m pipelines.benchmark tree configs/benchmarks/tree-demo.yaml output=runs/demo/medusa-tree.yaml

`cache` measures tokenising, capturing with each codec and reading back. `train` compares training a drafter from the
cache, with the target running alongside, and by the published recipe:

    python -m pipelines.benchmark cache --json runs/cache.json
    python -m pipelines.benchmark train --json runs/train.json

`engine` measures the speed-up from drafting as the engine fills up. Drafted and plain decoding alternate; no HTTP is
involved:

    python -m pipelines.benchmark engine --json runs/engine.json

`staleness` measures how tau drops when a drafter's memory lags some tokens behind, as it does when running ahead:

    python -m pipelines.benchmark staleness --json runs/staleness.json

`peers` compares Moray with transformers and, if `make peers` has installed them, llama.cpp, vLLM and OpenVINO:

    python -m pipelines.benchmark peers configs/benchmarks/peers-smollm2.yaml --json runs/peers.json

`serve` puts load on an OpenAI-compatible endpoint, ours or another, and times its answers. By default it sends the
demo's questions with speculation on and off:

    python -m pipelines.benchmark serve --url http://127.0.0.1:8000 --json runs/serve.json

This YAML file overloads the endpoint with more requests than it has slots for, and says how to start the application:

    python -m pipelines.benchmark serve configs/benchmarks/serve-overload.yaml --json runs/serve-overload.json
"""

import sys
from pathlib import Path

from moray.bench.configs import (
    DecodeBenchmarkConfig,
    EngineBenchmarkConfig,
    StalenessConfig,
    TreeSearchConfig,
)
from moray.bench.load.config import ServeBenchmarkConfig
from moray.bench.peers.config import PeersBenchmarkConfig
from moray.bench.recording import reported
from moray.commands import Command, run_commands
from pipelines.benchmarks.cluster_configs import CacheBenchmarkConfig, TrainBenchmarkConfig
from pipelines.benchmarks.shaped_config import ShapedBenchmarkConfig

_BENCHMARKS = Path(__file__).parents[1] / "configs" / "benchmarks"
_DEMO, _DEMO_TREE = _BENCHMARKS / "decode-demo.yaml", _BENCHMARKS / "tree-demo.yaml"
_DEMO_ENGINE, _DEMO_STALENESS = _BENCHMARKS / "engine-demo.yaml", _BENCHMARKS / "staleness-demo.yaml"
_DEMO_CACHE, _DEMO_TRAIN = _BENCHMARKS / "cache-demo.yaml", _BENCHMARKS / "train-demo.yaml"
_DEMO_SERVE = _BENCHMARKS / "serve-demo.yaml"


def main(config: DecodeBenchmarkConfig) -> None:
    """Time each phase of a decoding cycle per drafter; by default for the demo's drafters."""
    from moray.bench.lossless import check_lossless, row_name
    from moray.console import open_console
    from pipelines.benchmarks.decode import benchmark_decoding, print_benchmark

    console = open_console()
    result = reported(config.report, lambda: benchmark_decoding(config, console))
    print_benchmark(result, console)
    check_lossless((row_name(row), row["lossless"]) for row in result["rows"])


def main_shaped(config: ShapedBenchmarkConfig) -> None:
    """Measure a target with random weights in the shape of a real model, with synthetic acceptance."""
    from moray.console import open_console
    from pipelines.benchmarks.shaped import benchmark_shape, print_shaped

    print_shaped(reported(config.report, lambda: benchmark_shape(config)), open_console())


def main_engine(config: EngineBenchmarkConfig) -> None:
    """Measure the speed-up from drafting at several batch sizes; by default on the demo."""
    from moray.console import open_console
    from pipelines.benchmarks.engine import benchmark_engine, print_engine_benchmark

    console = open_console()
    print_engine_benchmark(reported(config.report, lambda: benchmark_engine(config, console)), console)


def main_staleness(config: StalenessConfig) -> None:
    """Measure tau when a drafter's memory lags behind; by default for the demo's MoA and EAGLE."""
    from moray.console import open_console
    from pipelines.benchmarks.staleness import benchmark_staleness, print_staleness

    console = open_console()
    print_staleness(reported(config.report, lambda: benchmark_staleness(config, console)), console)


def main_peers(config: PeersBenchmarkConfig) -> None:
    """Compare Moray with other engines side by side."""
    from moray.bench.peers.benchmark import benchmark_peers
    from moray.bench.peers.console import print_peers
    from moray.bench.peers.page import render_peers
    from moray.bench.recording import check_writable
    from moray.console import open_console
    from moray.provenance import write_text_atomically

    console = open_console()
    if config.html:
        check_writable(Path(config.html), "html")
    result = reported(config.report, lambda: benchmark_peers(config, console))
    print_peers(result, console)
    if config.html:
        write_text_atomically(Path(config.html), render_peers(result))
        console.print(f"page: {config.html}", markup=False, highlight=False)


def main_tree(config: TreeSearchConfig) -> None:
    """Measure a drafter's hit rates and find its best sparse tree; by default for the demo's Medusa."""
    from moray.bench.recording import check_writable
    from moray.console import open_console
    from pipelines.benchmarks.tree_search import print_tree, print_yaml, search_tree, write_tree

    console = open_console()
    if config.output:
        check_writable(Path(config.output), "output")
    result = reported(config.report, lambda: search_tree(config, console))
    if config.output:
        write_tree(result, Path(config.output))
    print_tree(result, console)
    if config.output:
        console.print(f"tree: {config.output}", markup=False, highlight=False)
    else:
        print_yaml(result, console)


def main_cache(config: CacheBenchmarkConfig) -> None:
    """Measure caching by stage and codec; by default on the demo."""
    from moray.console import open_console
    from pipelines.benchmarks.cache import benchmark_cache, print_cache_benchmark

    console = open_console()
    print_cache_benchmark(reported(config.report, lambda: benchmark_cache(config, console)), console)


def main_train(config: TrainBenchmarkConfig) -> None:
    """Compare training from the cache, online and by the published recipe; by default on the demo."""
    from moray.console import open_console
    from pipelines.benchmarks.train import benchmark_training, print_train_benchmark

    console = open_console()
    print_train_benchmark(reported(config.report, lambda: benchmark_training(config, console)), console)


def main_serve(config: ServeBenchmarkConfig) -> None:
    """Put load on an OpenAI-compatible endpoint and time its answers; by default the demo's endpoint.

    Ctrl-C still prints and writes the levels measured so far; the exit code shows that the run is incomplete.
    """
    from moray.bench.load.benchmark import benchmark_endpoint
    from moray.bench.load.console import print_load
    from moray.bench.load.page import render_load
    from moray.bench.recording import check_writable
    from moray.console import open_console
    from moray.provenance import write_text_atomically

    console = open_console()
    if config.html:
        check_writable(Path(config.html), "html")
    result = reported(config.report, lambda: benchmark_endpoint(config, console))
    print_load(result, console)
    if config.html:
        write_text_atomically(Path(config.html), render_load(result))
        console.print(f"page: {config.html}", markup=False, highlight=False)
    if result["interrupted"]:
        raise KeyboardInterrupt


_DECODE = Command(DecodeBenchmarkConfig, main, default=_DEMO)
COMMANDS = {
    "": _DECODE,
    "cache": Command(CacheBenchmarkConfig, main_cache, default=_DEMO_CACHE),
    "decode": _DECODE,
    "engine": Command(EngineBenchmarkConfig, main_engine, default=_DEMO_ENGINE),
    "peers": Command(PeersBenchmarkConfig, main_peers, flags=("html",)),
    "serve": Command(ServeBenchmarkConfig, main_serve, default=_DEMO_SERVE, flags=("url", "html")),
    "shaped": Command(ShapedBenchmarkConfig, main_shaped),
    "staleness": Command(StalenessConfig, main_staleness, default=_DEMO_STALENESS),
    "train": Command(TrainBenchmarkConfig, main_train, default=_DEMO_TRAIN),
    "tree": Command(TreeSearchConfig, main_tree, default=_DEMO_TREE),
}

if __name__ == "__main__":
    run_commands(COMMANDS, __doc__ or "", sys.argv[1:], again="the same command starts again")
