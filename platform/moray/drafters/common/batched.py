"""Drafters that score the nodes of several sequences in one pass over their weights."""

from abc import abstractmethod
from collections.abc import Sequence

from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.drafters.base import Drafter, State


class BatchedDrafter(Drafter[State]):
    """A drafter that implements `score` for several sequences, of which `step` is the special case; it never ends a
    tree early."""

    def may_end_early(self, num_tokens: int) -> bool:
        return False

    @abstractmethod
    def score(
        self,
        states: Sequence[State],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "sequences new vocab"]:
        """The result of `step` for each sequence; the rows of all sequences go through linear layers together."""

    def step(
        self, state: State, tokens: Int[Tensor, " new"], ancestors: Bool[Tensor, "new expanded"] | None, depth: int
    ) -> Float[Tensor, "new vocab"]:
        return self.score([state], tokens[None], None if ancestors is None else ancestors[None], depth)[0]

    def step_many(
        self,
        states: Sequence[State],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> tuple[Sequence[int], Float[Tensor, "left new vocab"]]:
        return range(len(states)), self.score(states, tokens, ancestors, depth)
