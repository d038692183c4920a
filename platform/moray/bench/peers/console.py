"""Prints the comparison of engines in the terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moray.bench.reports.wording import interval, number, percent, times


def print_peers(result: dict[str, Any], console: Console) -> None:
    """Print every row, then the reasons for missing ones."""
    table = Table(title=title(result), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for name in ("engine", "dtype", "drafts"):
        table.add_column(name, overflow="fold")
    for name in ("tok/s", "95 %", "of copy", "vs transformers", "same text", "equal tokens", "tau"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        if row["failure"] is None:
            table.add_row(*map(Text, cells(row, result["num_prompts"])))
    console.print(table)
    for note in notes(result):
        console.print(Text(f"note: {note}"))


def title(result: dict[str, Any]) -> str:
    """Describe the measurement in one line."""
    settings = result["settings"]
    return (
        f"{result['num_prompts']} prompts, greedy, at most {settings['max_new_tokens']} new tokens, "
        f"{settings['threads']} threads; prompts are part of the time"
    )


def cells(row: dict[str, Any], num_prompts: int) -> tuple[str, ...]:
    """Format one row as the cells of the table."""
    equal = row["equal_texts"]
    return (
        row["engine"], row["dtype"], row["drafting"], number(row["tokens_per_second"]), interval(row["interval"]),
        percent(row["of_plain_limit"]), times(row["ratio_to_transformers"]),
        "-" if equal is None else f"{equal} of {num_prompts}", number(row["mean_equal_tokens"]),
        number(row["tau"]),
    )  # fmt: skip


def notes(result: dict[str, Any]) -> list[str]:
    """Explain the columns and list the rows that are missing."""
    limits, bandwidth = result["plain_limit_tokens_per_second"], result["copy_bandwidth_bytes_per_second"]
    found = [
        f"of copy: tokens/s over what a stream copy ({bandwidth / 1e9:.1f} GB/s, read and written) would give if every "
        f"token read all weights: {limits['float32']:.1f} in float32, {limits['bfloat16']:.1f} in bfloat16",
        "same text: answers equal to transformers' plain ones of the same dtype; equal tokens: how many on average "
        "before the first difference",
        "tau: mean tokens of a pass that verified a draft (others are not counted), for engines that count drafts",
        "prompt lookup is each engine's own: n-grams of 1 to 4 tokens in moray and vllm, up to 4 in openvino, 2 in "
        "llama-cpp-python; moray chooses how many tokens to draft unless adaptive is false, the others always draft "
        "as many as the name says",
    ]
    versions = {row["engine"]: row["version"] for row in result["rows"] if row["version"]}
    found.append("versions: " + ", ".join(f"{engine} {version}" for engine, version in versions.items()))
    missing = [row for row in result["rows"] if row["failure"] is not None]
    return found + [
        f"{row['engine']} {row['dtype']}, {row['drafting']}: not measured: {row['failure']}" for row in missing
    ]
