"""The decoding benchmark: what each phase of a cycle costs, and how close decoding is to its limit.

    S = tau / (v + gamma*c + o)        efficiency = S / (tau / (1 + gamma*c))

v is the cost of a target pass over the tree, c of a draft step and o of everything else in a cycle, all in units of a
plain target step and measured in one run, with the methods in turn on the same prompts. S excludes prefill on both
sides.
"""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moray.bench.configs import DecodeBenchmarkConfig
from moray.bench.loading import load_target, nothing_fits
from moray.bench.recording import record
from moray.bench.reports.schema import Phases
from moray.bench.reports.wording import number, percent, times
from moray.bench.runner import Runner
from moray.bench.summary import summarise
from moray.decoding.compiling import compile_models
from moray.drafters.loading import load_drafters
from moray.progress import Progress, track


def benchmark_decoding(config: DecodeBenchmarkConfig, console: Console) -> dict[str, Any]:
    """Measure every drafter with every tree; returns rows with phase times.

    Raises:
        DataError: no prompt fits into the target's context.
    """
    evaluation = config.evaluation()
    questions, tokenizer, target = load_target(config)
    drafters = load_drafters(config.drafters, target, tokenizer)
    with Progress("compile", console=console):
        compiled = compile_models(target, drafters.values(), config.compile)
    runner = Runner(target, drafters, tokenizer, evaluation)
    total = sum(len(question.turns) for question in questions)
    for _ in track(runner.ask(questions), "benchmark", total, unit="turns", console=console):
        pass
    if not runner.measurement.asked:
        raise nothing_fits(config.questions, runner.max_model_len)
    figures = summarise(runner.measurement, evaluation.samplings, config.target.dtype)
    plain = runner.measurement.methods[0].generations
    steps = sum(len(generation.tokens) - 1 for generation in plain)
    return {
        "rows": [_row(row) for row in figures["rows"]],
        "plain_ms": 1e3 * sum(generation.seconds for generation in plain) / max(1, steps),
        "notes": [*figures["notes"], compiled],
    } | record(config)


_KEPT = (
    "drafter", "tree", "temperature", "tau", "tau_spread", "efficiency", "draft_steps", "draft_cost", "verify_cost",
    "lossless", "num_prompts", "num_tokens", "acceptance_by_position", "phases_ms",
)  # fmt: skip


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Keep the figures about decoding; `speedup_vs_plain` becomes the speed-up in cycles, without prefill."""
    kept = {name: row[name] for name in _KEPT}
    return kept | {"speedup_vs_plain": row["speedup_in_cycles"], "speedup_with_prefill": row["speedup_vs_plain"]}


def print_benchmark(result: dict[str, Any], console: Console) -> None:
    """Print costs, phase times and notes."""
    print_costs(result["rows"], result["plain_ms"], console)
    for note in result["notes"]:
        console.print(Text(f"note: {note}"))


def print_costs(rows: Sequence[dict[str, Any]], plain_ms: float, console: Console) -> None:
    """Print the cost of cycles in plain steps, then their phases in milliseconds."""
    costs = table_of_rows("Decoding: S = tau / (v + gamma c + o), efficiency = S / (tau / (1 + gamma c))")
    for name in ("tau", "S", "eff.", "gamma", "c", "v", "lossless"):
        costs.add_column(name, justify="right")
    names = tuple(Phases.model_fields)
    phases = table_of_rows(f"Milliseconds of an average cycle; a plain step takes {number(plain_ms)}")
    for name in (*names, "sum"):
        phases.add_column(name, justify="right")
    for row in rows:
        lossless = {True: "yes", False: "NO", None: "not checked"}[row["lossless"]]
        head = (number(row["tau"]), times(row["speedup_vs_plain"]), percent(row["efficiency"]))
        tail = (number(row["draft_steps"]), number(row["draft_cost"], 2), number(row["verify_cost"]), lossless)
        costs.add_row(Text(row["drafter"]), Text(row["tree"]), *head, *tail)
        spent = [row["phases_ms"][name] for name in names]
        cells = [number(milliseconds, 2) for milliseconds in spent]
        phases.add_row(Text(row["drafter"]), Text(row["tree"]), *cells, number(sum(spent)))
    console.print(costs)
    console.print(phases)


def table_of_rows(title: str) -> Table:
    """Create an empty table whose first columns are drafter and tree."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("drafter", no_wrap=True)
    table.add_column("tree", no_wrap=True)
    return table
