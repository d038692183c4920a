"""The state of drafters that read, with each token, the feature of the token before it (EAGLE, EAGLE-3).

    token      t1    t2    t3    t4 (root)   drafted
    feature          f1    f2    f3          the drafter's own, of the node's parent

The first token has no feature before it. A drafter either reads zeros there, or leaves that token out: then slot s
holds token s + 1, and rotations begin with the second token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.drafters.base import parents_of
from moray.drafters.common.rows import Rows
from moray.drafters.common.slots import DraftSlots

Remember = Callable[[Int[Tensor, " some"], Float[Tensor, "1 some hidden"], int], None]
"""remember(tokens, features before them, start): compute keys and values of tokens whose slots begin at `start`."""


@dataclass
class FeatureState:
    """One sequence: keys and values, and the features that the next step reads."""

    slots: DraftSlots
    cache: Tensor  # [2, 1, kv_heads, slots, head_dim]
    before: Tensor  # [1, pending + 1, hidden]: the target's features of the tokens before the pending ones and the root
    drafted: list[Tensor]  # features of the expanded nodes, level by level
    first: Tensor  # [1, 0 or 1, hidden]: what comes before the first token; nothing if that is left out

    def reset(self) -> None:
        """Forget the sequence."""
        self.slots.reset()
        self.before = self.first

    def extend(
        self,
        tokens: Int[Tensor, " new"],
        features: Float[Tensor, "1 new hidden"],
        num_kept: int,
        remember: Remember,
    ) -> None:
        """Add verified tokens and their features (see `Drafter.extend`)."""
        before = torch.cat([self.before, features], dim=1)
        if self.before.shape[1]:
            first = self.slots.num_verified + 1 - self.before.shape[1]  # slot of the token that before[0] is for
        else:
            first, tokens = 0, tokens[1:]
        # Among the drafted nodes, only the root read a feature of the target; the others read the drafter's own.
        self.slots.extend(tokens, min(num_kept, 1), partial(_with_features, remember, before, first))
        self.before = before[:, self.slots.length - first :]


def _with_features(
    remember: Remember, before: Float[Tensor, "1 new hidden"], first: int, tokens: Int[Tensor, " some"], start: int
) -> None:
    """Remember tokens from slot `start` on, each with the feature before it; `before[0]` is for slot `first`."""
    remember(tokens, before[:, start - first : start - first + tokens.shape[0]], start)


def features_before(
    states: Sequence[FeatureState],
    rows: Rows,
    ancestors: Bool[Tensor, "#sequences new expanded"] | None,
    depth: int,
) -> Float[Tensor, "1 rows hidden"]:
    """The features that all rows of a draft step read; at depth 0 a new tree begins."""
    if depth == 0:
        for state in states:
            state.drafted = []
        found = [state.before[:, -1 - part.num_known :] for state, part in zip(states, rows.parts, strict=True)]
    elif ancestors is None:
        found = [state.drafted[-1] for state in states]
    else:
        parents = [parents_of(own) for own in ancestors] * (len(states) // ancestors.shape[0])
        found = [torch.cat(s.drafted, dim=1)[:, above] for s, above in zip(states, parents, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def keep_drafted(states: Sequence[FeatureState], rows: Rows, features: Float[Tensor, "1 nodes hidden"]) -> None:
    """Keep the features of the nodes of a draft step for the next one."""
    for state, own in zip(states, rows.split(features), strict=True):
        state.drafted.append(own)
