"""Prints the figures in the terminal: the block known from `vllm bench serve`, then our own figures, then ratios."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moray.bench.load.benchmark import name_of, short_name_of
from moray.bench.load.config import LevelConfig
from moray.bench.load.results import LevelResult, LoadFigures, Ratio, load_of
from moray.bench.load.variants import RATIOS
from moray.bench.reports.wording import number, percent, times

_WIDTH = 50
_LATENCIES = (
    ("Time to First Token", "TTFT", "ttft_ms"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot_ms"),
    ("Inter-token Latency", "ITL", "itl_ms"),
    ("Inter-token Latency, per token", "ITL", "itl_per_token_ms"),
    ("End-to-end Latency", "E2EL", "e2e_ms"),
)


def print_load(result: dict[str, Any], console: Console) -> None:
    """Print every level and variant, the ratios and the notes."""
    levels: list[LevelResult] = result["levels"]
    for level in levels:
        load = load_of(level)
        for name, figures in level["variants"].items():
            console.print(Text(f"{result['model']}, {name}: {name_of(load)}"))
            console.print(Text("\n".join(block(load, figures))))
        for pair, ratios in level["ratios"].items():
            console.print(_ratio_table(f"{pair}: {name_of(load)}", ratios))
        equal = level["equal_texts"]
        if equal is not None:
            console.print(Text(f"equal texts: {equal['equal']} of {equal['compared']} ({percent(equal['share'])})"))
    if len(levels) > 1:
        console.print(_overview(levels))
    for note in result["notes"]:
        console.print(Text(f"note: {note}"))


def block(level: LevelConfig, figures: LoadFigures) -> list[str]:
    """Format one variant at one level as lines."""
    goodput = figures["request_goodput"]
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
        ("Rejected (429):", figures["rejected"]),
        *([("Maximum request concurrency:", level.max_concurrency)] if level.max_concurrency else []),
        *([("Request rate configured (RPS):", level.request_rate)] if level.request_rate else []),
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
        *([("Request goodput (req/s):", goodput)] if goodput is not None else []),
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Peak concurrent requests:", figures["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}", *(_line(*row) for row in rows)]
    for title, short, key in _LATENCIES:
        lines.append(f"{title:-^{_WIDTH}}")
        for what in ("mean", "median", "p99"):
            name = f"{what.capitalize()} {short} (ms):"
            lines.append(_line(name, figures[key][what]))
    lines.append(f"{'Speculation':-^{_WIDTH}}")
    lines.append(_line("Tau (tokens per target pass):", figures["tau"]))
    rate = figures["acceptance_rate"]
    lines.append(_line("Acceptance rate (%):", None if rate is None else 100 * rate))
    lines.append(_line("Tokens/s per user (1 / TPOT):", figures["tokens_per_second_per_user"]))
    lines.append(_line("Tokens/s per user incl. TTFT:", figures["tokens_per_second_per_user_with_ttft"]))
    lines.append("=" * _WIDTH)
    return [*lines, *(f"{count} x {error}" for error, count in figures["errors"].items())]


def _line(name: str, value: float | None) -> str:
    shown = "-" if value is None else f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{name:<40}{shown}".rstrip()


def _overview(levels: list[LevelResult]) -> Table:
    """Build a table of all levels. Latencies cover answered requests only; ratios are of tokens per second, relative
    to the baseline. Columns for rejected and failed requests appear only if there were any."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    has_variants = len(levels[0]["variants"]) > 1
    is_rated = any(level["request_rate"] or level["times_first"] for level in levels)
    table.add_column("load" if is_rated else "concurrency", no_wrap=True)
    if has_variants:
        table.add_column("variant", no_wrap=True)
    everything = [figures for level in levels for figures in level["variants"].values()]
    counts = {"completed": "answered", "rejected": "429", "failed": "failed"}
    shown = [key for key in counts if key == "completed" or any(figures[key] for figures in everything)]
    for name in (*(counts[key] for key in shown), "tok/s"):
        table.add_column(name, justify="right", min_width=len(name))
    if has_variants:
        table.add_column("ratio", justify="right", no_wrap=True)
    medians = {"tpot_ms": "TPOT\n50 %"} | ({"rejected_ms": "429\nms"} if "rejected" in shown else {})
    for title in ("TTFT ms\n50 %/99 %", "E2E ms\n50 %/99 %", *medians.values()):
        table.add_column(title, justify="right", no_wrap=True)
    for level in levels:
        found = {pair.rpartition("/")[0]: own["output_throughput"]["ratio"] for pair, own in level["ratios"].items()}
        for name, figures in level["variants"].items():
            spreads = [figures[key] for key in ("ttft_ms", "e2e_ms")]
            table.add_row(
                short_name_of(load_of(level)),
                *([Text(name)] if has_variants else []),
                *(str(figures[key]) for key in shown),
                number(figures["output_throughput"]),
                *([times(found.get(name))] if has_variants else []),
                *(f"{number(spread['median'])}/{number(spread['p99'])}" for spread in spreads),
                *(number(figures[key]["median"]) for key in medians),
            )
    return table


def _ratio_table(title: str, ratios: Mapping[str, Ratio]) -> Table:
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("ratio of")
    for name in ("all rounds", "lowest", "highest"):
        table.add_column(name, justify="right")
    for name in RATIOS:
        row = ratios[name]
        table.add_row(name, times(row["ratio"]), number(row["low"]), number(row["high"]))
    return table
