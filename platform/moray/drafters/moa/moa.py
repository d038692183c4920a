"""Mixture of Attentions (arXiv 2410.03804): layer self-attention, self-attention, cross-attention and
Target Layer Inference.

    observe   kv of L layers --LSA over layers, mean, Linear--> m_t --kv_proj--> cross-attention keys/values
    propose   token embedding --SA, causal--> query --CA over memory of verified tokens--> feature
              feature --last N target layers (N > 0)--> last hidden --lm_head--> next token

With `layer_stride`, layer self-attention reads only every n-th layer. Memory covers verified tokens only, so drafting k
tokens needs nothing new from the target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.base import TAIL, Memory
from moray.drafters.common.batched import BatchedDrafter
from moray.drafters.common.decoder_layers import CrossAttentionLayer, SelfAttentionLayer
from moray.drafters.common.layers import RotaryTable, init_weights
from moray.drafters.common.rows import Rows
from moray.drafters.common.slots import DraftSlots
from moray.drafters.common.t_step import memory_tokens, own_tokens, past_and_drafted
from moray.drafters.configs import MoABase
from moray.drafters.learner import DraftOutput, DraftView, Feature, Prediction
from moray.drafters.moa.pooled import PooledSelfAttentionLayer
from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.targets.kv_cache import KVCache, KVCaches, PastAndPredicted
from moray.trees.shapes import MAX_DEPTH

_LAYER_NUMBERS = 1 << 26
"""Layer self-attention processes at once as many tokens as have this many numbers in their keys and values: 1,024
tokens of Llama-3-8B. Its intermediate results per token are about fifteen times as large."""
_CACHED_NUMBERS = 1 << 19
_MIN_TOKENS = 64
"""For a CPU's caches, chunks are limited to `_CACHED_NUMBERS` (512 tokens of the demo target, 960 numbers each, are
fastest) but have at least `_MIN_TOKENS` tokens, because each chunk multiplies all weights."""


@dataclass
class MoAState:
    """One sequence: keys and values of both attentions and of the last N target layers."""

    slots: DraftSlots
    own: Tensor  # [2, 1, kv_heads, slots, head_dim]
    memory: Tensor
    tail: KVCache | None
    num_target_layers: int
    """N: how many of those layers the next draft runs."""


class MoA(BatchedDrafter[MoAState]):
    """The Mixture-of-Attentions drafter."""

    def __init__(self, config: MoABase, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: MoABase = config
        spec = self.spec
        layer_heads = config.layer_self_attention.num_heads
        if spec.kv_width % (2 * layer_heads):
            raise ConfigError(
                f"drafter.layer_self_attention.num_heads is {layer_heads}; it must divide the target's key/value "
                f"width {spec.kv_width} into even head sizes: "
                + ", ".join(str(n) for n in range(1, spec.kv_width) if spec.kv_width % (2 * n) == 0)
                + " are accepted"
            )
        if config.num_target_layers >= spec.num_layers:
            raise ConfigError(
                f"drafter.target_layers is {config.num_target_layers}; the target has {spec.num_layers} layers, so 0 "
                f"to {spec.num_layers - 1} are accepted"
            )
        if head.num_layers < config.num_target_layers:
            raise ConfigError(f"drafter.target_layers is {config.num_target_layers} but the head has {head.num_layers}")
        if config.layer_stride > spec.num_layers:
            raise ConfigError(
                f"drafter.layer_stride is {config.layer_stride}, but the target has {spec.num_layers} layers: "
                f"1 to {spec.num_layers} are accepted"
            )
        strided = set(range(spec.num_layers - 1, -1, -config.layer_stride))
        last = range(spec.num_layers - config.num_target_layers, spec.num_layers)
        self._kv_layers = tuple(sorted({*strided, *last}))
        """The layers that layer self-attention reads, and all that Target Layer Inference runs."""
        self._mixed: Tensor | None
        mixed = [place for place, layer in enumerate(self._kv_layers) if layer in strided]
        self.register_buffer(
            "_mixed", None if len(mixed) == len(self._kv_layers) else torch.tensor(mixed), persistent=False
        )
        eps = spec.norm_eps
        layer_head_dim = spec.kv_width // layer_heads
        self.lsa = PooledSelfAttentionLayer(spec.kv_width, config.layer_self_attention, layer_head_dim, eps)
        self.to_memory = nn.Linear(spec.kv_width, spec.hidden_size, bias=True)
        self.sa = SelfAttentionLayer(spec.hidden_size, config.self_attention, spec.head_dim, eps)
        self.ca = CrossAttentionLayer(spec.hidden_size, config.cross_attention, spec.head_dim, eps)
        self.layer_rotary = RotaryTable(layer_head_dim, spec.num_layers, config.layer_rope_theta)
        self.rotary = RotaryTable(spec.head_dim, spec.max_positions + MAX_DEPTH, spec.rope_theta)
        # Residual streams can be 20-30 times as large as a norm's output: predict in units of their rms.
        self.feature_scale: Tensor
        self.register_buffer("feature_scale", torch.ones(()))
        init_weights(self, config.norm_init)

    @property
    def needs(self) -> TapNeeds:
        below = tuple(-1 - num_target_layers for num_target_layers in self.config.layer_counts if num_target_layers)
        return TapNeeds(self._kv_layers, (-1, *below))

    @property
    def observed(self) -> TapNeeds:
        return TapNeeds(self._kv_layers)

    def set_scale(self, hidden_rms: Mapping[int, float]) -> None:
        if self.config.num_target_layers:
            self.feature_scale.fill_(hidden_rms[-1 - self.config.num_target_layers])

    def step_weights(self) -> list[Tensor]:
        """Without layer self-attention and the memory's projections, which run once per verified token."""
        own = [*self.sa.parameters(), *self.ca.parameters()]
        memory = self.ca.attention.kv_proj.weight
        last = self.head.last_layer_weights(self._max_layers)
        return [*(p for p in own if p is not memory), *last, self.vocabulary.rows]

    @property
    def _max_layers(self) -> int:
        """How many of the target's last layers have their keys and values in a state: the maximum that drafts may
        run."""
        return max(self.layer_counts)

    def observe(self, taps: Taps) -> Memory:
        assert taps.kv is not None
        memory = {"cross": self._cross_keys_values(taps.kv)}
        if self._max_layers:
            memory[TAIL] = taps.kv[:, :, -self._max_layers :].flatten(2)
        return memory

    def _cross_keys_values(
        self, kv: Float[Tensor, "batch seq layers width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch seq kv_width"]:
        """Layer self-attention (section 3.1) over the layer axis, mean, and projection to the hidden size give the
        memory m_t; returns its keys and values for cross-attention, not yet rotated."""
        kv = kv if self._mixed is None else kv.index_select(2, self._mixed)
        batch, seq, layers, width = kv.shape
        at_once = max(1, _LAYER_NUMBERS // (layers * width))
        if kv.device.type == "cpu":
            at_once = min(at_once, max(_MIN_TOKENS, _CACHED_NUMBERS // (layers * width)))
        tokens = kv.flatten(0, 1)
        if lengths is None:
            memory = _joined([self.run_block(self._memory, part) for part in tokens.split(at_once)])
        else:  # in training, skip padding: layer self-attention is most of the work
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
        num_layers = self.config.num_target_layers
        predicted = self._predict(batch, view)
        if not num_layers:
            return self._output(predicted, view, {-1: Feature(predicted, 1.0, 1.0)})
        feature = predicted * self.feature_scale
        last = self._last_layers_in_one_pass(feature, batch.taps.kv[:, :, -num_layers:], view.start)
        below = Feature(feature, self.feature_scale, 0.5)
        return self._output(last, view, {-1 - num_layers: below, -1: Feature(last, 1.0, 0.5)})

    def _predict(
        self, batch: TrainBatch, view: DraftView, shift: Float[Tensor, "batch 1 hidden"] | None = None
    ) -> Float[Tensor, "batch seq hidden"]:
        """Output of cross-attention at every position; `shift` is added to the input of its queries."""
        assert batch.taps.kv is not None
        seq = batch.tokens.shape[1]
        rotary = self.rotary.rows(0, seq)
        x = self.head.embed(batch.tokens).to(self.to_memory.weight.dtype)
        x = self.run_block(
            self.sa, x, rotary, own_tokens(view.start, view.staircase if self.config.staircase else None)
        )
        x = x if shift is None else x + shift
        key, value = self.ca.attention.split(self._cross_keys_values(batch.taps.kv, batch.lengths), rotary)
        return self.run_block(self.ca, x, rotary, key, value, memory_tokens(view.start))

    def _output(
        self, last: Float[Tensor, "batch seq hidden"], view: DraftView, features: dict[int, Feature]
    ) -> DraftOutput:
        return DraftOutput((Prediction(last, view.start, self.vocabulary.logits),), features)

    def _last_layers_in_one_pass(
        self,
        feature: Float[Tensor, "batch seq hidden"],
        kv: Float[Tensor, "batch seq last width"],
        start: Int[Tensor, "batch seq"],
    ) -> Float[Tensor, "batch seq hidden"]:
        """Target Layer Inference (section 3.3) for all positions: real keys/values up to start(i), predicted ones
        after. `kv` holds those of the last N layers, and its size gives N."""
        batch, seq, _ = feature.shape
        num_layers = kv.shape[2]
        past = PastAndPredicted(kv.to(self.head.weight.dtype), self.spec.num_layers - num_layers, self.spec.head_dim)
        positions = torch.arange(seq, device=feature.device).expand(batch, seq)
        feature, mask = feature.to(self.head.weight.dtype), past_and_drafted(start)
        return self.head.run_last_layers(feature, positions, mask, past, self.run_block, num_layers)

    def new_state(self, max_model_len: int, max_expanded: int) -> MoAState:
        slots = DraftSlots(max_model_len, max_expanded, self.to_memory.weight)
        own = slots.new_cache(self.config.self_attention.num_kv_heads, self.spec.head_dim)
        memory = slots.new_cache(self.config.cross_attention.num_kv_heads, self.spec.head_dim)
        layers = self._max_layers
        tail = self.head.new_cache(slots.num_slots, num_layers=layers) if layers else None
        return MoAState(slots, own, memory, tail, self.layer_counts[0])

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
        if state.tail is not None and TAIL in memory:
            state.tail.length = start
            state.tail.write(memory[TAIL].unflatten(2, (self._max_layers, -1)))

    def recall(self, state: MoAState, start: int, layer: int, kv: Float[Tensor, "1 new width"]) -> None:
        assert state.tail is not None
        state.tail.length = start
        state.tail.write(kv[:, :, None], first_layer=self._max_layers - layer)

    def _remember(self, state: MoAState, tokens: Int[Tensor, " some"], start: int) -> None:
        # SA is one layer over embeddings: a token's keys and values depend on that token alone.
        self.sa.remember(self._embed(tokens), self.rotary.rows(start, start + tokens.shape[0]), state.own, start)

    def _embed(self, tokens: Int[Tensor, " some"]) -> Float[Tensor, "1 some hidden"]:
        return self.head.embed(tokens)[None].to(self.to_memory.weight.dtype)

    def score(
        self,
        states: Sequence[MoAState],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "sequences new vocab"]:
        rows, num_target_layers = (
            Rows([state.slots for state in states], tokens, ancestors, depth),
            states[0].num_target_layers,
        )
        x = self.sa.draft(
            self._embed(rows.tokens), rows.rotary(self.rotary), rows.reach([state.own for state in states])
        )
        memories = [state.memory[..., : state.slots.num_verified, :] for state in states]
        predicted = self.ca.draft(self._query(x, num_target_layers), rows.node_rotary(self.rotary), memories)
        hidden = self._feature(predicted, num_target_layers)
        if num_target_layers:
            tails = [state.tail for state in states if state.tail is not None]
            hidden = self._run_last_layers(hidden, rows, tails, num_target_layers)
        return self.vocabulary.expand(self.vocabulary.logits(hidden[0])).view(*tokens.shape, -1)

    def _run_last_layers(
        self, feature: Float[Tensor, "1 nodes hidden"], rows: Rows, tails: list[KVCache], num_target_layers: int
    ) -> Float[Tensor, "1 nodes hidden"]:
        """Target Layer Inference (section 3.3) for the nodes of several sequences, one row of the batch per
        sequence."""
        for tail, part in zip(tails, rows.parts, strict=True):
            tail.length = part.slot + part.num_known
        positions, masks = rows.node_positions, [part.mask for part in rows.parts]
        batch = feature.to(self.head.weight.dtype).view(*positions.shape, -1)
        cache = tails[0] if len(tails) == 1 else KVCaches(tails)
        mask = masks[0] if isinstance(cache, KVCache) else cache.mask(masks, batch)
        return self.head.run_last_layers(batch, positions, mask, cache, num_layers=num_target_layers).flatten(0, 1)[
            None
        ]

    def _query(self, x: Float[Tensor, "1 rows hidden"], num_target_layers: int) -> Float[Tensor, "1 rows hidden"]:
        """Turn the output of self-attention into the input of cross-attention's queries."""
        return x

    def _feature(
        self, predicted: Float[Tensor, "1 rows hidden"], num_target_layers: int
    ) -> Float[Tensor, "1 rows hidden"]:
        """Turn the output of cross-attention into the hidden state that the target's last layers, or lm_head, read."""
        return predicted * self.feature_scale if num_target_layers else predicted


def _joined(parts: list[Float[Tensor, "_ hidden"]]) -> Float[Tensor, "tokens hidden"]:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
