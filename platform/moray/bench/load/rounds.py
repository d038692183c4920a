"""One round of one variant: requests sent when they are due, and no more at once than allowed."""

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
    """What one variant did in one round."""

    records: tuple[RequestRecord, ...]
    duration: float
    """Seconds from its start to the end of its last request."""


def order_of(variants: Sequence[str], number: int) -> list[str]:
    """Who comes when: forwards, then backwards, so that what drifts over time falls on all of them alike."""
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
    """Send `count` requests, from question `first` on, and wait for all of them."""
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
