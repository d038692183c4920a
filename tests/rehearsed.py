"""The target as its own drafter, right as often as a test wants."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.base import Drafter, Memory
from moray.drafters.config_base import DrafterConfigBase
from moray.drafters.learner import DraftOutput, DraftView
from moray.targets.head import TargetHead
from moray.targets.kv_cache import KVCache
from moray.targets.model import Target
from moray.trees.tree import PrefixMask


@dataclass
class RehearsedState:
    """The drafter's own cache of the whole target, and the mask over it."""

    cache: KVCache
    mask: PrefixMask
    num_expanded: int = 0


class Rehearsed(Drafter[RehearsedState]):
    """The target itself as a drafter: right always, or with `noise` on its logits as often as wanted."""

    def __init__(self, target: Target, noise: float = 0.0) -> None:
        super().__init__(DrafterConfigBase(), TargetHead.of(target))
        self._target = target
        self._noise = noise

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds()

    def observe(self, taps: Taps) -> Memory:
        return {}

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        raise NotImplementedError("never trained")

    def new_state(self, max_model_len: int, max_expanded: int) -> RehearsedState:
        slots = max_model_len + max_expanded
        mask = PrefixMask(max(max_model_len, max_expanded), slots + max_model_len, self._target.model.lm_head.weight)
        return RehearsedState(self._target.new_cache(slots), mask)

    def reset(self, state: RehearsedState) -> None:
        state.cache.reset()
        state.mask.reset()

    def extend(self, state: RehearsedState, tokens: Tensor, memory: Memory, num_kept: int = 0) -> None:
        new = tokens.shape[0]
        state.cache.length = state.mask.length
        self._pass(state, tokens, torch.ones(new, new, dtype=torch.bool).tril(), state.cache.length + torch.arange(new))
        state.cache.commit(new)
        state.mask.commit(new)

    def step(self, state: RehearsedState, tokens: Tensor, ancestors: Tensor | None, depth: int) -> Tensor:
        if depth == 0:
            state.num_expanded = 0
        committed, new = state.mask.length, tokens.shape[0]
        if ancestors is None:
            ancestors = torch.ones(new, state.num_expanded + new, dtype=torch.bool)
        state.cache.length = committed + state.num_expanded
        hidden = self._pass(state, tokens, ancestors, torch.full((new,), committed + depth))
        state.num_expanded += new
        logits = self._target.logits(hidden)
        generator = torch.Generator().manual_seed(committed + depth)
        return logits + self._noise * torch.randn(logits.shape[1], generator=generator)

    def _pass(self, state: RehearsedState, tokens: Tensor, block: Tensor, positions: Tensor) -> Tensor:
        return self._target.forward(tokens[None], positions[None], state.mask.view(block), state.cache).last[0]
