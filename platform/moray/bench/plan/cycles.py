"""Cycles of a real engine, timed phase by phase: for costs, and to check what a plan predicts from them."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from moray.decoding.device import synchronise
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.params import SamplingParams
from moray.decoding.request import Request, RequestOutput
from moray.drafters.base import Drafter
from moray.errors import DataError
from moray.targets.model import Target
from moray.trees.shapes import AnyShape, ChainShape

_NAME = "drafter"
_WARM_UP = 2


@dataclass(frozen=True)
class Cycle:
    """One cycle of several sequences; seconds are those of its parts."""

    num_rows: int
    num_tokens: int
    """Tokens of each sequence in the pass: those of the largest draft, and the root."""
    propose: float
    """Drafting, and telling the drafter what was accepted before."""
    verify: float
    rest: float
    updates: tuple[RequestOutput, ...]
    """What came of it; with the first tokens of prompts that were read since the last one."""
    has_read: bool
    """Whether prompts were read in the same step; their seconds are not included."""

    @property
    def seconds(self) -> float:
        """All parts together."""
        return self.propose + self.verify + self.rest


def build_engine(target: Target, drafter: Drafter | None, shape: AnyShape | None, batch: int, longest: int) -> Engine:
    """An engine for `batch` sequences of at most `longest` tokens that drafts trees of `shape`. Without a drafter it
    decodes plainly, and `shape` may be None."""
    shape = shape or ChainShape(type="chain", depth=1)
    drafts = {_NAME: LocalDrafts(drafter, longest, shape.num_expanded)} if drafter is not None else {}
    config = EngineConfig(
        max_num_seqs=batch, kv_cache_tokens=batch * (longest + shape.num_nodes + 65), max_model_len=longest, tree=shape
    )
    return Engine(target, config, (), drafts=drafts, is_timed=True)


def requests_of(
    prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], params: SamplingParams, sequences: Sequence[int]
) -> list[Request]:
    """One request for each prompt; `sequences` numbers their noise, as a log does."""
    each = zip(prompts, max_new_tokens, sequences, strict=True)
    return [
        Request(prompt=tuple(prompt), params=params, max_new_tokens=count, sequence=number)
        for prompt, count, number in each
    ]


def cycles_of(engine: Engine, requests: Sequence[Request]) -> Iterator[Cycle]:
    """Decode requests, cycle by cycle. If the caller stops early, sequences stay in the engine."""
    for request in requests:
        engine.submit(request)
    stats, firsts = engine.stats, list[RequestOutput]()
    while engine.is_busy:
        before, rows, passes, prompts = dict(stats.seconds), stats.num_rows, stats.num_passes, stats.num_prompt_tokens
        begin = time.perf_counter()
        updates = engine.step()
        synchronise(engine.target.device)
        wall = time.perf_counter() - begin
        if stats.num_passes == passes:
            firsts += updates
            continue
        spent = {phase: seconds - before[phase] for phase, seconds in stats.seconds.items()}
        outside = max(0.0, wall - sum(spent.values()))
        has_read = stats.num_prompt_tokens > prompts
        yield Cycle(
            num_rows=stats.num_rows - rows,
            num_tokens=1 + max((update.num_nodes for update in updates), default=0),
            propose=spent["propose"] + spent["observe"],
            verify=spent["verify"],
            rest=spent["accept"] + spent["commit"] + outside,
            updates=(*firsts, *updates),
            has_read=has_read,
        )
        firsts = []


def time_cycles(
    target: Target,
    drafter: Drafter | None,
    shape: AnyShape | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_cycles: int,
) -> list[Cycle]:
    """Time decoding cycles, without those that warm up, read a prompt or run fewer sequences than there are prompts.

    Args:
        target: verifies the drafts.
        drafter: None for plain decoding.
        shape: of the draft trees; None for plain decoding.
        prompts: token ids; one sequence each, all decoded together.
        params: how tokens are drawn.
        num_cycles: maximum number of cycles to return.

    Raises:
        DataError: the target's context is too short for a single one.
    """
    max_new_tokens = (num_cycles + _WARM_UP + 2) * (1 + (0 if shape is None else shape.depth)) + 1
    longest = min(target.spec.max_positions, max(map(len, prompts)) + max_new_tokens)
    limits = [min(max_new_tokens, longest - len(prompt)) for prompt in prompts]
    batch = len(prompts)
    engine = build_engine(target, drafter, shape, batch, longest)
    whole = (
        each
        for each in cycles_of(engine, requests_of(prompts, limits, params, range(batch)))
        if each.num_rows == batch and not each.has_read
    )
    found = list(islice(whole, _WARM_UP, _WARM_UP + num_cycles))
    if not found:
        raise DataError(
            f"no cycle of {batch} sequences could be timed: the context of {target.spec.max_positions} tokens is too "
            "short; give smaller depths, shorter prompts or fewer cycles"
        )
    return found


def trimmed_mean(seconds: Sequence[float]) -> float:
    """Mean without the fastest and the slowest tenth: a stall of the machine does not count, but the usual slow cycles
    do, which a plan from medians would leave out."""
    ordered, tenth = sorted(seconds), len(seconds) // 10
    return statistics.fmean(ordered[tenth : len(ordered) - tenth])
