"""The cache keeps the slots it is told to, and packs keys and values as taps say."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moray.targets.kv_cache import KVCache, PastAndPredicted

LAYERS, HEADS, DIM, CAPACITY = 3, 2, 4, 12


def cache(first_layer: int = 0, batch: int = 1) -> KVCache:
    return KVCache(range(first_layer, first_layer + LAYERS), HEADS, DIM, CAPACITY, batch, torch.zeros(1))


def numbered(new: int, start: int, layer: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys whose every number names slot, layer, head and dimension; values are their negatives."""
    slot = torch.arange(start, start + new).float()[None, None, :, None] * 1000
    head = torch.arange(HEADS).float()[None, :, None, None] * 10
    key = (slot + layer * 100 + head + torch.arange(DIM).float()).expand(batch, HEADS, new, DIM)
    return key, -key


def fill(target: KVCache, new: int, start: int, first_layer: int = 0, batch: int = 1) -> None:
    for layer in range(first_layer, first_layer + LAYERS):
        target.update(*numbered(new, start, layer, batch), layer)


def slots(target: KVCache, layer: int = 0) -> list[int]:
    """Which numbered slots are committed, in order."""
    return (target.data[layer, 0, 0, 0, : target.length, 0] / 1000).long().tolist()


def test_update_returns_committed_and_new_keys_together():
    kv = cache()
    fill(kv, 4, 0)
    kv.commit(4)
    key, value = kv.update(*numbered(2, 4, 1), 1)
    assert key.shape == (1, HEADS, 6, DIM)
    assert torch.equal(key, numbered(6, 0, 1)[0])
    assert torch.equal(value, -key)
    assert kv.length == kv.get_seq_length() == 4, "nothing is kept before commit"


def test_what_was_not_committed_is_overwritten():
    kv = cache()
    fill(kv, 5, 0)
    kv.commit(2)
    fill(kv, 3, 7)
    kv.commit(3)
    assert slots(kv) == [0, 1, 7, 8, 9]


def test_nothing_is_allocated_after_construction():
    kv = cache()
    place = kv.data.data_ptr()
    fill(kv, 6, 0)
    kv.commit(3)
    kv.reset()
    fill(kv, 2, 0)
    kv.write(torch.zeros(1, 2, LAYERS, 2 * HEADS * DIM))
    assert kv.data.data_ptr() == place
    assert kv.data.shape[4] == CAPACITY


def test_flat_taps_hold_heads_as_key_then_value():
    kv = cache(batch=2)
    fill(kv, 5, 0, batch=2)
    kv.commit(5)
    flat = kv.flat(1, 4)
    assert flat.shape == (2, 3, LAYERS, 2 * HEADS * DIM)
    for token, layer, head in ((0, 0, 0), (2, 1, 1), (1, 2, 0)):
        key = [(token + 1) * 1000 + layer * 100 + head * 10 + d for d in range(DIM)]
        begin = head * 2 * DIM
        assert flat[1, token, layer, begin : begin + DIM].tolist() == key
        assert flat[1, token, layer, begin + DIM : begin + 2 * DIM].tolist() == [-number for number in key]


@pytest.mark.parametrize("layers", [(1,), (0, 2), (1, 2), (0, 1, 2), (2, 0)])
def test_flat_taps_of_some_layers_touch_their_slots_alone(layers):
    kv = cache(batch=2)
    fill(kv, 5, 0, batch=2)
    kv.commit(5)
    wanted = kv.flat(1, 4)[:, :, list(layers)]
    with _LargestCopy() as largest:
        assert torch.equal(kv.flat(1, 4, layers), wanted)
    assert largest.num_elements <= wanted.numel()


def test_writing_taps_gives_back_the_cache():
    source, copy = cache(), cache()
    fill(source, 7, 0)
    source.commit(7)
    copy.write(source.flat(0, 3))
    copy.write(source.flat(3, 7))
    assert copy.length == 7
    assert torch.equal(copy.data[..., :7, :], source.data[..., :7, :])


def test_a_cache_of_the_last_layers_goes_by_their_own_numbers():
    kv = cache(first_layer=5)
    fill(kv, 2, 0, first_layer=5)
    kv.commit(2)
    key, _ = kv.update(*numbered(1, 2, 6), 6)
    assert torch.equal(key, numbered(3, 0, 6)[0])
    with pytest.raises(KeyError):
        kv.update(*numbered(1, 2, 4), 4)


def test_past_and_predicted_stand_in_this_order():
    source = cache()
    fill(source, 4, 0)
    source.commit(4)
    past = PastAndPredicted(source.flat(0, 4)[:, :, 1:], first_layer=8, head_dim=DIM)
    for layer in (8, 9):
        key, value = past.update(*numbered(4, 20, layer), layer)
        real, _ = numbered(4, 0, layer - 7)
        assert torch.equal(key, torch.cat([real, numbered(4, 20, layer)[0]], dim=2))
        assert torch.equal(value, -key)


class _LargestCopy(TorchDispatchMode):
    """The most elements of a tensor that an operation in the block has made; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.num_elements = max(self.num_elements, result.numel())
        return result
