"""Runs one round of one variant: sends requests when they are due, within the concurrency limit."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moray.bench.load.arrivals import arrival_times
from moray.bench.load.client import Client
from moray.bench.load.config import LevelConfig
from moray.bench.load.request import RequestRecord
from moray.bench.specbench import Question


@dataclass(frozen=True)
class Round:
    """The results of one variant in one round."""

    records: tuple[RequestRecord, ...]
    duration: float
    """Seconds from the start of the round to the end of its last request."""


def order_of(variants: Sequence[str], number: int) -> list[str]:
    """The order of the variants in a round: odd rounds reverse it, so that drift affects all variants alike."""
    return list(variants) if number % 2 == 0 else list(reversed(variants))


async def run_round(
    client: Client,
    questions: Sequence[Question],
    level: LevelConfig,
    *,
    fields: dict[str, Any],
    count: int,
    seed: int,
    first: int = 0,
    done: Callable[[], None] = lambda: None,
) -> Round:
    """Send `count` requests, starting with question `first`, and wait for all of them."""
    records = [
        RequestRecord(first + i, questions[(first + i) % len(questions)].question_id, due)
        for i, due in enumerate(arrival_times(level, count, seed))
    ]
    bodies = [client.body(questions[(first + i) % len(questions)], first + i, fields) for i in range(count)]
    places = asyncio.Semaphore(level.max_concurrency or count)
    began = time.perf_counter()

    async def send(record: RequestRecord, body: dict[str, Any]) -> None:
        await asyncio.sleep(max(0.0, record.due - (time.perf_counter() - began)))
        async with places:
            await client.ask(record, body, began)
        done()

    async with asyncio.TaskGroup() as group:
        for record, body in zip(records, bodies, strict=True):
            group.create_task(send(record, body))
    return Round(tuple(records), time.perf_counter() - began)
