"""Any Hugging Face causal LM with the target's tokenizer as a drafter, as it is: nothing is trained or saved.

It is driven as a target is: unmodified, with our masks, positions and cache. Beyond its own context it proposes
nothing.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.drafters.base import Drafter, Memory
from moray.drafters.configs import PretrainedConfig
from moray.drafters.slots import EXTEND_CHUNK, DraftSlots
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
        slots = DraftSlots(capacity, max_expanded, self._model.model.lm_head.weight, rows=EXTEND_CHUNK)
        return PretrainedState(slots, self._model.new_cache(slots.num_slots))

    def reset(self, state: PretrainedState) -> None:
        state.slots.reset()
        state.cache.reset()
        state.is_full = False

    def extend(self, state: PretrainedState, tokens: Int[Tensor, " new"], memory: Memory) -> None:
        if state.slots.length + tokens.shape[0] > self._model.spec.max_positions:
            state.is_full = True
        if state.is_full:
            return
        for chunk in tokens.split(EXTEND_CHUNK):
            new = chunk.shape[0]
            state.cache.length = state.slots.length
            self._run(state, chunk, state.slots.causal(new), torch.arange(new, device=chunk.device))
            state.slots.commit(new)

    def step(
        self,
        state: PretrainedState,
        tokens: Int[Tensor, " new"],
        ancestors: Bool[Tensor, "new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "new vocab"] | None:
        if state.is_full or state.slots.length + depth >= self._model.spec.max_positions:
            return None
        start, mask = state.slots.expand(tokens.shape[0], ancestors, depth)
        state.cache.length = start
        offsets = torch.full_like(tokens, state.slots.length + depth - start)
        hidden = self._run(state, tokens, mask, offsets)
        logits = self._model.logits(hidden)
        # Embeddings are often padded to another size than the target's: ids beyond both are never text.
        missing = self.spec.vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self.spec.vocab_size]

    def _run(
        self,
        state: PretrainedState,
        tokens: Int[Tensor, " new"],
        mask: Float[Tensor, "1 1 new slots"] | None,
        offsets: Int[Tensor, " new"],
    ) -> Float[Tensor, "new hidden"]:
        """Last hidden states of tokens that stand `offsets` behind the cache's length."""
        known = tokens.clamp(max=self._model.spec.vocab_size - 1)
        positions = offsets + state.cache.length
        return self._model.forward(known[None], positions[None], mask, state.cache).last[0]
