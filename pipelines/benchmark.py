"""Benchmarks: ratios measured side by side in one run.

    python -m pipelines.benchmark decode --json runs/benchmark.json
    python -m pipelines.benchmark decode configs/benchmarks/decode-demo.yaml compile=default

`decode` measures drafters phase by phase; without a YAML file those of the demo. `shaped` measures a target of random
weights in the sizes of a real one, with synthetic acceptance:

    python -m pipelines.benchmark shaped configs/benchmarks/llama-3-8b-shaped.yaml --json runs/shaped.json
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from moray.bench.configs import DecodeBenchmarkConfig, ShapedBenchmarkConfig
from moray.config import run_entry_point

_DEFAULT = Path(__file__).parents[1] / "configs" / "benchmarks" / "decode-demo.yaml"


def main(config: DecodeBenchmarkConfig) -> None:
    """Measure decoding and print costs and phases."""
    from rich.console import Console

    from moray.bench.decode_benchmark import benchmark_decoding, check_writable, print_benchmark
    from moray.provenance import write_json_atomically

    console = Console()
    if config.report:
        check_writable(Path(config.report))
    result = benchmark_decoding(config, console)
    print_benchmark(result, console)
    if config.report:
        write_json_atomically(Path(config.report), result)


def main_shaped(config: ShapedBenchmarkConfig) -> None:
    """Measure a target of random weights and print what its passes cost."""
    from rich.console import Console

    from moray.bench.decode_benchmark import check_writable
    from moray.bench.shaped import benchmark_shape, print_shaped
    from moray.provenance import write_json_atomically

    if config.report:
        check_writable(Path(config.report))
    result = benchmark_shape(config)
    print_shaped(result, Console())
    if config.report:
        write_json_atomically(Path(config.report), result)


CONFIG = DecodeBenchmarkConfig


def split_command(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether `shaped` is asked for, and the arguments: `--json FILE` as `report=FILE`, the demo's YAML if none is
    named for `decode`."""
    words = list(argv)
    is_shaped = words[:1] == ["shaped"]
    if words[:1] in (["decode"], ["shaped"]):
        words = words[1:]
    if "--json" in words[:-1]:
        place = words.index("--json")
        words[place : place + 2] = [f"report={words[place + 1]}"]
    named = any(word.endswith((".yaml", ".yml")) and "=" not in word for word in words)
    return is_shaped, words if named or is_shaped else [str(_DEFAULT), *words]


if __name__ == "__main__":
    _is_shaped, _arguments = split_command(sys.argv[1:])
    if _is_shaped:
        run_entry_point(ShapedBenchmarkConfig, __doc__ or "", main_shaped, _arguments)
    else:
        run_entry_point(CONFIG, __doc__ or "", main, _arguments)
