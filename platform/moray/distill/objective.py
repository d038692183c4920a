"""Forward pass and losses as one module, which is what gets wrapped for training on many workers."""

from contextlib import nullcontext
from dataclasses import fields

import torch
from torch import Tensor, nn

from moray.batch import TrainBatch
from moray.distill.configs import LossConfig, TrainConfig
from moray.distill.losses import LossSums, distillation_loss
from moray.distill.masks import loss_positions
from moray.drafters.learner import DraftView, Learner
from moray.errors import ConfigError


class Objective(nn.Module):
    """A drafter with its losses.

    Losses call a drafter's score functions, so they read weights too: a wrapper that gathers weights (ZeRO) or tracks
    them (DDP) must contain both.
    """

    def __init__(self, drafter: Learner, losses: LossConfig, train: TrainConfig) -> None:
        super().__init__()
        self.drafter = drafter
        num_tokens = drafter.vocabulary.size
        if losses.kl_top_k is not None and losses.kl_top_k >= num_tokens:
            raise ConfigError(
                f"losses.kl_top_k is {losses.kl_top_k}; the draft vocabulary has {num_tokens} tokens: give fewer, or "
                "leave kl_top_k out"
            )
        self._losses = losses
        if train.precision == "auto":
            raise ConfigError(
                "train.precision is auto, which pipelines.distill replaces: give float32 or bfloat16 here"
            )
        self._dtype = None if train.precision == "float32" else getattr(torch, train.precision)
        device_type = next(drafter.parameters()).device.type
        if self._dtype is torch.float16 and not _has_float16(device_type):
            raise ConfigError(
                f"train.precision is float16, which torch {torch.__version__} cannot train with on a {device_type}: "
                "use bfloat16 or float32"
            )

    def forward(self, batch: TrainBatch, view: DraftView, with_figures: bool = True) -> tuple[Tensor, ...]:
        """The fields of `LossSums` as a tuple, because wrappers look for tensors in no other type."""
        device_type = batch.tokens.device.type
        with nullcontext() if self._dtype is None else torch.autocast(device_type, dtype=self._dtype):
            # Not `self.drafter(...)`: weights that it or its losses use outside a layer then belong to this
            # module, which is entered first and left last.
            output = self.drafter.forward(batch, view)
        weights = self._losses.at(view.progress)
        positions = loss_positions(batch)
        seed = view.seed + 1  # the drafter draws its noise from the seed itself
        sums = distillation_loss(output, batch, positions, self.drafter, weights, with_figures, seed)
        return tuple(getattr(sums, field.name) for field in fields(LossSums))


def _has_float16(device_type: str) -> bool:
    """Whether float16 products can be computed on this device, forward and backward."""
    try:
        with torch.autocast(device_type, dtype=torch.float16):
            x = torch.ones(1, 1, 2, 8, device=device_type, requires_grad=True)
            attended = nn.functional.scaled_dot_product_attention(x, x, x)
            nn.functional.linear(attended, x[0, 0]).float().sum().backward()
    except RuntimeError:
        return False
    return True
