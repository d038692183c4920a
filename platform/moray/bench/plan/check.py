"""Measures the rows of a plan with the target: how far is each prediction off, and is the choice right?"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from moray.bench.plan.configs import PlanCheckConfig
from moray.bench.plan.costs import MAX_DRIFT, CycleCostTable
from moray.bench.plan.cycles import build_engine, cycles_of, requests_of, time_cycles, trimmed_mean
from moray.bench.plan.measure import check_log, load_all
from moray.bench.plan.page import write_check_page
from moray.bench.plan.planner import all_rows, best_row, check_batches, predict, trees_of
from moray.bench.plan.replayed import PLAIN, PlannedDraft, ReplayedDrafts, chain, read_replay
from moray.bench.plan.throughput import CheckRow, PlanRow
from moray.bench.recording import record
from moray.bench.replay.log import Continuation, read_log
from moray.decoding.params import SamplingParams
from moray.drafters.base import Drafter
from moray.errors import ConfigError, DataError
from moray.progress import Progress
from moray.targets.model import Target

_PLAIN_CYCLES = 8


@dataclass(frozen=True)
class _Measured:
    """One row, decoded once."""

    tokens: int
    seconds: float
    cycles: int
    is_same_text: bool
    slowdown: float
    """Seconds of plain cycles just before and after it, over those in the costs: how much slower the machine was."""


def check(config: PlanCheckConfig) -> dict[str, Any]:
    """Measure plain decoding, chains of `config.depths`, trees and the plan's own choice at every batch, in turns.

    Raises:
        ConfigError: the plan's own, or the plan is made from rates.
        MismatchError: the log belongs to another target.
        DataError: the log has changed since the replay.
    """
    if config.replay is None:
        raise ConfigError("replay is null: a plan from given rates cannot be checked; replay a log with these drafters")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    costs = CycleCostTable.load(config.costs)
    replayed = read_replay(config.replay, config.drafters, config.trees, config.num_continuations)
    check_batches(config, replayed)
    header, entries = read_log(replayed.log)
    entries = _replayed_entries(entries, replayed, config.replay)
    drafts = [PLAIN]
    for name, deepest in replayed.max_depths.items():
        drafts += [chain(name, depth) for depth in config.depths if depth <= min(config.max_depth, deepest)]
        drafts += trees_of(config, costs, replayed, name)
    wanted = [(draft, batch) for draft in drafts for batch in config.batches]
    wanted += [choice for choice in _choices(config, costs, replayed) if choice not in wanted]
    rows = [predict(costs, replayed, *size) for size in wanted]  # before anything is loaded, for this may fail
    target, drafters = load_all(config, replayed)
    check_log(header, target, replayed.log)
    is_exact = target.dtype == torch.float32
    found: list[list[_Measured]] = [[] for _ in wanted]
    with Progress("check", config.rounds * len(wanted), unit="rows") as progress:
        for turn in range(config.rounds):
            order = range(len(wanted)) if turn % 2 == 0 else reversed(range(len(wanted)))
            for index in order:
                draft, batch = wanted[index]
                drafter = drafters.get(draft.drafter)
                found[index].append(_measure(target, drafter, draft, batch, entries, header.params, costs))
                progress.advance()
    compared = [_compared(row, own, is_exact=is_exact) for row, own in zip(rows, found, strict=True)]
    result = _summary(compared, config) | {"costs_threads": costs.threads, "threads": torch.get_num_threads()}
    is_alike = costs.threads in (None, result["threads"])  # otherwise the threads are the cause, and named elsewhere
    result["has_drifted"] = is_alike and abs(result["median_slowdown"] - 1) > MAX_DRIFT
    Path(config.output).mkdir(parents=True, exist_ok=True)
    write_check_page(Path(config.output) / "check.html", result)
    return result


def _choices(
    config: PlanCheckConfig, costs: CycleCostTable, replayed: ReplayedDrafts
) -> Iterator[tuple[PlannedDraft, int]]:
    """What the plan chooses at each batch."""
    for batch in config.batches:
        yield best_row(list(all_rows(config, costs, replayed, batch)))[0], batch


def _measure(
    target: Target,
    drafter: Drafter | None,
    draft: PlannedDraft,
    batch: int,
    entries: Sequence[Continuation],
    params: SamplingParams,
    costs: CycleCostTable,
) -> _Measured:
    """Decode all continuations, with plain cycles of the same batch before and after. What is not a cycle, such as
    reading prompts, is not timed."""
    prompts = [entry.prompt for entry in entries]
    beside = time_cycles(target, None, None, prompts[:batch], params, _PLAIN_CYCLES)
    lengths = [len(entry.tokens) for entry in entries]
    longest = max(len(prompt) + count for prompt, count in zip(prompts, lengths, strict=True))
    engine = build_engine(target, drafter, draft.shape, batch, longest)
    texts: dict[int, list[int]] = {number: [] for number in range(len(entries))}
    seconds, cycles = 0.0, 0
    for each in cycles_of(engine, requests_of(prompts, lengths, params, [entry.sequence for entry in entries])):
        seconds += each.seconds
        cycles += each.num_rows
        for update in each.updates:
            texts[update.number] += update.tokens
    beside += time_cycles(target, None, None, prompts[:batch], params, _PLAIN_CYCLES)
    slowdown = trimmed_mean([each.seconds for each in beside]) / costs.plain_seconds(batch)
    pairs = zip(texts.values(), entries, strict=True)
    same = all(tuple(text) == entry.tokens for text, entry in pairs if len(entry.tokens) > 1)
    return _Measured(sum(lengths) - len(lengths), seconds, cycles, same, slowdown)


def _replayed_entries(entries: Sequence[Continuation], replayed: ReplayedDrafts, path: str) -> list[Continuation]:
    """The continuations that the replay has, in its order.

    Raises:
        DataError: the log has changed since.
    """
    by_uid = {entry.uid: entry for entry in entries}
    chains = next(iter(replayed.continuations.values()))
    if any(each.uid not in by_uid or len(by_uid[each.uid].tokens) != len(each.matched) + 1 for each in chains):
        raise DataError(f"replay '{path}' does not fit log '{replayed.log}', which has changed since: replay again")
    return [by_uid[each.uid] for each in chains]


def _compared(row: PlanRow, measured: Sequence[_Measured], *, is_exact: bool) -> CheckRow:
    """What was measured for a row, and how far the prediction is off. In 16-bit formats other texts prove nothing."""
    speeds = [each.tokens / each.seconds for each in measured]
    speed = statistics.median(speeds)
    adjusted = statistics.median(each.tokens / each.seconds * each.slowdown for each in measured)
    return {
        **row,
        "measured_tokens_per_second": speed,
        "slowdown": statistics.median(each.slowdown for each in measured),
        "adjusted_tokens_per_second": adjusted,
        "adjusted_error": row["tokens_per_second"] / adjusted - 1,
        "spread": (max(speeds) - min(speeds)) / speed,
        "measured_tau": measured[0].tokens / measured[0].cycles,
        "error": row["tokens_per_second"] / speed - 1,
        "lossless": all(each.is_same_text for each in measured) or (False if is_exact else None),
    }


def _summary(rows: list[CheckRow], config: PlanCheckConfig) -> dict[str, Any]:
    """Errors over all rows, and what the plan's choice costs at each batch.

    Speeds are compared as if the machine had been as fast for each row as when its costs were measured; plain decoding,
    by which that is judged, does not count for these errors.
    """
    errors = sorted(abs(row["error"]) for row in rows)
    adjusted = sorted(abs(row["adjusted_error"]) for row in rows if row["depth"]) or [0.0]
    slowdowns = [row["slowdown"] for row in rows]
    choices = []
    for batch in config.batches:
        own = [row for row in rows if row["batch"] == batch]
        chosen = max(own, key=lambda row: row["tokens_per_second"])
        fastest = max(own, key=lambda row: row["adjusted_tokens_per_second"])
        regret = fastest["adjusted_tokens_per_second"] / chosen["adjusted_tokens_per_second"] - 1
        choices.append(
            {
                "batch": batch,
                "chosen": chosen["name"],
                "fastest": fastest["name"],
                "regret": regret,
                "same_order": _same_order(own),
            }
        )
    return {
        "rows": rows,
        "choices": choices,
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "median_adjusted_error": statistics.median(adjusted),
        "worst_adjusted_error": adjusted[-1],
        "slowdown": [min(slowdowns), max(slowdowns)],
        "median_slowdown": statistics.median(slowdowns),
    } | record(config)


def _same_order(rows: list[CheckRow]) -> float:
    """Share of the pairs of rows of which the plan says rightly which is faster."""
    pairs = list(combinations(rows, 2))
    agree = sum(
        (a["tokens_per_second"] > b["tokens_per_second"])
        == (a["adjusted_tokens_per_second"] > b["adjusted_tokens_per_second"])
        for a, b in pairs
    )
    return agree / len(pairs) if pairs else 1.0
