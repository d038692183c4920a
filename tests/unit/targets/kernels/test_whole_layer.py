"""A whole layer in one call gives the bits of its parts, and writes the same keys and values."""

import pytest
import torch
from compiled_kernels import needs_compiler
from tiny_targets import save_target

from moray.decoding.engine.kv_cache import BatchedKVCache
from moray.decoding.engine.runner import TargetRunner
from moray.targets import model as model_module
from moray.targets.kernels.kinds import Kernels
from moray.targets.kernels.whole_layer import WholeLayer
from moray.targets.kv_cache import KVCache
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.trees.tree import TokenTree, structure_of

pytestmark = needs_compiler
LENGTHS = (9, 4, 6)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def target(request, tmp_path_factory) -> Target:
    folder = save_target(tmp_path_factory.mktemp("whole"), "llama", attention_bias=True, mlp_bias=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "stay_in_cache", lambda weights: False)
        patch.setattr(
            model_module, "choose_kernels", lambda weights, **_: Kernels(None, "for a test", compiled_up_to=1000)
        )
        return Target.load(TargetConfig(model=str(folder), device="cpu", dtype=request.param))


def tree() -> TokenTree:
    structure = structure_of([-1, 0, 0, 1], [0, 1, 1, 2], torch.device("cpu"))
    return TokenTree(torch.tensor([40, 41, 42, 43]), structure.parents, structure.depths, structure.ancestors, 2)


@torch.inference_mode()
def passes_of_rows(target: Target) -> list[torch.Tensor]:
    """Three prompts in one pass, then their trees in one, then one row's tree and one row's next token."""
    runner = TargetRunner(target, 64 * len(LENGTHS))
    runner.cache.arrange(64, 0, 0)
    prompts = [[(7 * row + one) % 90 for one in range(length)] for row, length in enumerate(LENGTHS)]
    found = [runner.read(0, prompts, [0] * len(LENGTHS)).last]
    found.append(runner.verify(0, LENGTHS, [tree()] * len(LENGTHS)).last)
    found.append(runner.verify(1, LENGTHS[1:2], [tree()]).last)
    found.append(runner.read(2, [[5]], LENGTHS[2:]).last)
    return [*found, runner.cache._memory.clone()]


@torch.inference_mode()
def passes_of_a_batch(target: Target) -> list[torch.Tensor]:
    """Two sequences of one length: two tokens with a mask that both share, then one."""
    cache = target.new_cache(20, 2)
    tokens = torch.arange(24).view(2, 12)
    target.forward(tokens[:, :9], torch.arange(9).expand(2, -1), None, cache)
    cache.commit(9)
    mask = torch.zeros(1, 1, 2, 11, dtype=target.dtype)
    mask[0, 0, 0, 10] = -torch.inf
    found = [target.forward(tokens[:, 9:11], torch.tensor([[9, 10]]).expand(2, -1), mask, cache).last]
    cache.commit(2)
    found.append(target.forward(tokens[:, 11:], torch.full((2, 1), 11), None, cache).last)
    return [*found, cache.data.clone()]


@pytest.mark.parametrize("passes", [passes_of_rows, passes_of_a_batch])
def test_one_call_gives_the_bits_of_calls_for_each_part(target, passes, monkeypatch):
    called = []
    whole = WholeLayer.__call__
    monkeypatch.setattr(WholeLayer, "__call__", lambda *args: called.append(1) or whole(*args))
    found = passes(target)
    num_passes = len(found) - 1
    assert len(called) == num_passes * target.spec.num_layers
    for layer in target.model.model.layers:
        monkeypatch.setattr(layer.forward, "_whole", None)
    for own, wanted in zip(found, passes(target), strict=True):
        assert torch.equal(own, wanted)
    assert len(called) == num_passes * target.spec.num_layers, "the parts were called"


def test_caches_that_store_in_another_way_are_left_to_the_parts(target):
    class Recorder(KVCache):
        def update(self, *args, **kwargs):
            return super().update(*args, **kwargs)

    class Rows(BatchedKVCache):
        def update(self, *args, **kwargs):
            return super().update(*args, **kwargs)

    plain, rows = target.new_cache(8), BatchedKVCache(target, 64)
    rows.arrange(64, 0, 0)
    rows.aim([3], 2, 5)
    assert (plain.places(1, 2).num_seen, plain.places(1, 2).begin) == (2, 0)
    assert (rows.places(1, 2).num_seen, rows.places(1, 2).begin) == (5, 3)
    like = target.model.lm_head.weight
    assert Recorder(range(4), 2, 16, 8, 1, like).places(1, 2) is None
    assert Rows(target, 64).places(1, 2) is None


@torch.inference_mode()
def test_a_full_cache_is_an_error(target):
    cache = target.new_cache(3)
    cache.commit(3)
    with pytest.raises(AssertionError, match="the cache is full"):
        target.forward(torch.tensor([[1]]), torch.tensor([[3]]), None, cache)
