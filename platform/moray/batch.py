"""The tensors that travel between the stages: taps of a target and batches to train on."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TapNeeds:
    """Which taps a drafter reads: layers whose keys and values, and depths of hidden states."""

    kv_layers: tuple[int, ...] = ()
    hidden_depths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Taps:
    """Tensors that a drafter is allowed to read from the target, for `seq` tokens of each sequence.

    `kv` stacks the layers named in `TapNeeds.kv_layers`, in that order; `hidden` goes by depth: -1 is the
    last hidden state after the final norm, -1-N the residual stream that enters the last N layers.
    """

    kv: Float[Tensor, "batch seq layers width"] | None = None
    hidden: dict[int, Float[Tensor, "batch seq hidden"]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainBatch:
    """Padded chats with the target's taps.

        token          bos  who  are  you  I   am  Ada  end  pad
        response_mask   0    0    0    0   1   1    1    1    0
        predicts       who  are  you   I   am Ada  end   -    -

    A drafter at position i predicts the token at i + 1, so position i trains where response_mask[i + 1].
    """

    tokens: Int[Tensor, "batch seq"]
    response_mask: Bool[Tensor, "batch seq"]
    lengths: Int[Tensor, " batch"]
    taps: Taps

    @property
    def num_tokens(self) -> int:
        """Tokens, padding not counted."""
        return int(self.lengths.sum())

    def to(self, device: torch.device | str) -> "TrainBatch":
        """The same batch on another device."""
        kv = None if self.taps.kv is None else self.taps.kv.to(device, non_blocking=True)
        hidden = {depth: tensor.to(device, non_blocking=True) for depth, tensor in self.taps.hidden.items()}
        return TrainBatch(
            self.tokens.to(device, non_blocking=True),
            self.response_mask.to(device, non_blocking=True),
            self.lengths.to(device, non_blocking=True),
            Taps(kv, hidden),
        )


@dataclass(frozen=True)
class DataShardBatch:
    """What one data shard gives to one update (see `activations.reading.epochs`): its text at once, its taps when asked
    for.

    Text is small, and decides how much every position counts before anything is computed; taps are large, and
    stay encoded until their turn comes.
    """

    data_shard: int
    text: TrainBatch
    """Without taps, on the CPU."""
    uids: tuple[str, ...]
    """Of the chats, row by row."""
    taps: Callable[[], Taps]
    """Decodes them, where they are wanted."""

    def whole(self, device: torch.device | str) -> TrainBatch:
        """Text and taps on one device."""
        text = self.text
        return TrainBatch(text.tokens, text.response_mask, text.lengths, self.taps()).to(device)

    @property
    def num_padded(self) -> int:
        """Tokens, padding included."""
        return self.text.tokens.numel()
