"""Puts load on an endpoint level by level, with the variants in turn, and collects the figures."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from rich.console import Console

from moray.bench.load.client import Client
from moray.bench.load.config import LevelConfig, ServeBenchmarkConfig
from moray.bench.load.metrics import measure
from moray.bench.load.results import LevelFigures, LevelResult, VariantFigures, level_result
from moray.bench.load.rounds import Round, order_of, run_round
from moray.bench.load.variants import equal_texts, ratios
from moray.bench.recording import record
from moray.bench.specbench import Question, read_questions
from moray.errors import DataError
from moray.progress import Progress


def benchmark_endpoint(
    config: ServeBenchmarkConfig, console: Console, prepare: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Measure every variant at every level; after Ctrl-C, return the levels completed so far.

    Args:
        config: what to send, and where.
        console: shows progress.
        prepare: called with a variant's name before each of its rounds; its time does not count.

    Raises:
        KeyboardInterrupt: interrupted before the first level was complete.
        UnreachableError: nothing answers at the address.
        DataError: a warm-up failed, or `times_first` is set but the baseline answered nothing at the first level.
    """
    questions = read_questions(config.questions, config.num_questions)
    return asyncio.run(_benchmark(config, questions, console, prepare))


async def _benchmark(
    config: ServeBenchmarkConfig,
    questions: Sequence[Question],
    console: Console,
    prepare: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    total = sum(config.num_warmups + config.rounds * _count(config, level) for level in config.levels)
    async with AsyncExitStack() as stack:
        by_url: dict[str, Client] = {}
        for url in dict.fromkeys(map(config.url_of, config.variants)):
            by_url[url] = await stack.enter_async_context(Client(config.model_copy(update={"url": url})))
            await by_url[url].find_model()
        clients = {name: by_url[config.url_of(name)] for name in config.variants}
        with Progress("serve", len(config.variants) * total, unit="requests", console=console) as progress:
            levels: list[LevelResult] = []
            try:
                for level in config.levels:
                    rated = _rated(level, levels, config.baseline_name)
                    progress.update(title=name_of(rated))
                    levels.append(await _level(clients, config, questions, rated, progress.advance, prepare))
            except asyncio.CancelledError:  # Ctrl-C
                if not levels:
                    raise
    models = dict.fromkeys(client.model for client in by_url.values())
    interrupted = len(levels) < len(config.levels)
    notes = [f"interrupted: {len(levels)} of {len(config.levels)} levels were measured"] if interrupted else []
    return {
        "model": ", ".join(models),
        "levels": levels,
        "interrupted": interrupted,
        "notes": notes + _notes(levels),
    } | record(config)


def _count(config: ServeBenchmarkConfig, level: LevelConfig) -> int:
    """Requests per variant and round."""
    return level.num_requests or config.num_requests


def _rated(level: LevelConfig, levels: Sequence[LevelResult], base: str) -> LevelConfig:
    """Resolve the level's request rate, which may be a multiple of the throughput measured at the first level."""
    if level.times_first is None:
        return level
    answered = levels[0]["variants"][base]["request_throughput"]
    if not answered:
        raise DataError(
            f"levels.{len(levels)}.times_first is {level.times_first:g}, but at the first level '{base}' has answered "
            "no request; give a request_rate"
        )
    return level.model_copy(update={"request_rate": level.times_first * answered})


async def _level(
    clients: Mapping[str, Client],
    config: ServeBenchmarkConfig,
    questions: Sequence[Question],
    level: LevelConfig,
    done: Callable[[], None],
    prepare: Callable[[str], None],
) -> LevelResult:
    if config.num_warmups:
        for name in config.variants:
            prepare(name)
            await _warm_up(clients[name], config, questions, level, name, done)
    rounds: dict[str, list[Round]] = {name: [] for name in config.variants}
    count = _count(config, level)
    for number in range(config.rounds):
        for name in order_of(list(config.variants), number):
            prepare(name)
            rounds[name].append(
                await run_round(
                    clients[name],
                    questions,
                    level,
                    fields=config.variants[name],
                    count=count,
                    seed=config.seed + number,
                    first=number * count,
                    done=done,
                )
            )
    return level_result(level, summarise(rounds, config))


async def _warm_up(
    client: Client,
    config: ServeBenchmarkConfig,
    questions: Sequence[Question],
    level: LevelConfig,
    name: str,
    done: Callable[[], None],
) -> None:
    fields, count = config.variants[name], config.num_warmups
    at_once = LevelConfig(max_concurrency=level.max_concurrency)
    warm = await run_round(client, questions, at_once, fields=fields, count=count, seed=config.seed, done=done)
    failed = [each for each in warm.records if each.outcome == "failed"]
    if failed:
        raise DataError(
            f"the warm-up of variant '{name}' failed at '{config.url_of(name)}' ({failed[0].error}); nothing was "
            "measured: fix the request or the server, or measure all the same with num_warmups=0"
        )


def summarise(rounds: dict[str, list[Round]], config: ServeBenchmarkConfig) -> LevelFigures:
    """Compute the figures of one level."""
    pooled = {name: measure(own, config.goodput) for name, own in rounds.items()}
    single = {name: [measure([each], config.goodput) for each in own] for name, own in rounds.items()}
    base = config.baseline_name
    variants: dict[str, VariantFigures] = {}
    for name, figures in pooled.items():
        variants[name] = {**figures, "rounds": single[name]}
        if config.save_requests:
            variants[name]["requests"] = [[each.body for each in own.records] for own in rounds[name]]
    found = {
        f"{name}/{base}": ratios(pooled[name], pooled[base], list(zip(single[name], single[base], strict=True)))
        for name in pooled
        if name != base
    }
    can_compare = config.temperature == 0 and len(rounds) > 1
    return {"variants": variants, "ratios": found, "equal_texts": equal_texts(rounds) if can_compare else None}


def name_of(level: LevelConfig) -> str:
    """Describe a load in words."""
    rate = "all at once" if level.request_rate is None else f"{level.request_rate:g} requests/s"
    if level.times_first is not None:
        rate += f" ({level.times_first:g} times what the first level answered)"
    most = "" if level.max_concurrency is None else f", at most {level.max_concurrency} at a time"
    return rate + most


def short_name_of(level: LevelConfig) -> str:
    """Like `name_of` for a narrow column: only the concurrency if no rate is set."""
    most = "" if level.max_concurrency is None else str(level.max_concurrency)
    if level.times_first is not None:
        rate = f"{level.times_first:g} x first"
    elif level.request_rate is not None:
        rate = f"{level.request_rate:g}/s"
    else:
        return most or "unlimited"
    return f"{rate}, {most}" if most else rate


def _notes(levels: Sequence[LevelResult]) -> list[str]:
    notes = ["the machine named here is the one that sent the requests"]
    figures = [figures for level in levels for figures in level["variants"].values()]
    if any(each["num_uncounted"] for each in figures):
        notes.append("the server does not count tokens: a chunk counts as one")
    if any(each["itl_per_token_is_exact"] is False for each in figures):
        notes.append(
            "the server does not tell the tokens of a chunk: latencies per token share them out by characters, which "
            "changes percentiles, not means"
        )
    return notes
