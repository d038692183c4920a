"""Compares applications that run at the same time, ask the same questions in turn and may be pinned to cores.

For example, this compares drafters in a pool with drafters in the target's process, or one group with two.
"""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moray.bench.load.benchmark import benchmark_endpoint, name_of
from moray.bench.load.results import LevelResult, Ratio, VariantFigures, load_of
from moray.bench.load.variants import ratios
from moray.bench.reports.wording import number, times
from serve.bench.applications import check_cores, running
from serve.bench.configs import PoolConfig, SideBySideConfig

_SHOWN = {
    "mean_tpot": "speed, of a stream",
    "output_throughput": "tokens/s, of all",
    "mean_ttft": "time to first token",
}
"""Ratios to print; the ratio of speeds is the inverse of the ratio of times per token."""


def benchmark_side_by_side(config: SideBySideConfig, console: Console) -> dict[str, Any]:
    """Measure every way at every level; after Ctrl-C, return the levels completed so far.

    Raises:
        KeyboardInterrupt: interrupted before the first level was complete.
        ConfigError: a core does not exist, or Ray or Serve is not the benchmark's own.
        DeployError: an application does not run in time.
        DataError: a warm-up failed.
    """
    check_cores(config.ways)
    with running(config.ray, config.wait_seconds) as applications:
        args = {name: config.args_with(changes) for name, changes in config.applications.items()}
        applications.deploy(args, PoolConfig(targets=1, drafters=1))
        urls = {name: applications.url(way.application) for name, way in config.ways.items()}
        load = config.requests_to_all(urls)

        def prepare(name: str) -> None:
            applications.pin(config.ways[name].application, config.ways[name].cores)

        try:
            result = benchmark_endpoint(load, console, prepare)
        finally:
            applications.pin("", {})
    made_up = {name for name, own in args.items() if _is_made_up(own)}
    levels: list[LevelResult] = result["levels"]
    for level in levels:
        variants = level["variants"]
        level["ratios"] = {f"{above}/{below}": _ratios(variants, above, below) for above, below in config.pairs}
    synthetic = [name for name, way in config.ways.items() if way.application in made_up]
    return result | {"synthetic": synthetic, "settings": config.model_dump(mode="json")}


def _is_made_up(args: Mapping[str, Any]) -> bool:
    from serve.config import read_args

    return read_args(args).engine.synthetic.is_on


def _ratios(variants: Mapping[str, VariantFigures], above: str, below: str) -> dict[str, Ratio]:
    pairs = list(zip(variants[above]["rounds"], variants[below]["rounds"], strict=True))
    return ratios(variants[above], variants[below], pairs)


def print_side_by_side(result: dict[str, Any], console: Console) -> None:
    """Print the figures of every way, and the requested ratios."""
    levels: list[LevelResult] = result["levels"]
    for level in levels:
        load = name_of(load_of(level))
        table = Table(title=load, box=box.SIMPLE_HEAD)
        for heading in ("way", "tokens/s", "ms per token", "TTFT ms", "tau"):
            table.add_column(heading, justify="left" if heading == "way" else "right")
        for name, figures in level["variants"].items():
            label = f"{name} (SYNTHETIC COST)" if name in result["synthetic"] else name
            table.add_row(
                label,
                number(figures["output_throughput"]),
                number(figures["tpot_ms"]["mean"]),
                number(figures["ttft_ms"]["mean"]),
                number(figures["tau"]),
            )
        console.print(table)
        for pair, found in level["ratios"].items():
            console.print(f"{pair}: {_worded(found)}", highlight=False)
        equal = level["equal_texts"]
        if equal is not None:
            console.print(f"equal texts: {equal['equal']} of {equal['compared']}", highlight=False)
    for note in result["notes"]:
        console.print(Text(f"note: {note}"))


def _worded(found: Mapping[str, Ratio]) -> str:
    parts = []
    for key, words in _SHOWN.items():
        spread = found[key]["quartiles"]
        if spread is None:
            continue
        low, middle, high = spread if key != "mean_tpot" else tuple(1 / value for value in reversed(spread))
        parts.append(f"{words} {times(middle)} ({times(low)} to {times(high)})")
    return "; ".join(parts)
