"""Faults of the greedy path, the cache and its mask fail the check for the same text."""

from dataclasses import replace

import pytest
import torch
from rehearsed import Rehearsed
from side_by_side import SHAPES, is_lossless
from tiny_targets import TinyTarget

from moray.decoding.engine import engine as engine_module
from moray.decoding.engine.kv_cache import BatchedKVCache
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.accept import Accepted, accept, row_by_row

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def takes_the_second_best(tree, logits, sampler, root_position) -> Accepted:
    """Also accepts a first child that is only the target's second choice."""
    first = int(tree.tokens[1])
    if first in logits[0].topk(2).indices.tolist():
        return Accepted([1], [first], int(logits[1].argmax()))
    return accept(tree, logits, sampler, root_position)


def keep_first_slots(self, rows, begins, paths) -> None:
    """Keeps the first slots behind the committed ones instead of the path's."""


_verify, _keep = TargetRunner.verify, TargetRunner.keep


def verify_behind_a_refused_slot(self, first_row, lengths, trees, *others):
    """Forgets to drop the first refused node: the next tree's root goes behind it."""
    return _verify(self, first_row, [length + 1 for length in lengths], trees, *others)


def drop_the_last_slot(self, first_row, lengths, paths):
    """Counts the accepted path one short: its last node stays where it was."""
    _keep(self, first_row, lengths, [path[:-1] for path in paths])
    for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
        if path:  # what is left there is another node's
            self.cache.move([first_row + row], [length], [[*range(len(path)), 0]])


def is_greedy_lossless(tiny: TinyTarget, shape_name: str) -> bool:
    drafter = Rehearsed(tiny.target, 0.5)
    prompts = [tiny.prompt(), tiny.prompt(1, 20)]
    return is_lossless(tiny, drafter, SHAPES[shape_name], SamplingParams(), prompts, 25)


CACHE_FAULTS = {
    "second best accepted": (engine_module, "accept_rows", row_by_row(takes_the_second_best), SHAPES),
    "wrong slots kept": (BatchedKVCache, "move", keep_first_slots, ("fixed", "dynamic")),
    "refused slot kept": (TargetRunner, "verify", verify_behind_a_refused_slot, SHAPES),
    "accepted slot dropped": (TargetRunner, "keep", drop_the_last_slot, SHAPES),
}


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_a_faulty_greedy_path_fails_the_check(tiny, fault, monkeypatch):
    owner, name, replacement, shape_names = CACHE_FAULTS[fault]
    for shape_name in shape_names:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replacement)
            assert not is_greedy_lossless(tiny("llama"), shape_name), shape_name
        assert is_greedy_lossless(tiny("llama"), shape_name), "right again without the fault"


def test_a_mask_that_shows_refused_branches_fails_the_check(tiny, monkeypatch):
    """A mask in which every node sees all that stand before it."""

    def verify(self, first_row, lengths, trees, *others):
        causal = [replace(tree, ancestors=torch.ones_like(tree.ancestors).tril()) for tree in trees]
        return _verify(self, first_row, lengths, causal, *others)

    with monkeypatch.context() as patch:
        patch.setattr(TargetRunner, "verify", verify)
        assert not is_greedy_lossless(tiny("llama"), "dynamic")
