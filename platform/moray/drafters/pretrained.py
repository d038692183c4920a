"""Any Hugging Face causal LM with the target's tokenizer as a drafter: nothing is trained or saved.

The model is unmodified and gets our masks and positions. Past its own context it proposes nothing.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.drafters.base import Drafter, Memory
from moray.drafters.common.slots import DraftSlots
from moray.drafters.configs import PretrainedConfig
from moray.models.families import FAMILIES
from moray.targets.head import TargetHead
from moray.targets.kv_cache import KVCache
from moray.targets.model import Target
from moray.targets.other_families import OtherCausalLM
from moray.targets.spec import TargetConfig, model_type_of


@dataclass
class PretrainedState:
    """One sequence: the model's own cache."""

    slots: DraftSlots
    cache: Any  # of the type that the model uses
    is_full: bool = False


class Pretrained(Drafter[PretrainedState]):
    """Drafts with a language model that was trained elsewhere."""

    def __init__(self, config: PretrainedConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: PretrainedConfig = config
        self._model = _load(config.model, head.weight)

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds()

    def may_end_early(self, num_tokens: int) -> bool:
        return num_tokens > self._model.max_positions

    @property
    def reads_text_alone(self) -> bool:
        return True

    def observe(self, taps: Taps) -> Memory:
        return {}

    def new_state(self, max_model_len: int, max_expanded: int) -> PretrainedState:
        slots = DraftSlots(max_model_len, max_expanded, self._model.weight, is_layered=True)
        return PretrainedState(slots, self._model.new_cache(slots.num_slots))

    def reset(self, state: PretrainedState) -> None:
        state.slots.reset()
        state.is_full = False

    def extend(self, state: PretrainedState, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        if state.slots.num_verified + tokens.shape[0] > self._model.max_positions:
            state.is_full = True
        if not state.is_full:
            state.slots.extend(tokens, num_kept, partial(self._remember, state))

    def _remember(self, state: PretrainedState, tokens: Int[Tensor, " some"], start: int) -> None:
        positions = torch.arange(start, start + tokens.shape[0], device=tokens.device)
        self._run(state, tokens, start, positions, state.slots.causal(tokens.shape[0]), tokens.shape[0])

    def step(
        self,
        state: PretrainedState,
        tokens: Int[Tensor, " new"],
        ancestors: Bool[Tensor, "new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "new vocab"] | None:
        if state.is_full or state.slots.num_verified + depth >= self._model.max_positions:
            return None
        rows = state.slots.expand(tokens, ancestors, depth)
        # Pending verified tokens have consecutive positions; nodes of one depth share one.
        first, _ = rows.positions
        positions = torch.arange(first, first + rows.tokens.shape[0], device=tokens.device)
        logits = self._run(
            state, rows.tokens, rows.slot, positions.clamp(max=rows.position), rows.causal, rows.num_known
        )
        # Embeddings are often padded to a size that differs from the target's: ids past either are never text.
        missing = self.spec.vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self.spec.vocab_size]

    def _run(
        self,
        state: PretrainedState,
        tokens: Int[Tensor, " new"],
        start: int,
        positions: Int[Tensor, " new"],
        mask: Float[Tensor, "1 1 new slots"] | None,
        num_known: int,
    ) -> Float[Tensor, "rest vocab"]:
        """Logits of tokens whose slots begin at `start`, without the first `num_known`."""
        known = tokens.clamp(max=self._model.vocab_size - 1)
        return self._model.forward(known, positions, mask, state.cache, start, num_known)


class _FamiliarCausalLM:
    """A model of a family that can be a target, run like a target: preallocated caches, and no unused logits."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.max_positions = target.spec.max_positions
        self.weight: Tensor = target.model.lm_head.weight
        self.vocab_size = target.spec.vocab_size
        self.new_cache = target.new_cache

    def forward(
        self,
        tokens: Int[Tensor, " new"],
        positions: Int[Tensor, " new"],
        mask: Float[Tensor, "1 1 new slots"] | None,
        cache: KVCache,
        start: int,
        num_known: int,
    ) -> Float[Tensor, "rest vocab"]:
        """See `OtherCausalLM.forward`."""
        cache.length = start
        hidden = self._target.forward(tokens[None], positions[None], mask, cache).last[0]
        return self._target.logits(hidden[num_known:])


def _load(model: str, like: Tensor) -> _FamiliarCausalLM | OtherCausalLM:
    if model_type_of(model, "drafter.model") not in FAMILIES:
        return OtherCausalLM(model, like.dtype, like.device)
    dtype = str(like.dtype).removeprefix("torch.")
    settings = {"model": model, "dtype": dtype, "device": like.device.type}
    return _FamiliarCausalLM(Target.load(TargetConfig.model_validate(settings), "drafter.model"))
