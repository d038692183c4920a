"""Measures what passes, chains and the rest of a cycle cost on this machine, in cycles of a real engine."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from moray.bench.plan.configs import CostsConfig, PlanCheckConfig
from moray.bench.plan.costs import MAX_DRIFT, CycleCostTable, tree_key
from moray.bench.plan.cycles import Cycle, time_cycles, trimmed_mean
from moray.bench.plan.replayed import PLAIN, PlannedDraft, ReplayedDrafts, chain, read_replay
from moray.bench.recording import check_writable
from moray.bench.replay.log import LogHeader, read_log
from moray.config import validate
from moray.drafters.base import Drafter
from moray.drafters.loading import load_drafters
from moray.errors import MismatchError
from moray.progress import Progress
from moray.provenance import machine
from moray.targets.model import Target
from moray.text import ChatTokenizer

_HALVES = 2
_FEWEST = 3
"""Passes of a size that prompt lookup drafted less often than this are no costs to rely on."""


def measure(config: CostsConfig) -> dict[str, Any]:
    """Measure all sizes, write the YAML file, and return what is in it with the drift between the two halves.

    Raises:
        ConfigError: the target or a drafter cannot be read, or `output` cannot be written.
        MismatchError: a drafter, or the log, belongs to another target.
        DataError: the target's context is too short for the cycles.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    replayed = read_replay(config.replay, config.drafters, config.trees, None)
    header, entries = read_log(replayed.log)
    check_writable(Path(config.output), "output")
    target, drafters = load_all(config, replayed)
    check_log(header, target, replayed.log)
    sizes = [(PLAIN, batch) for batch in config.batches]
    for name, drafter in drafters.items():
        deepest = drafter.max_depth or max(config.depths)
        drafts = [chain(name, depth) for depth in sorted({min(depth, deepest) for depth in config.depths})]
        drafts += [PlannedDraft(name, tree.shape) for tree in replayed.trees[name]]
        sizes += [(draft, batch) for batch in config.batches for draft in drafts]

    def timed(draft: PlannedDraft, batch: int) -> list[Cycle]:
        drafter = drafters.get(draft.drafter)
        prompts = [entries[index % len(entries)].prompt for index in range(batch)]
        return time_cycles(target, drafter, draft.shape, prompts, header.params, config.num_cycles // _HALVES)

    halves: list[dict[tuple[PlannedDraft, int], list[Cycle]]] = []
    with Progress("costs", _HALVES * len(sizes), unit="sizes") as progress:
        timed(*sizes[0])  # does not count: the first cycles after loading are slower
        for half in range(_HALVES):
            found = {}
            for size in sizes if half == 0 else reversed(sizes):  # a slow spell must not hit the same sizes twice
                found[size] = timed(*size)
                progress.advance()
            halves.append(found)
    drift = statistics.median(_ratio(halves[0][size], halves[1][size]) for size in sizes)
    values = _table({size: halves[0][size] + halves[1][size] for size in sizes})
    here: dict[str, Any] = machine()
    where = ", ".join([f"{here['cores']} x {here['cpu']}", *here["gpus"]])
    values = {"machine": where, "threads": torch.get_num_threads(), **values}
    Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    Path(config.output).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return {"costs": values, "drift": drift, "has_drifted": drift > MAX_DRIFT}


def load_all(config: CostsConfig | PlanCheckConfig, replayed: ReplayedDrafts) -> tuple[Target, dict[str, Drafter]]:
    """The target, and the drafters by the names that the replay gives them.

    Raises:
        ConfigError: the target or a drafter cannot be read.
        MismatchError: a drafter belongs to another target.
    """
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    with Progress(f"load target {config.target.model}"):
        target = Target.load(config.target)
    found = load_drafters(tuple(replayed.entries.values()), target, tokenizer)
    return target, dict(zip(replayed.entries, found.values(), strict=True))


def check_log(header: LogHeader, target: Target, log: str) -> None:
    """Refuse a log of another target.

    Raises:
        MismatchError: names the log.
    """
    if target.spec.fingerprint != header.target:
        raise MismatchError(
            f"log '{log}' was recorded with another target (fingerprint {header.target}) than `target.model` "
            f"({target.spec.fingerprint}): give the target that the log was recorded with"
        )


def _ratio(first: Sequence[Cycle], second: Sequence[Cycle]) -> float:
    """How much the seconds of the two halves differ, as a share."""
    a, b = (trimmed_mean([each.seconds for each in half]) for half in (first, second))
    return abs(a - b) / min(a, b)


def _table(found: dict[tuple[PlannedDraft, int], list[Cycle]]) -> dict[str, Any]:
    """The YAML file's values."""
    passes: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    drafts: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    trees: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    rest: dict[int, list[float]] = defaultdict(list)
    plain: dict[int, float] = {}
    for (draft, batch), cycles in found.items():
        for each in cycles:
            passes[batch][each.num_tokens].append(each.verify)
            rest[batch].append(each.rest)
        propose = [each.propose for each in cycles]
        if draft.shape is None:  # timed as a whole, for an engine that never drafts is faster in all parts
            plain[batch] = trimmed_mean([each.seconds for each in cycles])
        elif draft.is_chain:
            drafts[draft.drafter][batch][draft.depth] = trimmed_mean(propose)
        else:
            trees[draft.drafter][tree_key(draft.shape)][batch] = trimmed_mean(propose)
    values = {
        "passes": {
            batch: {size: trimmed_mean(own[size]) for size in sorted(own) if size == 1 or len(own[size]) >= _FEWEST}
            for batch, own in passes.items()
        },
        "drafts": {name: {batch: dict(own) for batch, own in by_batch.items()} for name, by_batch in drafts.items()},
        "trees": {name: {tree: dict(own) for tree, own in by_tree.items()} for name, by_tree in trees.items()},
        "rest": {batch: trimmed_mean(own) for batch, own in rest.items()},
        "plain": plain,
    }
    validate(CycleCostTable, values)
    return values
