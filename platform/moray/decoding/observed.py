"""Reads a given text with the target and hands out its taps: what a drafter would observe while decoding it."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.decoding.engine.observer import MAX_TOKENS
from moray.decoding.engine.runner import TargetRunner


@torch.inference_mode()
def taps_of_text(
    runner: TargetRunner, text: Sequence[int], needs: TapNeeds
) -> Iterator[tuple[Int[Tensor, " new"], Taps]]:
    """Read a text into the runner's first row, chunk by chunk, so that memory stays bounded.

    Args:
        runner: no sequence may hold a row of it; what its cache held before is overwritten.
        text: token ids, at most as many as the cache has slots.
        needs: which taps to hand out.

    Yields:
        the tokens of a chunk, and their taps.
    """
    if runner.cache.width < len(text):
        runner.cache.arrange(runner.cache.num_slots, 0, 0)
    for begin in range(0, len(text), MAX_TOKENS):
        chunk = text[begin : begin + MAX_TOKENS]
        output = runner.read(0, [chunk], [begin], needs.hidden_depths)
        kv = runner.cache.flat([0], [begin], [len(chunk)], needs.kv_layers) if needs.kv_layers else None
        yield runner.to_device([chunk])[0], Taps(kv, output.hidden)
