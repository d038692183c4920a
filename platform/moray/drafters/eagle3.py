"""EAGLE-3 (arXiv 2503.01840): one decoder layer over three of the target's hidden states, trained on its own outputs.

    token     t1        t2        t3        t4 (root)
    feature             g1        g2        g3           fc(3E -> E) of the target's states after three of its layers
    input               e2;g1     e3;g2     e4;g3        norms of embedding and feature, side by side: 2E
    hidden              a1        a2        a3           norm and lm_head of a3 propose t5; a3 is the next feature

Training unrolls several such steps on the drafter's own hidden states (training-time test), and no loss compares them
with the target's. The vocabulary projection is the drafter's own.

The first token has no feature before it, so it is no input, and slots and rotations begin with the second one. Other
engines do the same, and a drafter that attended to an additional first token would not work there.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.base import Memory
from moray.drafters.common.attention import KVBuffer, Mask, Reach, without_known
from moray.drafters.common.batched import BatchedDrafter
from moray.drafters.common.decoder_layers import DecoderLayer
from moray.drafters.common.features import FeatureState, features_before, keep_drafted
from moray.drafters.common.layers import KeysValues, RMSNorm, Rotary, RotaryTable, SelfAttention, SwiGLU, init_weights
from moray.drafters.common.rows import Rows
from moray.drafters.common.slots import DraftSlots
from moray.drafters.common.unrolled import STEP_DECAY, drafted_before, from_step
from moray.drafters.config_base import BlockConfig
from moray.drafters.configs import Eagle3Config
from moray.drafters.learner import DraftOutput, DraftView, Prediction
from moray.targets.head import TargetHead
from moray.trees.shapes import MAX_DEPTH


class Eagle3Layer(DecoderLayer[SelfAttention]):
    """A decoder layer whose attention reads embedding and feature side by side, and adds to the feature."""

    def __init__(self, width: int, config: BlockConfig, head_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(width, norm_eps)
        self.feature_norm = RMSNorm(width, norm_eps)
        self.attention = SelfAttention(2 * width, config, head_dim, out_width=width)
        self.mlp_norm = RMSNorm(width, norm_eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def unroll(
        self,
        embedded: Float[Tensor, "batch seq width"],
        feature: Float[Tensor, "batch seq width"],
        rotary: Rotary,
        earlier: Sequence[KeysValues],
        mask: Mask,
    ) -> tuple[Float[Tensor, "batch seq width"], KeysValues]:
        """All positions in one of several draft steps (see `SelfAttention.unroll`)."""
        attended, own = self.attention.unroll(self._join(embedded, feature), rotary, earlier, mask)
        return self._finish(feature, attended), own

    def remember(
        self,
        embedded: Float[Tensor, "1 new width"],
        feature: Float[Tensor, "1 new width"],
        rotary: Rotary,
        cache: KVBuffer,
        start: int,
    ) -> None:
        """Write only the keys and values of new positions."""
        self.attention.remember(self._join(embedded, feature), rotary, cache, start)

    def draft(
        self,
        embedded: Float[Tensor, "1 rows width"],
        feature: Float[Tensor, "1 rows width"],
        rotary: Rotary,
        reaches: Sequence[Reach],
    ) -> Float[Tensor, "1 rest width"]:
        """New positions of several sequences over their caches, without those that are known already."""
        attended = self.attention.draft(self._join(embedded, feature), rotary, reaches)
        return self._finish(without_known(feature, reaches), attended)

    def _join(
        self, embedded: Float[Tensor, "batch seq width"], feature: Float[Tensor, "batch seq width"]
    ) -> Float[Tensor, "batch seq both"]:
        return torch.cat([self.embedding_norm(embedded), self.feature_norm(feature)], dim=-1)


class Eagle3(BatchedDrafter[FeatureState]):
    """Drafts from its own hidden states; `fc` makes one feature of three hidden states of the target."""

    def __init__(self, config: Eagle3Config, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: Eagle3Config = config
        spec = self.spec
        self.fc = nn.Linear(3 * spec.hidden_size, spec.hidden_size, bias=False)
        self._depths = tuple(layers - spec.num_layers - 1 for layers in self.hidden_layers)
        self.layer = Eagle3Layer(spec.hidden_size, config.layer, spec.head_dim, spec.norm_eps)
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.rotary = RotaryTable(spec.head_dim, spec.max_positions + MAX_DEPTH, spec.rope_theta)
        self.projection = nn.Linear(spec.hidden_size, self.vocabulary.size, bias=False)
        init_weights(self, config.norm_init)
        self._start_projection()

    @property
    def hidden_layers(self) -> tuple[int, int, int]:
        """After how many of the target's layers it reads hidden states."""
        return self.config.layers_of(self.spec.num_layers)

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds(hidden_depths=(-1, *self.observed.hidden_depths))

    @property
    def observed(self) -> TapNeeds:
        return TapNeeds(hidden_depths=tuple(sorted(set(self._depths), reverse=True)))

    def choose_vocabulary(self, counts: Int[Tensor, " vocab"]) -> None:
        super().choose_vocabulary(counts)
        self._start_projection()

    def keep_rows(self, kept: Int[Tensor, " kept"]) -> None:
        self.projection.weight = nn.Parameter(self.projection.weight.detach()[kept])
        self.projection.out_features = len(kept)

    @torch.no_grad()
    def _start_projection(self) -> None:
        """Start from the target's rows."""
        self.projection.weight.copy_(self.vocabulary.select(self.head.weight.T).T)

    def step_weights(self) -> list[Tensor]:
        """Features are made of the target's hidden states once per token, beside the target."""
        return [*self.layer.parameters(), *self.norm.parameters(), self.projection.weight]

    def observe(self, taps: Taps) -> Memory:
        return {"feature": self._feature(taps)}

    def _feature(self, taps: Taps) -> Float[Tensor, "batch seq hidden"]:
        states = [taps.hidden[depth].to(self.fc.weight.dtype) for depth in self._depths]
        return self.fc(torch.cat(states, dim=-1))

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        """The first step reads features of the target; each further step the hidden states of the step before it."""
        num_steps, device = self.config.ttt_steps, batch.tokens.device
        tokens, seq = batch.tokens[:, 1:], batch.tokens.shape[1] - 1
        column, rotary = torch.arange(seq, device=device), self.rotary.rows(0, seq)
        embedded = self.head.embed(tokens).to(self.fc.weight.dtype)
        feature = self.run_block(self._feature, batch.taps)[:, :-1]
        whole = torch.arange(seq + 1, device=device)
        predictions: list[Prediction] = []
        seen: list[KeysValues] = []
        total = sum(STEP_DECAY**step for step in range(num_steps))
        for step in range(1, num_steps + 1):
            mask = "causal" if step == 1 else drafted_before(column, step)
            hidden, own = self.run_block(self.layer.unroll, embedded, feature, rotary, tuple(seen), mask)
            seen.append(own)
            predictions.append(
                Prediction(
                    F.pad(self.norm(hidden), (0, 0, 1, 0)),  # nothing is drafted from the first token alone
                    from_step(view.start, whole, step),
                    self._project,
                    STEP_DECAY ** (step - 1) / total,
                    (self.projection.weight,),
                )
            )
            feature = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        return DraftOutput(tuple(predictions))

    def _project(
        self, hidden: Float[Tensor, "rows hidden"], own: Float[Tensor, "draft hidden"]
    ) -> Float[Tensor, "rows draft"]:
        return F.linear(hidden, own.to(hidden.dtype))

    def new_state(self, max_model_len: int, max_expanded: int) -> FeatureState:
        slots = DraftSlots(max_model_len, max_expanded, self.fc.weight)
        cache = slots.new_cache(self.config.layer.num_kv_heads, self.spec.head_dim)
        nothing = self.fc.weight.new_zeros(1, 0, self.spec.hidden_size)
        return FeatureState(slots, cache, nothing, [], nothing)

    def reset(self, state: FeatureState) -> None:
        state.reset()

    def extend(self, state: FeatureState, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        state.extend(tokens, memory["feature"].to(self.fc.weight.dtype), num_kept, partial(self._remember, state.cache))

    def _remember(
        self, cache: Tensor, tokens: Int[Tensor, " some"], before: Float[Tensor, "1 some hidden"], start: int
    ) -> None:
        """With one layer, the keys and values of a token depend on its own input alone."""
        rotary = self.rotary.rows(start, start + tokens.shape[0])
        self.layer.remember(self._embed(tokens), before, rotary, cache, start)

    def _embed(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "1 rows hidden"]:
        return self.head.embed(tokens[None]).to(self.fc.weight.dtype)

    def score(
        self,
        states: Sequence[FeatureState],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "sequences new vocab"]:
        rows = Rows([state.slots for state in states], tokens, ancestors, depth)
        before = features_before(states, rows, ancestors, depth)
        reaches = rows.reach([state.cache for state in states])
        hidden = self.layer.draft(self._embed(rows.tokens), before, rows.rotary(self.rotary), reaches)
        keep_drafted(states, rows, hidden)
        logits = self.projection(self.norm(hidden[0]))
        return self.vocabulary.expand(logits).view(*tokens.shape, -1)
