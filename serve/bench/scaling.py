"""Scaling with the numbers of targets and drafters, separately and together, compared with the pool model.

Passes and drafts have synthetic costs: replicas sleep most of the time, so a few cores are enough. The model gets these
costs and the numbers of replicas and streams; nothing is fitted.
"""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.load.client import Client
from moray.bench.load.config import LevelConfig, ServeBenchmarkConfig
from moray.bench.load.metrics import measure
from moray.bench.load.rounds import run_round
from moray.bench.load.steady import steady_part
from moray.bench.recording import record
from moray.bench.reports.wording import number, percent, times
from moray.bench.specbench import Question, read_questions
from moray.config import validate
from moray.decoding.synthetic import SyntheticCosts
from serve.bench.applications import Applications, running
from serve.bench.configs import PoolConfig, ScalingBenchmarkConfig
from serve.bench.pool_model import Pools, cycle_of, tokens_per_second

LABEL = "synthetic per-step cost"
_NAME = "scaling"
_WARM_UP_TOKENS = 16
_COUNTED = {"speculation": {"trace": True}}
"""Request fields that make every chunk report its number of tokens."""


class PoolRound(TypedDict):
    """What one round with a pool has measured."""

    tokens_per_second: float
    steady_seconds: float
    """Seconds in which all streams were busy; only they count."""
    tau: float
    mean_ttft_ms: float | None
    cpu_busy: float
    """Share of the processor time of this machine that was used."""


class PoolRow(TypedDict):
    """The figures of a pool: medians of its rounds, and ratios to the first pool."""

    targets: int
    drafters: int
    tokens_per_second: float
    ratio: float
    ratio_range: tuple[float, float]
    predicted_tokens_per_second: float
    predicted_ratio: float
    bound: str
    """What a cycle waits for, by the model."""
    tau: float
    cpu_busy: float
    rounds: list[PoolRound]


class Regime(TypedDict):
    """The costs of a regime, and the figures of all pools with them."""

    costs: Mapping[str, Any]
    rows: list[PoolRow]


def benchmark_scaling(config: ScalingBenchmarkConfig, console: Console) -> dict[str, Any]:
    """Measure every regime with every pool.

    Raises:
        DeployError: the application does not run in time.
        DataError: a request failed, or there are too few requests to keep all streams busy.
    """
    questions = read_questions(config.questions, config.num_questions)
    with running(config.ray, config.wait_seconds) as applications:
        regimes = {
            name: _regime(config, applications, name, costs, questions, console)
            for name, costs in config.regimes.items()
        }
    return {"label": LABEL, "regimes": regimes} | record(config)


def _regime(
    config: ScalingBenchmarkConfig,
    applications: Applications,
    name: str,
    costs: SyntheticCosts,
    questions: Sequence[Question],
    console: Console,
) -> Regime:
    """Measure all pools of one regime; every other round reverses their order, so that drift affects all alike."""
    args = config.args_with({"engine": {"synthetic": costs.model_dump()}})
    found: list[list[PoolRound]] = [[] for _ in config.pools]
    for turn in range(config.rounds):
        places = range(len(config.pools))
        for place in places if turn % 2 == 0 else reversed(places):
            pool = config.pools[place]
            console.print(f"{name}, round {turn + 1} of {config.rounds}: {pool.name}", highlight=False)
            applications.deploy({_NAME: args}, pool)
            load = config.requests_to(applications.url(_NAME))
            found[place].append(asyncio.run(_measure(load, config.num_streams, questions)))
    return {
        "costs": costs.model_dump(),
        "rows": [
            _row(config, pool, costs, own, found[0]) for pool, own in zip(config.pools, found, strict=True)
        ],
    }  # fmt: skip


async def _measure(load: ServeBenchmarkConfig, num_streams: int, questions: Sequence[Question]) -> PoolRound:
    import psutil

    level = LevelConfig(max_concurrency=num_streams)
    async with Client(load) as client:
        await client.find_model()
        short = {"max_tokens": _WARM_UP_TOKENS}
        await run_round(client, questions, level, fields=short, count=num_streams, seed=0)
        psutil.cpu_percent()
        done = await run_round(client, questions, level, fields=_COUNTED, count=load.num_requests, seed=0)
        busy = psutil.cpu_percent() / 100
    part, figures = steady_part(done.records, num_streams), measure([done], load.goodput)
    assert figures["tau"] is not None, "the application counts tokens"
    return {
        "tokens_per_second": part.tokens_per_second,
        "steady_seconds": part.seconds,
        "tau": figures["tau"],
        "mean_ttft_ms": figures["ttft_ms"]["mean"],
        "cpu_busy": busy,
    }


def _row(
    config: ScalingBenchmarkConfig,
    pool: PoolConfig,
    costs: SyntheticCosts,
    found: list[PoolRound],
    first: list[PoolRound],
) -> PoolRow:
    """The figures of one pool, with ratios to the first pool and the model's predictions."""
    ratios = [own["tokens_per_second"] / base["tokens_per_second"] for own, base in zip(found, first, strict=True)]
    pools, base = _pools(config, pool), _pools(config, config.pools[0])
    tau = statistics.median(own["tau"] for own in found)
    return {
        "targets": pool.targets,
        "drafters": pool.drafters,
        "tokens_per_second": statistics.median(own["tokens_per_second"] for own in found),
        "ratio": statistics.median(ratios),
        "ratio_range": (min(ratios), max(ratios)),
        "predicted_tokens_per_second": tokens_per_second(pools, costs, tau),
        "predicted_ratio": cycle_of(base, costs).seconds / cycle_of(pools, costs).seconds,
        "bound": cycle_of(pools, costs).bound,
        "tau": tau,
        "cpu_busy": statistics.median(own["cpu_busy"] for own in found),
        "rounds": found,
    }


def _pools(config: ScalingBenchmarkConfig, pool: PoolConfig) -> Pools:
    return Pools(pool.targets, pool.drafters, config.num_streams, config.application.engine.num_micro_batches)


def print_scaling(result: dict[str, Any], console: Console) -> None:
    """Print a table per regime."""
    regimes: dict[str, Regime] = result["regimes"]
    for name, regime in regimes.items():
        costs = validate(SyntheticCosts, dict(regime["costs"]))
        console.print(f"{name}, {result['label'].upper()}", highlight=False)
        console.print(costs.notice, highlight=False)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        headings = ("targets + drafters", "tokens/s", "model", "ratio", "rounds", "model", "waits for", "tau", "CPU")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=heading in ("rounds", "waits for", "tokens/s"))
        for row in regime["rows"]:
            low, high = row["ratio_range"]
            table.add_row(
                f"{row['targets']} + {row['drafters']}",
                number(row["tokens_per_second"], 0),
                number(row["predicted_tokens_per_second"], 0),
                times(row["ratio"]),
                f"{low:.2f}-{high:.2f}",
                times(row["predicted_ratio"]),
                row["bound"],
                number(row["tau"]),
                percent(row["cpu_busy"]),
            )
        console.print(table)
