"""EAGLE (arXiv 2401.15077, section 4.1): autoregression on the target's last hidden states, one step of text ahead.

    token     t1        t2        t3        t4 (root)
    feature    0        f1        f2        f3
    input     e1;0     e2;f1     e3;f2     e4;f3       FC(2E -> E), then one decoder layer without input norm
    predicts   f1        f2        f3        f4        lm_head(f4) proposes t5

While drafting, features past the last verified token are the drafter's own. With a dynamic tree this is EAGLE-2 (arXiv
2406.16858), which changes only the tree.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.base import Memory
from moray.drafters.common.batched import BatchedDrafter
from moray.drafters.common.decoder_layers import SelfAttentionLayer
from moray.drafters.common.features import FeatureState, features_before, keep_drafted
from moray.drafters.common.layers import KeysValues, RotaryTable, init_weights
from moray.drafters.common.rows import Rows
from moray.drafters.common.slots import DraftSlots
from moray.drafters.common.unrolled import STEP_DECAY, drafted_before, from_step
from moray.drafters.configs import EagleConfig
from moray.drafters.learner import DraftOutput, DraftView, Feature, Prediction
from moray.targets.head import TargetHead
from moray.trees.shapes import MAX_DEPTH


class Eagle(BatchedDrafter[FeatureState]):
    """Drafts from its own features; `layer` is one decoder layer, `fc` joins embedding and feature."""

    def __init__(self, config: EagleConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: EagleConfig = config
        spec = self.spec
        self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=config.bias)
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
        num_steps, left_out = self.config.ttt_steps, int(not self.config.reads_first_token)
        tokens, whole = batch.tokens[:, left_out:], torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        column, rotary = whole[: tokens.shape[1]], self.rotary.rows(0, tokens.shape[1])
        feature = self._noisy(batch.taps.hidden[-1].to(self.fc.weight.dtype), view.seed)
        before = F.pad(feature[:, :-1], (0, 0, 1 - left_out, 0))
        outputs: list[Tensor] = []
        seen: list[KeysValues] = []
        for step in range(1, num_steps + 1):
            x = self.run_block(self._join, tokens, before)
            mask = "causal" if step == 1 else drafted_before(column, step)
            predicted, own = self.run_block(self.layer.unroll, x, rotary, tuple(seen), mask)
            outputs.append(F.pad(predicted, (0, 0, left_out, 0)) if left_out else predicted)
            seen.append(own)
            before = F.pad(predicted[:, :-1], (0, 0, 1, 0))
        total = sum(STEP_DECAY**step for step in range(num_steps))
        predictions = [
            Prediction(
                output,
                from_step(view.start, whole, step + 1),
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

    def new_state(self, max_model_len: int, max_expanded: int) -> FeatureState:
        slots = DraftSlots(max_model_len, max_expanded, self.fc.weight)
        cache = slots.new_cache(self.config.layer.num_kv_heads, self.spec.head_dim)
        first = self.fc.weight.new_zeros(1, int(self.config.reads_first_token), self.spec.hidden_size)
        return FeatureState(slots, cache, first, [], first)

    def reset(self, state: FeatureState) -> None:
        state.reset()

    def extend(self, state: FeatureState, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        state.extend(tokens, memory["feature"].to(self.fc.weight.dtype), num_kept, partial(self._remember, state.cache))

    def _remember(
        self, cache: Tensor, tokens: Int[Tensor, " some"], before: Float[Tensor, "1 some hidden"], start: int
    ) -> None:
        """With one layer, the keys and values of a token depend on its own input alone."""
        x = self._join(tokens[None], before)
        self.layer.remember(x, self.rotary.rows(start, start + tokens.shape[0]), cache, start)

    def score(
        self,
        states: Sequence[FeatureState],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "sequences new vocab"]:
        rows = Rows([state.slots for state in states], tokens, ancestors, depth)
        x = self._join(rows.tokens[None], features_before(states, rows, ancestors, depth))
        predicted = self.layer.draft(x, rows.rotary(self.rotary), rows.reach([state.cache for state in states]))
        keep_drafted(states, rows, predicted)
        return self.vocabulary.expand(self.vocabulary.logits(predicted[0])).view(*tokens.shape, -1)
