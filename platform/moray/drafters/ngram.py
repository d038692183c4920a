"""Prompt lookup (as in transformers' `prompt_lookup_num_tokens`): propose what followed the same few tokens before.

It needs no training, no target tensors and no device; every trained drafter must beat it. The scores are a real
distribution (interpolated back-off over the lengths that match), so it grows chains and trees and is sampled from like
any other drafter. If nothing matches, it proposes nothing, and the cycle costs a plain step.

It runs on the host: on a GPU every level waits for the tokens of the level before.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.drafters.base import Drafter, Memory, parents_of
from moray.drafters.configs import NgramConfig
from moray.targets.head import TargetHead

_MAX_FOLLOWERS = 16
_LOWER_ORDER = 0.1
"""Share of the probability given to the next shorter match."""
_FLOOR = -100.0
"""Logit of a token that was never seen after a match: below that of the rarest follower of the shortest match."""


@dataclass
class NgramState:
    """One sequence: what followed each n-gram, latest last, and the last tokens of each path of the current tree."""

    followers: dict[tuple[int, ...], OrderedDict[int, int]] = field(default_factory=dict)
    recent: deque[int] = field(default_factory=deque)
    paths: list[tuple[int, ...]] = field(default_factory=list)


class Ngram(Drafter[NgramState]):
    """Drafts what followed the same tokens before."""

    def __init__(self, config: NgramConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: NgramConfig = config

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds()

    def observe(self, taps: Taps) -> Memory:
        return {}

    def new_state(self, max_model_len: int, max_expanded: int) -> NgramState:
        return NgramState(recent=deque(maxlen=self.config.max_ngram))

    def reset(self, state: NgramState) -> None:
        state.followers.clear()
        state.recent.clear()
        state.paths.clear()

    def extend(self, state: NgramState, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        for token in tokens.tolist():
            recent = tuple(state.recent)
            for size in range(self.config.min_ngram, len(recent) + 1):
                seen = state.followers.setdefault(recent[-size:], OrderedDict())
                seen[token] = seen.pop(token, 0) + 1
                if len(seen) > _MAX_FOLLOWERS:
                    seen.popitem(last=False)
            state.recent.append(token)

    def step(
        self, state: NgramState, tokens: Int[Tensor, " new"], ancestors: Bool[Tensor, "new expanded"] | None, depth: int
    ) -> Float[Tensor, "new vocab"] | None:
        if depth == 0:
            state.paths = []
        new = tokens.tolist()
        if depth == 0:
            before = [tuple(state.recent)] * len(new)
        elif ancestors is None:
            before = [state.paths[-1]]
        else:
            before = [state.paths[parent] for parent in parents_of(ancestors).tolist()]
        paths = [(*past, token)[-self.config.max_ngram :] for past, token in zip(before, new, strict=True)]
        state.paths.extend(paths)
        found = [self._next(state, path) for path in paths]
        if not any(found):
            return None
        cells = [(row, token, math.log(p)) for row, followers in enumerate(found) for token, p in followers.items()]
        rows, columns, values = zip(*cells, strict=True)
        scores = torch.full((len(new), self.spec.vocab_size), _FLOOR)
        scores[list(rows), list(columns)] = torch.tensor(values)
        return scores.to(tokens.device)

    def _next(self, state: NgramState, path: tuple[int, ...]) -> dict[int, float]:
        """Probabilities of the tokens that may follow a path; empty if nothing matches."""
        probabilities: dict[int, float] = {}
        share = 1.0
        for size in range(len(path), self.config.min_ngram - 1, -1):
            seen = state.followers.get(path[-size:])
            if not seen:
                continue
            # Recency decides among equal counts: the latest follower counts half an occurrence more.
            latest = next(reversed(seen))
            total = sum(seen.values()) + 0.5
            for token, count in seen.items():
                weight = (count + 0.5 * (token == latest)) / total
                probabilities[token] = probabilities.get(token, 0.0) + share * (1.0 - _LOWER_ORDER) * weight
            share *= _LOWER_ORDER
        return probabilities
