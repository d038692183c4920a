"""EAGLE (arXiv 2401.15077, section 4.1): autoregression on the target's last hidden states, one step of text ahead.

    token     t1        t2        t3        t4 (root)
    feature    0        f1        f2        f3
    input     e1;0     e2;f1     e3;f2     e4;f3       FC(2E -> E), then one decoder layer without input norm
    predicts   f1        f2        f3        f4        lm_head(f4) proposes t5

While drafting, features past the last verified token are the drafter's own. Grown as a dynamic tree it is
EAGLE-2 (arXiv 2406.16858), which changes the tree alone.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.base import Drafter, DraftOutput, DraftView, Memory, Prediction, parents_of
from moray.drafters.configs import EagleConfig
from moray.drafters.layers import RotaryTable, SelfAttentionLayer, causal_mask, init_weights
from moray.drafters.slots import DraftSlots
from moray.targets.head import TargetHead
from moray.trees.shapes import MAX_DEPTH


@dataclass
class EagleState:
    """One sequence: keys and values, and the features that the next step reads."""

    slots: DraftSlots
    cache: Tensor  # [2, 1, kv_heads, slots, head_dim]
    last: Tensor  # [1, 1, hidden]: the target's feature of the last verified token; zero before the first
    drafted: list[Tensor]  # predicted features of the expanded nodes, level by level


class Eagle(Drafter[EagleState]):
    """Drafts from its own features; `layer` is one decoder layer, `fc` joins embedding and feature."""

    def __init__(self, config: EagleConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: EagleConfig = config
        spec = self.spec
        self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=True)
        self.layer = SelfAttentionLayer(
            spec.hidden_size, config.layer, spec.head_dim, spec.norm_eps, has_input_norm=False
        )
        self.rotary = RotaryTable(spec.head_dim, spec.max_positions + MAX_DEPTH, spec.rope_theta)
        init_weights(self, config.norm_init)

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds(hidden_depths=(-1,))

    def observe(self, taps: Taps) -> Memory:
        return {"feature": taps.hidden[-1]}

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        real = batch.taps.hidden[-1].to(self.fc.weight.dtype)
        before = F.pad(self._noisy(real, view.seed)[:, :-1], (0, 0, 1, 0))
        seq = batch.tokens.shape[1]
        x = self._join(batch.tokens, before)
        predicted = self.layer(x, self.rotary.rows(0, seq), causal_mask(seq, x.device))
        prediction = Prediction(predicted, view.start, self.vocabulary.logits)
        return DraftOutput((prediction,), {-1: (predicted, 1.0)})

    def _noisy(self, feature: Float[Tensor, "batch seq hidden"], seed: int) -> Float[Tensor, "batch seq hidden"]:
        """Uniform noise in training, for the errors that drafted features will have (section 4.2)."""
        if not self.training or not self.config.feature_noise:
            return feature
        generator = torch.Generator(feature.device).manual_seed(seed)
        uniform = torch.rand(feature.shape, generator=generator, device=feature.device, dtype=feature.dtype)
        return feature + (uniform - 0.5) * self.config.feature_noise

    def _join(
        self, tokens: Int[Tensor, "batch seq"], before: Float[Tensor, "batch seq hidden"]
    ) -> Float[Tensor, "batch seq hidden"]:
        embedded = self.head.embed(tokens).to(self.fc.weight.dtype)
        return self.fc(torch.cat([embedded, before], dim=-1))

    def new_state(self, capacity: int, max_expanded: int) -> EagleState:
        slots = DraftSlots(capacity, max_expanded, self.fc.weight)
        cache = slots.new_cache(self.config.layer.num_kv_heads, self.spec.head_dim)
        return EagleState(slots, cache, self.fc.weight.new_zeros(1, 1, self.spec.hidden_size), [])

    def reset(self, state: EagleState) -> None:
        state.slots.reset()
        state.last = torch.zeros_like(state.last)

    def extend(self, state: EagleState, tokens: Int[Tensor, " new"], memory: Memory) -> None:
        start = state.slots.commit(tokens.shape[0])
        feature = memory["feature"].to(self.fc.weight.dtype)
        # One layer: keys and values of a token depend on its own input alone.
        x = self._join(tokens[None], torch.cat([state.last, feature[:, :-1]], dim=1))
        self.layer.remember(x, self.rotary.rows(start, state.slots.length), state.cache, start)
        state.last = feature[:, -1:].clone()

    def step(
        self, state: EagleState, tokens: Int[Tensor, " new"], ancestors: Bool[Tensor, "new expanded"] | None, depth: int
    ) -> Float[Tensor, "new vocab"]:
        if depth == 0:
            state.drafted = []
            before = state.last.expand(-1, tokens.shape[0], -1)
        elif ancestors is None:
            before = state.drafted[-1]
        else:
            before = torch.cat(state.drafted, dim=1)[:, parents_of(ancestors)]
        start, mask = state.slots.expand(tokens.shape[0], ancestors, depth)
        position = state.slots.length + depth
        rotary = self.rotary.rows(position, position + 1)
        predicted = self.layer.draft(self._join(tokens[None], before), rotary, state.cache, start, mask)
        state.drafted.append(predicted)
        return self.vocabulary.expand(self.vocabulary.logits(predicted[0]))
