"""Taps and training batches straight from a target, without a cache between."""

import torch
from torch import Tensor

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.targets.model import Target


def taps_of(target: Target, tokens: Tensor, needs: TapNeeds) -> Taps:
    """Taps of whole sequences [batch, seq] by one forward pass."""
    batch, seq = tokens.shape
    cache = target.new_cache(seq, batch)
    mask = torch.ones(seq, seq, dtype=torch.bool, device=target.device).tril()[None, None]
    positions = torch.arange(seq, device=target.device).expand(batch, seq)
    output = target.forward(tokens, positions, mask, cache, needs.hidden_depths)
    cache.commit(seq)
    kv = cache.flat(0, seq)[:, :, list(needs.kv_layers)].clone() if needs.kv_layers else None
    return Taps(kv, {depth: hidden.clone() for depth, hidden in output.hidden.items()})


def batch_of(target: Target, sequences: list[list[int]], prompt_length: int, needs: TapNeeds) -> TrainBatch:
    """Padded chats with their taps; everything after the first `prompt_length` tokens is the response."""
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    response = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        response[row, prompt_length : len(sequence)] = True
    lengths = torch.tensor([len(s) for s in sequences])
    tokens, response, lengths = (each.to(target.device) for each in (tokens, response, lengths))
    return TrainBatch(tokens, response, lengths, taps_of(target, tokens, needs))
