"""Drafts ahead while the target verifies: below a chain that was just sent as a reply, for the likeliest outcome.

    sent          r  d1 d2 d3                  root and chain
    drafted ahead              g  e1 e2 e3     g: the target's next token, if it accepts all and agrees with the drafter
    next request  r  d1 d2 d3, root g          as guessed: e1 e2 e3 are the reply, at once

Drafts made ahead use memory that ends before r, a whole cycle older than usual. If the guess was wrong, nothing has to
be undone: a tree's nodes are stored after the verified tokens, and the first of them are the tokens that the next
request sends. If it was right, the state receives the verified tokens after the reply; g e1 e2 are then expanded again,
following the reply, before drafting goes on below them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from moray.decoding.params import SamplingParams
from moray.decoding.sampling.batched_select import picks_of
from moray.decoding.sampling.sampler import Sampler
from moray.drafters.base import Drafter
from moray.trees.grow import SelectMany
from moray.trees.shapes import MAX_DEPTH, ChainShape

Drawn = tuple[SamplingParams, int, int | None]
"""What a drafted token depends on besides its position: the sampling parameters, the sequence's number, and N."""


@dataclass(frozen=True)
class VerifiedUpdate:
    """Verified tokens, as `Drafter.extend` takes them."""

    tokens: Int[Tensor, " new"]
    memory: Mapping[str, Tensor]
    num_kept: int


@dataclass(frozen=True)
class Guess:
    """What was drafted ahead for one sequence, and when it is the right reply."""

    verified: tuple[int, ...]
    """Tokens that the next request must send as verified."""
    chain: tuple[int, ...]
    """The next root, and the draft below it."""
    drawn: Drawn

    def is_right(self, verified: tuple[int, ...], root: int, drawn: Drawn) -> bool:
        """Whether a request is the one that was guessed."""
        return (verified, root, drawn) == (self.verified, self.chain[0], self.drawn)


@dataclass
class Session:
    """One sequence in its drafter process."""

    name: str
    drafter: str
    state: Any
    used: float
    """When a draft of it was last requested."""
    known: int = 0
    """Verified tokens received."""
    num_expanded: int = 0
    """Nodes of the last tree sent that the state holds, counted from the root."""
    late: VerifiedUpdate | None = None
    """The last of the known tokens, which the state has not taken in yet."""
    guess: Guess | None = None
    ahead: "Ahead | None" = None
    """What currently drafts ahead for it."""

    def learn(self, drafter: Drafter, update: VerifiedUpdate, *, is_late: bool = False) -> None:
        """Take in verified tokens: at once, or, with `is_late`, when `take_in_late` is called."""
        self.take_in_late(drafter)
        self.known += update.tokens.shape[0]
        self.late = update
        if not is_late:
            self.take_in_late(drafter)

    def take_in_late(self, drafter: Drafter) -> None:
        """Let the state take in late tokens, which ends what was drafted ahead."""
        if self.late is not None:
            update, self.late = self.late, None
            drafter.extend(self.state, update.tokens, update.memory, min(update.num_kept, self.num_expanded))
            self.num_expanded = 0


class Ahead:
    """Drafts ahead below the chains of several sequences of one drafter, level by level."""

    def __init__(
        self,
        drafter: Drafter,
        sessions: Sequence[Session],
        chains: Sequence[tuple[int, ...]],
        drawn: Sequence[Drawn],
        depth: int,
    ) -> None:
        """
        Args:
            drafter: the drafter of all sequences.
            sessions: all with the same number of expanded nodes, or all with late tokens.
            chains: the chains that were sent, roots first.
            drawn: what each chain was drawn with.
            depth: levels to draft below the next root.
        """
        self._drafter = drafter
        self._sessions = list(sessions)
        self._drawn = list(drawn)
        self._depth = depth
        self._num_answered = len(chains[0])
        self._end = self._num_answered + 1 + depth
        self._level = sessions[0].num_expanded if sessions[0].late is None else 0
        self._positions = [session.known + self._num_answered - 1 for session in sessions]  # of each chain's last node
        self._going = list(range(len(self._sessions)))
        self._chains = torch.tensor(chains)
        self._picks: SelectMany | None = None
        for session in self._sessions:
            session.ahead = self

    @property
    def sessions(self) -> list[Session]:
        """Sessions that it still drafts for."""
        return [self._sessions[number] for number in self._going if self._sessions[number].ahead is self]

    @property
    def first_chain(self) -> list[int]:
        """What is drafted so far for the first sequence that it drafts for, from the root of the chain that was sent;
        empty once it drafts for none. Waits for the device."""
        return self._chains[0].tolist() if self._going else []

    def grow(self) -> bool:
        """Expand the next level; return whether there is another one."""
        self._keep([index for index, number in enumerate(self._going) if self._sessions[number].ahead is self])
        sessions = self.sessions
        if not sessions:
            return False
        if self._picks is None:
            self._picks = self._begin()
        tokens = self._chains[:, self._level : self._level + 1]
        left, logits = self._drafter.step_many([session.state for session in sessions], tokens, None, self._level)
        for session in sessions:
            session.num_expanded = self._level + 1
        self._keep(list(left))  # the others have no scores for what follows
        if self._going and self._level + 1 == self._chains.shape[1]:
            picked = self._picks(self._going, logits, self._level + 1 - self._num_answered, 1)
            self._chains = torch.cat([self._chains, picked.tokens.flatten(1)], dim=1)
        self._level += 1
        if self._going and self._chains.shape[1] < self._end:
            return True
        self._finish()
        return False

    def _begin(self) -> SelectMany:
        """Do the preparations that can wait until the reply has been sent; return how the next tokens are picked."""
        for session in self.sessions:
            session.take_in_late(self._drafter)
        device, size = self._drafter.head.weight.device, self._drafter.spec.vocab_size
        self._chains = self._chains.to(device)
        samplers = [Sampler(params, size, device, sequence) for params, sequence, _ in self._drawn]
        return picks_of(samplers, self._positions, ChainShape(type="chain", depth=self._depth + 1), are_certain=True)

    def _keep(self, indices: list[int]) -> None:
        if len(indices) < len(self._going):
            self._going = [self._going[index] for index in indices]
            self._chains = self._chains[indices]

    def _finish(self) -> None:
        for number, chain in zip(self._going, self._chains.tolist(), strict=True):
            verified, rest = tuple(chain[: self._num_answered]), tuple(chain[self._num_answered :])
            self._sessions[number].guess = Guess(verified, rest, self._drawn[number])


def can_run_ahead(drafter: Drafter, num_answered: int, depth: int, max_expanded: int) -> bool:
    """Whether a drafter can draft `depth` levels below a chain of `num_answered` nodes, with a state for `max_expanded`
    nodes."""
    levels = num_answered + depth
    return levels <= min(max_expanded, MAX_DEPTH, drafter.max_depth or MAX_DEPTH)
