"""Benchmarks: ratios measured side by side in one run.

    python -m pipelines.benchmark decode --json runs/benchmark.json
    python -m pipelines.benchmark decode configs/benchmarks/decode-demo.yaml compile=default

`decode` measures drafters phase by phase; without a YAML file those of the demo. `shaped` measures a target of random
weights in the sizes of a real one, with synthetic acceptance:

    python -m pipelines.benchmark shaped configs/benchmarks/llama-3-8b-shaped.yaml --json runs/shaped.json

`tree` measures how often each candidate of a drafter is right, and searches the sparse tree that makes the most of it;
what it writes stands behind the other YAML files of a command with a key `trees`:

    python -m pipelines.benchmark tree configs/benchmarks/tree-demo.yaml output=runs/demo/medusa-tree.yaml
"""

import sys
from pathlib import Path

from moray.bench.configs import DecodeBenchmarkConfig, ShapedBenchmarkConfig, TreeSearchConfig
from moray.commands import Command, run_commands

_BENCHMARKS = Path(__file__).parents[1] / "configs" / "benchmarks"
_DEMO, _DEMO_TREE = _BENCHMARKS / "decode-demo.yaml", _BENCHMARKS / "tree-demo.yaml"


def main(config: DecodeBenchmarkConfig) -> None:
    """Measure drafters phase by phase; without a YAML file those of the demo."""
    from rich.console import Console

    from moray.bench.decode_benchmark import benchmark_decoding, check_writable, print_benchmark
    from moray.provenance import write_json_atomically

    console = Console()
    if config.report:
        check_writable(Path(config.report))
    result = benchmark_decoding(config, console)
    if config.report:
        write_json_atomically(Path(config.report), result)
    print_benchmark(result, console)


def main_shaped(config: ShapedBenchmarkConfig) -> None:
    """Measure a target of random weights in the sizes of a real one, with synthetic acceptance."""
    from rich.console import Console

    from moray.bench.decode_benchmark import check_writable
    from moray.bench.shaped import benchmark_shape, print_shaped
    from moray.provenance import write_json_atomically

    if config.report:
        check_writable(Path(config.report))
    result = benchmark_shape(config)
    if config.report:
        write_json_atomically(Path(config.report), result)
    print_shaped(result, Console())


def main_tree(config: TreeSearchConfig) -> None:
    """Measure a drafter's hit rates and search its best sparse tree; without a YAML file Medusa's on the demo."""
    from rich.console import Console

    from moray.bench.decode_benchmark import check_writable
    from moray.bench.tree_search import print_tree, print_yaml, search_tree, write_tree
    from moray.provenance import write_json_atomically

    console = Console()
    for key, path in (("report", config.report), ("output", config.output)):
        if path:
            check_writable(Path(path), key)
    result = search_tree(config, console)
    if config.report:
        write_json_atomically(Path(config.report), result)
    if config.output:
        write_tree(result, Path(config.output))
    print_tree(result, console)
    if config.output:
        console.print(f"tree: {config.output}", markup=False, highlight=False)
    else:
        print_yaml(result, console)


_DECODE = Command(DecodeBenchmarkConfig, main, default=_DEMO)
COMMANDS = {
    "": _DECODE,
    "decode": _DECODE,
    "shaped": Command(ShapedBenchmarkConfig, main_shaped),
    "tree": Command(TreeSearchConfig, main_tree, default=_DEMO_TREE),
}

if __name__ == "__main__":
    run_commands(COMMANDS, __doc__ or "", sys.argv[1:])
