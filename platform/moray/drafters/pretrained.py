"""Any Hugging Face causal LM with the target's tokenizer as a drafter, as it is: nothing is trained or saved.

It is driven as a target is: unmodified, with our masks, positions and cache. Beyond its own context it proposes
nothing.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.drafters.base import Drafter, Memory
from moray.drafters.configs import PretrainedConfig
from moray.drafters.slots import DraftSlots
from moray.targets.head import TargetHead
from moray.targets.kv_cache import KVCache
from moray.targets.model import Target
from moray.targets.spec import TargetConfig


@dataclass
class PretrainedState:
    """One sequence: the model's own cache."""

    slots: DraftSlots
    cache: KVCache
    is_full: bool = False


class Pretrained(Drafter[PretrainedState]):
    """Drafts as a language model that somebody else has trained."""

    def __init__(self, config: PretrainedConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: PretrainedConfig = config
        dtype = str(head.weight.dtype).removeprefix("torch.")
        settings = {"model": config.model, "dtype": dtype, "device": head.weight.device.type}
        self._model = Target.load(TargetConfig.model_validate(settings))

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds()

    def observe(self, taps: Taps) -> Memory:
        return {}

    def new_state(self, capacity: int, max_expanded: int) -> PretrainedState:
        slots = DraftSlots(capacity, max_expanded, self._model.model.lm_head.weight, is_layered=True)
        return PretrainedState(slots, self._model.new_cache(slots.num_slots))

    def reset(self, state: PretrainedState) -> None:
        state.slots.reset()
        state.cache.reset()
        state.is_full = False

    def extend(self, state: PretrainedState, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        if state.slots.num_verified + tokens.shape[0] > self._model.spec.max_positions:
            state.is_full = True
        if not state.is_full:
            state.slots.extend(tokens, num_kept, partial(self._remember, state))

    def _remember(self, state: PretrainedState, tokens: Int[Tensor, " some"], start: int) -> None:
        positions = torch.arange(start, start + tokens.shape[0], device=tokens.device)
        self._run(state, tokens, start, positions, state.slots.causal(tokens.shape[0]))

    def step(
        self,
        state: PretrainedState,
        tokens: Int[Tensor, " new"],
        ancestors: Bool[Tensor, "new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "new vocab"] | None:
        if state.is_full or state.slots.num_verified + depth >= self._model.spec.max_positions:
            return None
        rows = state.slots.expand(tokens, ancestors, depth)
        # Verified tokens that have waited stand one behind the other, nodes of one depth side by side.
        first, _ = rows.positions
        positions = torch.arange(first, first + rows.tokens.shape[0], device=tokens.device)
        hidden = self._run(state, rows.tokens, rows.slot, positions.clamp(max=rows.position), rows.causal)
        logits = self._model.logits(hidden[rows.num_known :])
        # Embeddings are often padded to another size than the target's: ids beyond both are never text.
        missing = self.spec.vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self.spec.vocab_size]

    def _run(
        self,
        state: PretrainedState,
        tokens: Int[Tensor, " new"],
        start: int,
        positions: Int[Tensor, " new"],
        mask: Float[Tensor, "1 1 new slots"] | None,
    ) -> Float[Tensor, "new hidden"]:
        """Last hidden states of tokens whose slots begin at `start`."""
        known = tokens.clamp(max=self._model.spec.vocab_size - 1)
        state.cache.length = start
        return self._model.forward(known[None], positions[None], mask, state.cache).last[0]
