"""EAGLE (arXiv 2401.15077, section 4.1): autoregression on the target's last hidden states, one step of text ahead.

    token     t1        t2        t3        t4 (root)
    feature    0        f1        f2        f3
    input     e1;0     e2;f1     e3;f2     e4;f3       FC(2E -> E), then one decoder layer without input norm
    predicts   f1        f2        f3        f4        lm_head(f4) proposes t5

While drafting, features past the last verified token are the drafter's own. With a dynamic tree this is EAGLE-2 (arXiv
2406.16858), which changes only the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.base import Memory, parents_of
from moray.drafters.common.batched import BatchedDrafter
from moray.drafters.common.layers import KeysValues, RotaryTable, SelfAttentionLayer, init_weights
from moray.drafters.common.rows import Rows
from moray.drafters.common.slots import DraftSlots
from moray.drafters.common.unrolled import STEP_DECAY, drafted_before, from_step
from moray.drafters.configs import EagleConfig
from moray.drafters.learner import DraftOutput, DraftView, Feature, Prediction
from moray.targets.head import TargetHead
from moray.trees.shapes import MAX_DEPTH


@dataclass
class EagleState:
    """One sequence: keys and values, and the features that the next step reads."""

    slots: DraftSlots
    cache: Tensor  # [2, 1, kv_heads, slots, head_dim]
    before: Tensor  # [1, pending + 1, hidden]: the target's features of the tokens before the pending ones and the root
    drafted: list[Tensor]  # predicted features of the expanded nodes, level by level


class Eagle(BatchedDrafter[EagleState]):
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
        """The first step reads the target's features; each further step reads those that the step before it
        predicted."""
        seq, num_steps = batch.tokens.shape[1], self.config.ttt_steps
        column, rotary = torch.arange(seq, device=batch.tokens.device), self.rotary.rows(0, seq)
        feature = self._noisy(batch.taps.hidden[-1].to(self.fc.weight.dtype), view.seed)
        outputs: list[Tensor] = []
        seen: list[KeysValues] = []
        for step in range(1, num_steps + 1):
            x = self.run_block(self._join, batch.tokens, F.pad(feature[:, :-1], (0, 0, 1, 0)))
            mask = "causal" if step == 1 else drafted_before(column, step)
            feature, own = self.run_block(self.layer.unroll, x, rotary, tuple(seen), mask)
            outputs.append(feature)
            seen.append(own)
        total = sum(STEP_DECAY**step for step in range(num_steps))
        predictions = [
            Prediction(
                output,
                from_step(view.start, column, step + 1),
                self.vocabulary.logits,
                STEP_DECAY**step / total,
            )
            for step, output in enumerate(outputs)
        ]
        return DraftOutput(tuple(predictions), {-1: Feature(outputs[0], 1.0, 1.0)})

    def _noisy(self, feature: Float[Tensor, "batch seq hidden"], seed: int) -> Float[Tensor, "batch seq hidden"]:
        """Add uniform noise in training, to imitate the errors of drafted features (section 4.2)."""
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
        state.before = torch.zeros_like(state.before[:, :1])

    def extend(self, state: EagleState, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        before = torch.cat([state.before, memory["feature"].to(self.fc.weight.dtype)], dim=1)
        first = state.slots.num_verified + 1 - state.before.shape[1]  # position of the token that before[0] is for
        # Among the drafted nodes, only the root read a feature of the target; the others read the drafter's own.
        state.slots.extend(tokens, min(num_kept, 1), partial(self._remember, state.cache, before, first))
        state.before = before[:, state.slots.length - first :]

    def _remember(
        self,
        cache: Tensor,
        before: Float[Tensor, "1 positions hidden"],
        first: int,
        tokens: Int[Tensor, " some"],
        start: int,
    ) -> None:
        """With one layer, the keys and values of a token depend on its own input alone."""
        end = start + tokens.shape[0]
        x = self._join(tokens[None], before[:, start - first : end - first])
        self.layer.remember(x, self.rotary.rows(start, end), cache, start)

    def score(
        self,
        states: Sequence[EagleState],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "sequences new vocab"]:
        rows = Rows([state.slots for state in states], tokens, ancestors, depth)
        if depth == 0:
            for state in states:
                state.drafted = []
            before = [state.before[:, -1 - part.num_known :] for state, part in zip(states, rows.parts, strict=True)]
        elif ancestors is None:
            before = [state.drafted[-1] for state in states]
        else:
            parents = [parents_of(own) for own in ancestors] * (len(states) // ancestors.shape[0])
            before = [torch.cat(s.drafted, dim=1)[:, above] for s, above in zip(states, parents, strict=True)]
        x = self._join(rows.tokens[None], before[0] if len(before) == 1 else torch.cat(before, dim=1))
        predicted = self.layer.draft(x, rows.rotary(self.rotary), rows.reach([state.cache for state in states]))
        for state, own in zip(states, rows.split(predicted), strict=True):
            state.drafted.append(own)
        return self.vocabulary.expand(self.vocabulary.logits(predicted[0])).view(*tokens.shape, -1)
