"""The speed-up from drafting as the engine fills up: drafted against plain decoding at several batch sizes.

Both sides use the same engine and take turns within one run, without HTTP or Ray in between. Times include the
prefill, because a client waits for it too.
"""

import time
from collections.abc import Collection
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.configs import EngineBenchmarkConfig
from moray.bench.loading import first_prompts, load_target
from moray.bench.recording import record
from moray.bench.reports.wording import number, percent, times
from moray.bench.spread import quartiles
from moray.decoding.batch import answer_batch
from moray.decoding.device import synchronise
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.generation import tau
from moray.decoding.planning.fitting import say_once
from moray.decoding.request import Request
from moray.drafters.base import Drafter
from moray.drafters.loading import load_drafters
from moray.progress import track
from moray.targets.model import Target

_WARM_UP_TOKENS = 8


def benchmark_engine(config: EngineBenchmarkConfig, console: Console) -> dict[str, Any]:
    """Measure every drafter at every batch size.

    Raises:
        DataError: no prompt fits into the target's context.
    """
    questions, tokenizer, target = load_target(config)
    drafters = load_drafters(config.drafters, target, tokenizer)
    room = target.spec.max_positions - config.max_new_tokens
    prompts = first_prompts(questions, tokenizer, room, config.questions)
    eos_ids = {*target.eos_ids, *tokenizer.eos_ids}
    pairs = [(name, size) for name in drafters for size in config.batches]
    rows = []
    for name, size in track(pairs, "benchmark", len(pairs), unit="measurements", console=console):
        engine = _engine(config, target, drafters[name], size, prompts, eos_ids)
        rows.append({"drafter": name, **_measure(engine, config, prompts, size)})
    return {"rows": rows, "tree": config.tree.name} | record(config)


def _engine(
    config: EngineBenchmarkConfig,
    target: Target,
    drafter: Drafter,
    size: int,
    prompts: list[list[int]],
    eos_ids: Collection[int],
) -> Engine:
    longest = max(map(len, prompts)) + config.max_new_tokens
    slots = size * (longest + config.tree.num_nodes + 64)
    limits = EngineConfig(max_num_seqs=size, kv_cache_tokens=slots, tree=config.tree)
    local = LocalDrafts(drafter, longest, config.tree.num_expanded)
    engine = Engine(target, limits, eos_ids, drafts={"drafter": local})
    say_once(engine.draft_schedulers["drafter"].notices)
    engine.measure_costs({"drafter": drafter})
    return engine


def _measure(engine: Engine, config: EngineBenchmarkConfig, prompts: list[list[int]], size: int) -> dict[str, Any]:
    count = max(config.num_answers or len(prompts), size)
    chosen = [prompts[index % len(prompts)] for index in range(count)]

    def answer(drafter: str | None, max_new_tokens: int) -> tuple[float, list[list[int]], float]:
        synchronise(engine.target.device)
        begin = time.perf_counter()
        made = answer_batch(
            engine,
            [
                Request(
                    prompt=tuple(prompt),
                    params=config.sampling,
                    max_new_tokens=max_new_tokens,
                    sequence=index,
                    drafter=drafter,
                )
                for index, prompt in enumerate(chosen)
            ],
        )
        synchronise(engine.target.device)
        return time.perf_counter() - begin, [generation.tokens for generation in made], tau(made)

    for drafter in (None, "drafter"):  # warm-up: the first call of anything is slow
        answer(drafter, min(_WARM_UP_TOKENS, config.max_new_tokens))
    rounds = [
        (answer(None, config.max_new_tokens), answer("drafter", config.max_new_tokens)) for _ in range(config.rounds)
    ]
    speeds = [
        (sum(map(len, tokens)) / seconds, sum(map(len, drafted)) / drafted_seconds)
        for (seconds, tokens, _), (drafted_seconds, drafted, _) in rounds
    ]
    low, median, high = quartiles([drafted / plain for plain, drafted in speeds])
    same = [a == b for (_, plain, _), (_, drafted, _) in rounds for a, b in zip(plain, drafted, strict=True)]
    return {
        "batch": size,
        "num_answers": count,
        "plain_tokens_per_second": quartiles([plain for plain, _ in speeds])[1],
        "speedup": median,
        "speedup_quartiles": (low, high),
        "tau": rounds[-1][1][2],
        "equal_share": sum(same) / len(same),
    }


def print_engine_benchmark(result: dict[str, Any], console: Console) -> None:
    """Print the rows as a table."""
    table = Table(title=f"drafted / plain, {result['tree']}", box=box.SIMPLE_HEAD)
    for heading in ("drafter", "at a time", "plain tokens/s", "speed-up", "quartiles", "tau", "equal texts"):
        table.add_column(heading, justify="left" if heading == "drafter" else "right")
    for row in result["rows"]:
        low, high = row["speedup_quartiles"]
        table.add_row(
            row["drafter"],
            str(row["batch"]),
            number(row["plain_tokens_per_second"], 0),
            times(row["speedup"]),
            f"{times(low)} to {times(high)}",
            number(row["tau"]),
            percent(row["equal_share"]),
        )
    console.print(table)
