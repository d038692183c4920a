"""Measures, once before use, what an engine's passes and drafts cost on this machine, by rows and tokens."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from moray.batch import TapNeeds, Taps
from moray.decoding.device import synchronise
from moray.decoding.engine.draft_source import DraftJob, LocalDrafts
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.params import SamplingParams
from moray.decoding.planning.costs import Costs, CostTable, ascending, growing_sizes
from moray.decoding.sampling.sampler import Sampler, highest
from moray.drafters.base import Drafter
from moray.targets.model import Target
from moray.trees.shapes import AdaptiveShape, GrowableShape
from moray.trees.tree import TokenTree, chain_of

_LOGGER = logging.getLogger(__name__)

_LENGTH = 128
"""Assumed length of every row, in tokens."""
_REPEATS = 5
_MAX_SECONDS = 60.0
"""From the first timed run on. After that only sizes that were never timed are run, so that other work on the machine
does not keep a server from starting for many minutes."""


PassSeconds = dict[tuple[int, int], float]
"""Seconds of a pass, by rows and by nodes of each row's tree, root included."""


def measure_costs(
    target: Target, drafter: Drafter, shape: AdaptiveShape, max_rows: int, passes: PassSeconds
) -> CostTable:
    """Time passes and drafts for 1, 2, 4, ... and `max_rows` sequences, with each of the drafter's N.

    Drafts are timed in this process, wherever they are made later. Each size is run a few times, sizes in turn, and the
    fastest run counts, because other work on the machine only ever adds time. On a busy machine, where that would
    take longer than a minute, sizes are run fewer times, but each at least once after a warm-up.

    Args:
        target: whose passes are timed.
        drafter: whose drafts are timed.
        shape: its largest tree decides which sizes are timed.
        max_rows: maximum number of sequences in a pass.
        passes: passes of this target that were timed for other drafters; they are not timed again, and those that are
            missing are added.
    """
    rows, layer_counts = _powers(max_rows), drafter.layer_counts
    sizes, levels = growing_sizes(shape.num_nodes + 1), growing_sizes(shape.depth)
    length = max(1, min(_LENGTH, target.spec.max_positions - shape.num_nodes - 1))
    missing = [(count, size) for count in rows for size in sizes if (count, size) not in passes]
    drafts = [(count, n, depth) for count in rows for n in layer_counts for depth in levels]
    _LOGGER.info("measuring the seconds of %d sizes of passes and %d of drafts", len(missing), len(drafts))
    runs = _passes(target, shape, length, missing)
    local = LocalDrafts(drafter, length + 1, shape.num_expanded)
    sampler = Sampler(SamplingParams(), target.spec.vocab_size, target.device)
    _tell(local, drafter, max(rows), length)
    runs += [partial(_draft, local, sampler, shape.at(depth), n, count, length) for count, n, depth in drafts]
    seconds = _fastest(runs, target.device)
    passes.update(zip(missing, seconds, strict=False))
    draft = dict(zip(drafts, seconds[len(missing) :], strict=True))
    return CostTable(
        {
            count: Costs(
                ascending(sizes, [passes[count, size] for size in sizes]),
                {n: ascending(levels, [draft[count, n, depth] for depth in levels]) for n in layer_counts},
            )
            for count in rows
        }
    )


def _passes(
    target: Target, shape: AdaptiveShape, length: int, wanted: list[tuple[int, int]]
) -> list[Callable[[], None]]:
    """Passes over so many rows with trees of so many nodes each, after `length` tokens."""
    if not wanted:
        return []
    max_rows = max(count for count, _ in wanted)
    runner = TargetRunner(target, max_rows * (length + shape.num_nodes + 1), max_rows)
    runner.cache.arrange(length + shape.num_nodes + 1, 0, 0)
    runner.read(0, [[0] * length], [0])  # a sparse target attends only to tokens that were read
    trees = {size: _tree(size, shape.depth, target.device) for _, size in wanted}
    return [partial(_verify, target, runner, [length] * count, [trees[size]] * count) for count, size in wanted]


def _tree(num_tokens: int, max_depth: int, device: torch.device) -> TokenTree:
    """A chain of `num_tokens` nodes with depths capped at `max_depth`, so that the rotary table covers its
    positions."""
    chain = chain_of(torch.zeros(num_tokens, dtype=torch.long, device=device))
    return replace(chain, depths=chain.depths.clamp(max=max_depth))


def _verify(target: Target, runner: TargetRunner, lengths: list[int], trees: list[TokenTree]) -> None:
    """One pass of the engine; its result is dropped."""
    highest(target.logits(runner.verify(0, lengths, trees).last))


def _tell(local: LocalDrafts, drafter: Drafter, num_rows: int, length: int) -> None:
    like, needs = drafter.head.weight, drafter.observed
    tokens = torch.zeros(length, dtype=torch.long, device=like.device)
    memory = drafter.observe(_taps(drafter, needs, length))
    for number in range(num_rows):
        local.extend(number, tokens, memory, 0)


def _taps(drafter: Drafter, needs: TapNeeds, length: int) -> Taps:
    like, spec = drafter.head.weight, drafter.spec
    kv = like.new_zeros(1, length, len(needs.kv_layers), spec.kv_width) if needs.kv_layers else None
    return Taps(kv, {depth: like.new_zeros(1, length, spec.hidden_size) for depth in needs.hidden_depths})


def _draft(
    local: LocalDrafts, sampler: Sampler, shape: GrowableShape, num_target_layers: int, num_rows: int, length: int
) -> None:
    numbers = range(num_rows)
    local.submit([DraftJob(number, 0, length, shape, sampler, num_target_layers) for number in numbers])
    local.collect(list(numbers))


@torch.inference_mode()
def _fastest(runs: list[Callable[[], None]], device: torch.device) -> list[float]:
    best = [float("inf")] * len(runs)
    for run in runs:
        run()  # warms up
    synchronise(device)
    began = time.perf_counter()
    for turn in range(_REPEATS):
        for index, run in enumerate(runs):
            begin = time.perf_counter()
            if turn and begin - began > _MAX_SECONDS:
                return best
            run()
            synchronise(device)
            best[index] = min(best[index], time.perf_counter() - begin)
    return best


def _powers(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest` itself."""
    return sorted({largest, *(1 << power for power in range(largest.bit_length()) if 1 << power <= largest)})
