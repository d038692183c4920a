"""Mixture of Attentions (arXiv 2410.03804): layer self-attention, self-attention, cross-attention and
Target Layer Inference.

    observe   kv of L layers --LSA over layers, mean, Linear--> m_t --kv_proj--> cross-attention keys/values
    propose   token embedding --SA, causal--> query --CA over memory of verified tokens--> feature
              feature --last N target layers (N > 0)--> last hidden --lm_head--> next token

Memory covers verified tokens only, so drafting k tokens needs nothing new from the target.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.base import Drafter, DraftOutput, DraftView, Memory, Prediction
from moray.drafters.configs import MoAConfig
from moray.drafters.layers import CrossAttentionLayer, RotaryTable, SelfAttentionLayer, init_weights
from moray.drafters.pooled import PooledSelfAttentionLayer
from moray.drafters.slots import DraftSlots
from moray.drafters.t_step import memory_tokens, own_tokens, past_and_drafted
from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.targets.kv_cache import KVCache, PastAndPredicted
from moray.trees.shapes import MAX_DEPTH

_LAYER_ROTARY_THETA = 10_000.0
_LAYER_NUMBERS = 1 << 26
"""Layer self-attention takes as many tokens at once as have this many numbers in their keys and values: 1,024 of
Llama-3-8B. What it computes of a token is some fifteen times as large."""
_CACHED_NUMBERS = 1 << 19
_LEAST_TOKENS = 64
"""The same on a CPU, for its caches: pieces of 512 tokens of the demo's target (960 numbers) are the fastest; of much
wider ones so many, for each piece multiplies all weights."""


@dataclass
class MoAState:
    """One sequence: keys and values of both attentions and of the last N target layers."""

    slots: DraftSlots
    own: Tensor  # [2, 1, kv_heads, slots, head_dim]
    memory: Tensor
    tail: KVCache | None


class MoA(Drafter[MoAState]):
    """The Mixture-of-Attentions drafter."""

    def __init__(self, config: MoAConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: MoAConfig = config
        spec = self.spec
        layer_heads = config.layer_self_attention.num_heads
        if spec.kv_width % (2 * layer_heads):
            raise ConfigError(
                f"drafter.layer_self_attention.num_heads is {layer_heads}; it must divide the target's key/value "
                f"width {spec.kv_width} into even head sizes: "
                + ", ".join(str(n) for n in range(1, spec.kv_width) if spec.kv_width % (2 * n) == 0)
                + " are accepted"
            )
        if head.num_layers < config.target_layers:
            raise ConfigError(f"drafter.target_layers is {config.target_layers} but the head has {head.num_layers}")
        eps = spec.norm_eps
        layer_head_dim = spec.kv_width // layer_heads
        self.lsa = PooledSelfAttentionLayer(spec.kv_width, config.layer_self_attention, layer_head_dim, eps)
        self.to_memory = nn.Linear(spec.kv_width, spec.hidden_size, bias=True)
        self.sa = SelfAttentionLayer(spec.hidden_size, config.self_attention, spec.head_dim, eps)
        self.ca = CrossAttentionLayer(spec.hidden_size, config.cross_attention, spec.head_dim, eps)
        self.layer_rotary = RotaryTable(layer_head_dim, spec.num_layers, _LAYER_ROTARY_THETA)
        self.rotary = RotaryTable(spec.head_dim, spec.max_positions + MAX_DEPTH, spec.rope_theta)
        # Residual streams can be 20-30 times a norm's output: predict in units of their rms.
        self.feature_scale: Tensor
        self.register_buffer("feature_scale", torch.ones(()))
        init_weights(self, config.norm_init)

    @property
    def needs(self) -> TapNeeds:
        depths = (-1,) if self.config.target_layers == 0 else (-1, -1 - self.config.target_layers)
        return TapNeeds(tuple(range(self.spec.num_layers)), depths)

    @property
    def observed(self) -> TapNeeds:
        return TapNeeds(tuple(range(self.spec.num_layers)))

    def set_scale(self, hidden_rms: Mapping[int, float]) -> None:
        if self.config.target_layers:
            self.feature_scale.fill_(hidden_rms[-1 - self.config.target_layers])

    def step_weights(self) -> list[Tensor]:
        """Neither layer self-attention nor the memory's projections: those run once per verified token."""
        own = [*self.sa.parameters(), *self.ca.parameters()]
        memory = self.ca.attention.kv_proj.weight
        return [*(p for p in own if p is not memory), *self.head.last_layer_weights(), self.vocabulary.rows]

    def observe(self, taps: Taps) -> Memory:
        assert taps.kv is not None
        memory = {"cross": self._cross_keys_values(taps.kv)}
        if self.config.target_layers:
            memory["tail"] = taps.kv[:, :, -self.config.target_layers :].flatten(2)
        return memory

    def _cross_keys_values(
        self, kv: Float[Tensor, "batch seq layers width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch seq kv_width"]:
        """Layer self-attention (section 3.1) over the layer axis, mean, projection to the hidden size: the
        memory m_t; then cross-attention's keys and values of it, not yet rotated."""
        batch, seq, layers, width = kv.shape
        at_once = max(1, _LAYER_NUMBERS // (layers * width))
        if kv.device.type == "cpu":
            at_once = min(at_once, max(_LEAST_TOKENS, _CACHED_NUMBERS // (layers * width)))
        tokens = kv.flatten(0, 1)
        if lengths is None:
            memory = _joined([self.run_block(self._memory, part) for part in tokens.split(at_once)])
        else:  # in training: layer self-attention is most of the work, and nobody sees the memory of padding
            real = (torch.arange(seq, device=kv.device) < lengths[:, None]).flatten().nonzero()[:, 0]
            found = _joined([self.run_block(self._memory, tokens, rows) for rows in real.split(at_once)])
            memory = found.new_zeros(batch * seq, found.shape[1]).index_copy(0, real, found)
        return self.ca.memorise(memory.view(batch, seq, -1))

    def _memory(
        self, kv: Float[Tensor, "tokens layers width"], rows: Int[Tensor, " some"] | None = None
    ) -> Float[Tensor, "some hidden"]:
        picked = kv if rows is None else kv[rows]
        mixed = self.lsa(picked.to(self.to_memory.weight.dtype), self.layer_rotary.rows(0, kv.shape[1]))
        return self.to_memory(mixed)

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        assert batch.taps.kv is not None
        seq = batch.tokens.shape[1]
        rotary = self.rotary.rows(0, seq)
        x = self.head.embed(batch.tokens).to(self.to_memory.weight.dtype)
        x = self.run_block(
            self.sa, x, rotary, own_tokens(view.start, view.staircase if self.config.staircase else None)
        )
        key, value = self.ca.attention.split(self._cross_keys_values(batch.taps.kv, batch.lengths), rotary)
        predicted = self.run_block(self.ca, x, rotary, key, value, memory_tokens(view.start))
        if not self.config.target_layers:
            return self._output(predicted, view, {-1: (predicted, 1.0)})
        feature = predicted * self.feature_scale
        last = self._last_layers_in_one_pass(feature, batch.taps.kv, view.start)
        deep = -1 - self.config.target_layers
        return self._output(last, view, {deep: (feature, float(self.feature_scale)), -1: (last, 1.0)})

    def _output(
        self,
        last: Float[Tensor, "batch seq hidden"],
        view: DraftView,
        features: dict[int, tuple[Float[Tensor, "batch seq hidden"], float]],
    ) -> DraftOutput:
        return DraftOutput((Prediction(last, view.start, self.vocabulary.logits),), features)

    def _last_layers_in_one_pass(
        self,
        feature: Float[Tensor, "batch seq hidden"],
        kv: Float[Tensor, "batch seq layers width"],
        start: Int[Tensor, "batch seq"],
    ) -> Float[Tensor, "batch seq hidden"]:
        """Target Layer Inference for all positions: real keys/values up to start(i), predicted ones after."""
        batch, seq, _ = feature.shape
        first = self.spec.num_layers - self.config.target_layers
        past = PastAndPredicted(kv[:, :, first:].to(self.head.weight.dtype), first, self.spec.head_dim)
        positions = torch.arange(seq, device=feature.device).expand(batch, seq)
        feature, mask = feature.to(self.head.weight.dtype), past_and_drafted(start)
        return self.head.run_last_layers(feature, positions, mask, past, self.run_block)

    def new_state(self, capacity: int, max_expanded: int) -> MoAState:
        slots = DraftSlots(capacity, max_expanded, self.to_memory.weight)
        own = slots.new_cache(self.config.self_attention.num_kv_heads, self.spec.head_dim)
        memory = slots.new_cache(self.config.cross_attention.num_kv_heads, self.spec.head_dim)
        tail = self.head.new_cache(slots.num_slots) if self.config.target_layers else None
        return MoAState(slots, own, memory, tail)

    def reset(self, state: MoAState) -> None:
        state.slots.reset()
        if state.tail is not None:
            state.tail.reset()

    def extend(self, state: MoAState, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        start = state.slots.num_verified
        state.slots.extend(tokens, num_kept, partial(self._remember, state))
        end = state.slots.num_verified
        cross = memory["cross"].to(state.memory.dtype)
        key, value = self.ca.attention.split(cross, self.rotary.rows(start, end))
        state.memory[0, :, :, start:end] = key
        state.memory[1, :, :, start:end] = value
        if state.tail is not None:
            state.tail.length = start
            state.tail.write(memory["tail"].unflatten(2, (self.config.target_layers, -1)))

    def _remember(self, state: MoAState, tokens: Int[Tensor, " some"], start: int) -> None:
        # SA is one layer over embeddings: a token's keys and values depend on nothing but itself.
        self.sa.remember(self._embed(tokens), self.rotary.rows(start, start + tokens.shape[0]), state.own, start)

    def _embed(self, tokens: Int[Tensor, " some"]) -> Float[Tensor, "1 some hidden"]:
        return self.head.embed(tokens)[None].to(self.to_memory.weight.dtype)

    def step(
        self, state: MoAState, tokens: Int[Tensor, " new"], ancestors: Bool[Tensor, "new expanded"] | None, depth: int
    ) -> Float[Tensor, "new vocab"]:
        rows = state.slots.expand(tokens, ancestors, depth)
        rotary = self.rotary.rows(*rows.positions)
        x = self.sa.draft(self._embed(rows.tokens), rotary, state.own, rows.slot, rows.mask, rows.num_known)
        key, value = state.memory[..., : state.slots.num_verified, :]
        hidden = self.ca(x, rotary[rows.num_known :], key, value, None)
        if state.tail is not None:
            state.tail.length = rows.slot + rows.num_known
            positions = torch.full((1, tokens.shape[0]), rows.position, device=tokens.device)
            feature = (hidden * self.feature_scale).to(self.head.weight.dtype)
            hidden = self.head.run_last_layers(feature, positions, rows.mask, state.tail)
        return self.vocabulary.expand(self.vocabulary.logits(hidden[0]))


def _joined(parts: list[Float[Tensor, "_ hidden"]]) -> Float[Tensor, "tokens hidden"]:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
