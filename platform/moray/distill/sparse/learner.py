"""Trains routers and low-rank changes of a frozen target, on whole sequences (D-LLM, NeurIPS 2024).

    decision    w = 1 if the router runs the layer for a token; drawn with Gumbel noise, which may fall to 0 during
                training (`noise_decay_share`); straight-through gradient
    layer       x' = w Block(x) + (1 - w) x, with attention that hides skipped tokens (`evicted_attention`)
    losses      KL to the dense target's cached hidden states (`losses.kl`), optionally cross-entropy of the responses,
                and that of the share, with lambda = share_weight * sin(pi / 2 * progress):
                share_per=token   lambda * mean over tokens of |share of the token - share|
                share_per=batch   lambda * |mean share of the batch's tokens - share|

Training computes every layer for every token, so it costs as much as training the dense target.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moray.batch import TapNeeds, TrainBatch
from moray.distill.masks import loss_positions
from moray.distill.sparse.configs import SparseConfig
from moray.distill.sparse.evicted_attention import attend_evicted
from moray.drafters.learner import DraftOutput, DraftView, Learner, Prediction
from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.targets.rotary import Rotation
from moray.targets.sparse.routing import RUNS, Router, build_routers

_TEMPERATURE = 1.0


class LowRank(nn.Module):
    """A change of a linear layer's output: dropout(B A x). At first it is zero."""

    def __init__(self, in_features: int, out_features: int, rank: int, dropout: float) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, in_features) / rank)
        self.up = nn.Parameter(torch.zeros(out_features, rank))
        self._dropout = dropout

    def forward(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any out"]:
        x = x.to(self.down.dtype)  # outside autocast, the target may be narrower
        return F.dropout(F.linear(F.linear(x, self.down), self.up), self._dropout, self.training)

    @property
    def change(self) -> Float[Tensor, "out width"]:
        """What is added to the layer's weight."""
        return self.up @ self.down


class SparseLearner(Learner):
    """The target with routers. `head` holds all of its layers."""

    def __init__(self, config: SparseConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: SparseConfig = config
        spec = self.spec
        if spec.sliding_window is not None:
            raise ConfigError("a target with sliding windows cannot be made sparse: give a target without them")
        routed = config.routing.routed_layers(spec.num_layers)
        if config.has_routers and config.share * spec.num_layers <= spec.num_layers - len(routed):
            free = spec.num_layers - len(routed)
            raise ConfigError(
                f"sparse.share is {config.share:g}, but {free} of {spec.num_layers} layers have no router: give "
                "a larger share, or a smaller sparse.first_layer or sparse.last_layers"
            )
        absent = [layer for layer in config.dropped_layers if not 0 <= layer < spec.num_layers]
        if absent:
            raise ConfigError(
                f"sparse.dropped_layers has {absent[0]}; the target's layers are 0 to {spec.num_layers - 1}"
            )
        self.routers = build_routers(spec, config.routing) if config.has_routers else nn.ModuleDict()
        self.changes = nn.ModuleList()
        for index, layer in enumerate(head.layers):
            attention: Any = layer.self_attn
            is_trained = bool(config.lora_rank) and index not in config.dropped_layers
            linears = (attention.q_proj, attention.k_proj, attention.v_proj) if is_trained else ()
            self.changes.append(
                nn.ModuleList(
                    LowRank(one.in_features, one.out_features, config.lora_rank, config.lora_dropout) for one in linears
                )
            )

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds(hidden_depths=(-1,))

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        device = batch.tokens.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(view.seed)  # for dropout: a resumed run repeats an unbroken one
            return self._forward(batch, view)

    def _forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        batch_size, seq = batch.tokens.shape
        device = batch.tokens.device
        generator = torch.Generator(device).manual_seed(view.seed)
        positions = torch.arange(seq, device=device).expand(batch_size, seq)
        x = self.head.embed(batch.tokens)
        rotary = self.head.rotation(x, positions)
        always = positions < self.config.initial_tokens
        decay = self.config.noise_decay_share
        noise_scale = 1.0 if decay is None else max(0.0, 1 - view.progress / decay)
        total = x.new_zeros(batch_size, seq, dtype=torch.float32)
        for index in range(self.spec.num_layers):
            if index in self.config.dropped_layers:
                continue
            runs = self._route(index, x, always, generator, noise_scale)
            total = total + runs
            x = self.run_block(self._layer, index, x, rotary, runs)
        last = self.head.norm(x)
        penalty = self._share_loss(total / self.spec.num_layers, batch, always, view)
        if self.config.ce_weight:
            penalty = penalty + self.config.ce_weight * self._cross_entropy(last, batch)
        return DraftOutput((Prediction(last, view.start, self.vocabulary.logits),), penalty=penalty)

    def _route(
        self,
        index: int,
        x: Float[Tensor, "batch seq hidden"],
        always: Bool[Tensor, "batch seq"],
        generator: torch.Generator,
        noise_scale: float,
    ) -> Float[Tensor, "batch seq"]:
        """1.0 where the layer runs. In training the decision is drawn, and its gradient is that of the probability.

        Args:
            index: the layer's index, from 0.
            x: the layer's input.
            always: True for tokens that run through every layer.
            generator: source of the Gumbel noise.
            noise_scale: factor of the noise, from 0 (none) to 1 (all).
        """
        if str(index) not in self.routers:
            return torch.ones(x.shape[:2], device=x.device)
        router = self.routers[str(index)]
        assert isinstance(router, Router)
        with torch.autocast(x.device.type, enabled=False):
            logits = router(x)
            if self.training and noise_scale:
                logits = logits - noise_scale * torch.empty_like(logits).exponential_(generator=generator).log()
            soft = (logits / _TEMPERATURE).softmax(dim=-1)[..., RUNS]
        hard = (soft > 0.5).float()
        return torch.where(always, 1.0, hard + soft - soft.detach())

    def _layer(
        self, index: int, x: Float[Tensor, "batch seq hidden"], rotary: Rotation, runs: Float[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq hidden"]:
        layer: Any = self.head.layers[index]
        attention, changes = layer.self_attn, list(self.changes[index])  # pyright: ignore[reportArgumentType]
        normed = layer.input_layernorm(x)
        heads = []
        for place, linear in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
            out = linear(normed)
            if changes:
                out = out + changes[place](normed).to(out.dtype)
            heads.append(out.unflatten(2, (-1, attention.head_dim)))
        query, key, value = heads
        if hasattr(attention, "q_norm"):  # qwen3
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        query, key = rotary.turn(query), rotary.turn(key)
        attended = attend_evicted(query, key, value, runs, attention.scaling)
        out = x + attention.o_proj(attended.transpose(1, 2).flatten(2)).to(x.dtype)
        out = out + layer.mlp(layer.post_attention_layernorm(out)).to(x.dtype)
        gate = runs[..., None].to(x.dtype)
        return gate * out + (1 - gate) * x

    def _share_loss(
        self, shares: Float[Tensor, "batch seq"], batch: TrainBatch, always: Tensor, view: DraftView
    ) -> Tensor:
        """The weighted difference from `share`, per token or of the batch's mean. It is multiplied by the number of
        loss positions, because the other losses are sums over them."""
        if not self.config.has_routers:
            return shares.new_zeros(())
        position = torch.arange(shares.shape[1], device=shares.device)
        counted = (position < batch.lengths[:, None]) & ~always
        excess = (shares - self.config.share) * counted
        total = excess.sum().abs() if self.config.share_per == "batch" else excess.abs().sum()
        difference = total / counted.sum().clamp(min=1)
        weight = self.config.share_weight * math.sin(math.pi / 2 * view.progress)
        return weight * difference * loss_positions(batch).sum()

    def _cross_entropy(self, last: Float[Tensor, "batch seq hidden"], batch: TrainBatch) -> Tensor:
        """Sum over the positions before response tokens."""
        rows, columns = loss_positions(batch).nonzero(as_tuple=True)
        logits = self.vocabulary.logits(last[rows, columns]).float()
        return F.cross_entropy(logits, batch.tokens[rows, columns + 1], reduction="sum")
