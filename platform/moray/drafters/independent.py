"""An independent drafter: a small causal LM on the target's vocabulary, distilled from the target's answers.

It reads nothing of the target but the text, so no memory is sent from target to drafter. Latency decides (arXiv
2402.01528): few wide layers draft faster than many narrow ones of the same quality.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.base import Memory
from moray.drafters.common.attention import Reach
from moray.drafters.common.batched import BatchedDrafter
from moray.drafters.common.decoder_layers import SelfAttentionLayer
from moray.drafters.common.hugging_face import layer_state
from moray.drafters.common.layers import RMSNorm, RotaryTable, init_weights
from moray.drafters.common.rows import Rows
from moray.drafters.common.slots import DraftSlots
from moray.drafters.configs import IndependentConfig
from moray.drafters.learner import DraftOutput, DraftView, Prediction
from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.trees.shapes import MAX_DEPTH


@dataclass
class IndependentState:
    """One sequence: keys and values of every layer."""

    slots: DraftSlots
    caches: list[Tensor]  # per layer [2, 1, kv_heads, slots, head_dim]


class Independent(BatchedDrafter[IndependentState]):
    """Drafts as a separate language model."""

    def __init__(self, config: IndependentConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: IndependentConfig = config
        spec, width = self.spec, config.hidden_size
        if config.embeddings != "random" and width != spec.hidden_size:
            raise ConfigError(
                f"drafter.hidden_size is {width} and the target's {spec.hidden_size}; embeddings '{config.embeddings}' "
                "are the target's: give its hidden size, or drafter.embeddings=random"
            )
        self._blocks = [
            SelfAttentionLayer(width, config.layer, config.head_dim, spec.norm_eps) for _ in range(config.num_layers)
        ]
        self.layers = nn.ModuleList(self._blocks)
        self.norm = RMSNorm(width, spec.norm_eps)
        self.rotary = RotaryTable(config.head_dim, spec.max_positions + MAX_DEPTH, spec.rope_theta)
        init_weights(self, config.norm_init)
        self.embedding = self.projection = None
        if config.embeddings != "frozen":
            self.embedding = nn.Embedding(spec.vocab_size, width)
            self.projection = nn.Linear(width, self.vocabulary.size, bias=False)
            nn.init.normal_(self.embedding.weight, std=0.02)
            nn.init.normal_(self.projection.weight, std=0.02)
            self._start_from_target()

    @torch.no_grad()
    def load_target_layers(self, layers: Sequence[Callable[[str], Tensor]], final_norm: Tensor) -> None:
        for own, read in zip(self.blocks, layers, strict=True):
            own.load_state_dict(layer_state(read, self.config.head_dim))
        self.norm.weight.copy_(final_norm)

    @property
    def blocks(self) -> Sequence[SelfAttentionLayer]:
        """Its decoder layers, the first one first."""
        return self._blocks

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds(hidden_depths=(-1,))

    @property
    def observed(self) -> TapNeeds:
        return TapNeeds()

    def choose_vocabulary(self, counts: Int[Tensor, " vocab"]) -> None:
        super().choose_vocabulary(counts)
        self._start_from_target()

    def keep_rows(self, kept: Int[Tensor, " kept"]) -> None:
        if self.projection is not None:
            self.projection.weight = nn.Parameter(self.projection.weight.detach()[kept])
            self.projection.out_features = len(kept)

    @torch.no_grad()
    def _start_from_target(self) -> None:
        if self.config.embeddings == "copied" and self.embedding is not None and self.projection is not None:
            device = self.embedding.weight.device
            every_token = torch.arange(self.spec.vocab_size, device=self.head.weight.device)
            self.embedding.weight.copy_(self.head.embed(every_token).to(device))
            self.projection.weight.copy_(self.vocabulary.select(self.head.weight.T).T.to(device))

    def step_weights(self) -> list[Tensor]:
        """A step reads one row of the embeddings, which is not counted."""
        layers = [*self.layers.parameters(), *self.norm.parameters()]
        return [*layers, self.vocabulary.rows if self.projection is None else self.projection.weight]

    @property
    def reads_text_alone(self) -> bool:
        return True

    def observe(self, taps: Taps) -> Memory:
        return {}

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        x = self._embed(batch.tokens)
        seq = batch.tokens.shape[1]
        rotary = self.rotary.rows(0, seq)
        for layer in self._blocks:
            x = self.run_block(layer, x, rotary, "causal")
        trained = () if self.projection is None else (self.projection.weight,)
        return DraftOutput((Prediction(self.norm(x), view.start, self._project, trained=trained),))

    def _embed(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq width"]:
        if self.embedding is None:
            return self.head.embed(tokens).to(self.norm.weight.dtype)
        return self.embedding(tokens)

    def _logits(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows draft"]:
        return self._project(hidden) if self.projection is None else self._project(hidden, self.projection.weight)

    def _project(
        self, hidden: Float[Tensor, "rows width"], own: Float[Tensor, "draft width"] | None = None
    ) -> Float[Tensor, "rows draft"]:
        return self.vocabulary.logits(hidden) if own is None else F.linear(hidden, own.to(hidden.dtype))

    def new_state(self, max_model_len: int, max_expanded: int) -> IndependentState:
        slots = DraftSlots(max_model_len, max_expanded, self.norm.weight, is_layered=self.config.num_layers > 1)
        caches = [slots.new_cache(self.config.layer.num_kv_heads, self.config.head_dim) for _ in self._blocks]
        return IndependentState(slots, caches)

    def reset(self, state: IndependentState) -> None:
        state.slots.reset()

    def extend(self, state: IndependentState, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        state.slots.extend(tokens, num_kept, partial(self._remember, state))

    def _remember(self, state: IndependentState, tokens: Int[Tensor, " some"], start: int) -> None:
        # Only keys and values of the last layer are needed, not its output, so its attention is skipped.
        *lower, (last, last_cache) = zip(self._blocks, state.caches, strict=True)
        rotary = self.rotary.rows(start, start + tokens.shape[0])
        mask = state.slots.causal(tokens.shape[0]) if lower else None
        x = self._embed(tokens[None])
        for layer, cache in lower:
            x = layer.draft(x, rotary, [Reach(cache, start, tokens.shape[0], mask=mask)])
        last.remember(x, rotary, last_cache, start)

    def score(
        self,
        states: Sequence[IndependentState],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "sequences new vocab"]:
        rows = Rows([state.slots for state in states], tokens, ancestors, depth)
        rotary = rows.rotary(self.rotary)
        *lower, (last, last_caches) = zip(self._blocks, zip(*(s.caches for s in states), strict=True), strict=True)
        x = self._embed(rows.tokens[None])
        for layer, caches in lower:
            x = layer.draft(x, rotary, rows.reach_of_all(caches))
        x = last.draft(x, rotary, rows.reach(last_caches))
        return self.vocabulary.expand(self._logits(self.norm(x)[0])).view(*tokens.shape, -1)
