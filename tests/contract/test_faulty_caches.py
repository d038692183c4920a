"""Faults of the greedy path, the cache and its mask fail the check for the same text."""

import pytest
import torch
from rehearsed import Rehearsed
from side_by_side import SHAPES, is_lossless
from tiny_targets import TinyTarget

from moray.decoding import speculate as speculate_module
from moray.decoding.accept import Accepted, accept
from moray.decoding.params import SamplingParams
from moray.decoding.session import TargetSession
from moray.targets.kv_cache import KVCache
from moray.trees.tree import PrefixMask

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def takes_the_second_best(tree, logits, sampler, root_position) -> Accepted:
    """Also accepts a first child that is only the target's second choice."""
    first = int(tree.tokens[1])
    if first in logits[0].topk(2).indices.tolist():
        return Accepted([1], [first], int(logits[1].argmax()))
    return accept(tree, logits, sampler, root_position)


def keep_first_slots(self, path) -> None:
    """Keeps the first slots behind the committed ones instead of the path's."""
    self.commit(path.shape[0])


_commit = TargetSession.commit


def keep_a_refused_slot(self, path):
    """Forgets to drop the first refused node."""
    taps = _commit(self, path)
    if self.cache.length + 32 < self.capacity:
        self.cache.length += 1
        self._mask.commit(1)
    return taps


def drop_the_last_slot(self, path):
    """Counts the accepted path one short."""
    taps = _commit(self, path)
    if path:
        self.cache.length -= 1
        self._mask.length -= 1
        self._mask._data[:, self._mask.length :] = -torch.inf
    return taps


def is_greedy_lossless(tiny: TinyTarget, shape_name: str) -> bool:
    drafter = Rehearsed(tiny.target, 0.5)
    prompts = [tiny.prompt(), tiny.prompt(1, 20)]
    return is_lossless(tiny, drafter, SHAPES[shape_name], SamplingParams(), prompts, 25)


CACHE_FAULTS = {
    "second best accepted": (speculate_module, "accept", takes_the_second_best, SHAPES),
    "wrong slots kept": (KVCache, "commit_path", keep_first_slots, ("fixed", "dynamic")),
    "refused slot kept": (TargetSession, "commit", keep_a_refused_slot, SHAPES),
    "accepted slot dropped": (TargetSession, "commit", drop_the_last_slot, SHAPES),
}


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_a_faulty_greedy_path_fails_the_check(tiny, fault, monkeypatch):
    owner, name, replacement, shape_names = CACHE_FAULTS[fault]
    for shape_name in shape_names:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replacement)
            assert not is_greedy_lossless(tiny("llama"), shape_name), shape_name
        assert is_greedy_lossless(tiny("llama"), shape_name), "right again without the fault"


def test_a_stale_mask_fails_the_check(tiny, monkeypatch):
    """A mask that keeps what earlier trees showed lets refused branches be seen."""

    def view(self, block):
        new, scratch = block.shape
        end = self.length + scratch
        seen = self._data[:new, self.length : end]
        self._data[:new, self.length : end] = torch.where(block, torch.zeros_like(seen), seen)
        return self._data[None, None, :new, :end]

    with monkeypatch.context() as patch:
        patch.setattr(PrefixMask, "view", view)
        assert not is_greedy_lossless(tiny("llama"), "dynamic")
