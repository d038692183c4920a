"""The published training recipe of MoA: the baseline for training from a cache with our trainer.

This is what the authors' code does in every step (arXiv 2410.03804, section 4 and the released trainer): it
accumulates gradients over micro-batches of one chat, runs the target again each time with all its logits, builds dense
float masks of seq x seq, and computes losses over the whole vocabulary at every position before masking them. The code
here is written from that description, layer by layer in plain torch, on the same drafter's weights. Both loops train
the same model on the same chats (a test compares their losses) and differ only in how they compute it.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import Taps, TrainBatch
from moray.distill.configs import LossConfig, TrainConfig
from moray.distill.masks import draw_view, loss_positions
from moray.drafters.common.decoder_layers import SelfAttentionLayer
from moray.drafters.common.layers import Rotary, rotate
from moray.drafters.learner import DraftView
from moray.drafters.moa.moa import MoA
from moray.drafters.moa.pooled import PooledSelfAttentionLayer
from moray.errors import ConfigError
from moray.targets.loading import load_causal_lm
from moray.targets.model import pick_device
from moray.targets.spec import TargetConfig


@dataclass(frozen=True)
class Chat:
    """One tokenised chat, as the recipe's data loader yields it."""

    tokens: Int[Tensor, " seq"]
    response_mask: Bool[Tensor, " seq"]


class RecipeTrainer:
    """Trains a MoA drafter with N = 0, one chat at a time."""

    def __init__(
        self, target: nn.Module, drafter: MoA, losses: LossConfig, train: TrainConfig, lr: float = 3e-5
    ) -> None:
        """
        Args:
            train: provides the precision and the gradient clipping.

        Raises:
            ConfigError: the drafter runs target layers, which the released code trains differently.
        """
        if drafter.config.num_target_layers:
            raise ConfigError("the published recipe is written down for target_layers=0: give that")
        self._target: Any = target
        self._drafter = drafter
        self._losses = losses
        self._clip = train.max_grad_norm
        self._dtype = None if train.precision == "float32" else getattr(torch, train.precision)
        self._optimiser = torch.optim.AdamW(drafter.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def update(self, chats: Sequence[Chat], generator: torch.Generator) -> float:
        """Run one update over the chats, one at a time; returns their mean loss."""
        self._drafter.train()
        total = 0.0
        for chat in chats:
            loss = self._loss(chat, generator) / len(chats)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self._drafter.parameters(), self._clip)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return total

    def _loss(self, chat: Chat, generator: torch.Generator) -> Float[Tensor, ""]:
        drafter, device = self._drafter, next(self._target.parameters()).device
        tokens, response = chat.tokens[None].to(device), chat.response_mask[None].to(device)
        with torch.no_grad():
            seen = self._target(tokens, output_hidden_states=True, use_cache=True)
            pairs = [torch.stack([layer.keys, layer.values], dim=3) for layer in seen.past_key_values.layers]
            kv = torch.stack([pair.transpose(1, 2).flatten(2) for pair in pairs], dim=2)
            wanted = F.log_softmax(seen.logits.float(), dim=-1)
        real = seen.hidden_states[-1]
        lengths = torch.tensor([tokens.shape[1]], device=device)
        batch = TrainBatch(tokens, response, lengths, Taps(kv, {-1: real}))
        view = draw_view(batch, drafter.config.verified_period, 0.0, generator)
        with nullcontext() if self._dtype is None else torch.autocast(device.type, dtype=self._dtype):
            predicted = self._predict(batch, view)
        drafted = F.log_softmax(drafter.head.logits(predicted.to(drafter.head.weight.dtype)).float(), dim=-1)
        kl = F.kl_div(drafted, wanted, reduction="none", log_target=True).sum(dim=-1)
        feature = F.smooth_l1_loss(predicted.float(), real.float(), reduction="none").mean(dim=-1)
        column = torch.arange(tokens.shape[1], device=device)
        mask = (loss_positions(batch) & (view.start != column)).float()
        return ((self._losses.feature * feature + self._losses.kl * kl) * mask).sum() / mask.sum().clamp(min=1.0)

    def _predict(self, batch: TrainBatch, view: DraftView) -> Float[Tensor, "1 seq hidden"]:
        """Compute the drafter's features at all positions, layer by layer as in the paper (section 3.1)."""
        drafter, kv = self._drafter, batch.taps.kv
        assert kv is not None
        seq = batch.tokens.shape[1]
        rotary, column = drafter.rotary.rows(0, seq), torch.arange(seq, device=kv.device)
        own, verified = _dense((column <= column[:, None])[None]), _dense(column <= view.start[:, :, None])
        x = _decoder_layer(drafter.sa, drafter.head.embed(batch.tokens).float(), rotary, own)
        layers = kv[0].float()  # each token becomes a sequence of layers
        everywhere = _dense(torch.ones(1, layers.shape[1], layers.shape[1], dtype=torch.bool, device=kv.device))
        mixed = _decoder_layer(drafter.lsa, layers, drafter.layer_rotary.rows(0, layers.shape[1]), everywhere)
        memory = _norm(drafter.to_memory(mixed.mean(dim=1))[None], drafter.ca.input_norm)
        attention = drafter.ca.attention
        key, value = _heads(attention.kv_proj(memory), attention.head_dim).chunk(2, dim=1)
        query = _heads(attention.q_proj(_norm(x, drafter.ca.input_norm)), attention.head_dim)
        x = x + attention.o_proj(_attend(rotate(query, rotary), rotate(key, rotary), value, verified))
        return x + _mlp(drafter.ca, x)


def _decoder_layer(
    layer: SelfAttentionLayer | PooledSelfAttentionLayer,
    x: Float[Tensor, "batch seq width"],
    rotary: Rotary,
    mask: Float[Tensor, "1 1 seq seq"],
) -> Float[Tensor, "batch seq width"]:
    attention = layer.attention
    heads = _heads(attention.qkv_proj(_norm(x, layer.input_norm)), attention.head_dim)
    query, key, value = heads.split([attention.num_heads, attention.num_kv_heads, attention.num_kv_heads], dim=1)
    x = x + attention.o_proj(_attend(rotate(query, rotary), rotate(key, rotary), value, mask))
    return x + _mlp(layer, x)


def _mlp(layer: Any, x: Float[Tensor, "batch seq width"]) -> Float[Tensor, "batch seq width"]:
    gate, up = layer.mlp.gate_up(_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
    return layer.mlp.down(F.silu(gate) * up)


def _norm(x: Float[Tensor, "batch seq width"], norm: Any) -> Float[Tensor, "batch seq width"]:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps) * norm.weight


def _heads(x: Float[Tensor, "batch seq width"], head_dim: int) -> Float[Tensor, "batch heads seq head_dim"]:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _attend(
    query: Float[Tensor, "batch heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads seq head_dim"],
    value: Float[Tensor, "batch kv_heads seq head_dim"],
    mask: Float[Tensor, "1 1 seq seq"],
) -> Float[Tensor, "batch seq width"]:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


def stock_model(config: TargetConfig) -> nn.Module:
    """Load the target as transformers does, with the stock attention."""
    model = load_causal_lm(config.model, getattr(torch, config.dtype), pick_device(config.device))
    return model.eval().requires_grad_(False)


def _dense(seen: Bool[Tensor, "1 seq seq"]) -> Float[Tensor, "1 1 seq seq"]:
    """Turn a boolean mask into the float mask added to attention scores: 0 where a position is visible."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
