"""Where the engine's drafts come from: an interface, and drafting in the engine's own process.

The engine requests the drafts of many sequences at once and collects them when it needs them. Drafts that have not
arrived by then are skipped for that cycle. A source may be unavailable altogether: only speed is lost.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.decoding.sampling.batched_select import picks_of
from moray.decoding.sampling.sampler import Sampler
from moray.decoding.synthetic import NO_COST, SyntheticCost
from moray.drafters.base import Drafter, Memory
from moray.drafters.common.rows import on_device
from moray.trees.shapes import GrowableShape
from moray.trees.tree import TokenTree


@dataclass(frozen=True)
class DraftJob:
    """A request for one sequence's draft."""

    number: int
    """Number of the sequence."""
    root: int
    position: int
    """Position of the root, which is the number of tokens before it; the source must know those tokens by then."""
    shape: GrowableShape
    sampler: Sampler
    """The sequence's sampler. It uses the target's noise, so the draft is what the target is likely to draw."""
    num_target_layers: int | None = None
    """N to draft with (see `Drafter.set_num_target_layers`); None if there is no choice."""
    wants_scores: bool = False
    """Whether the tree needs scores, for pruning."""


class DraftSource(ABC):
    """Keeps the drafting states of many sequences, addressed by number."""

    @property
    @abstractmethod
    def observed(self) -> TapNeeds:
        """Taps that `observe` reads."""

    @property
    @abstractmethod
    def max_depth(self) -> int | None:
        """Maximum number of levels that can be drafted; None for no limit."""

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """The values of N that drafts can use (see `Drafter.layer_counts`)."""
        return (0,)

    @property
    def is_remote(self) -> bool:
        """Whether drafts are made in other processes."""
        return False

    @abstractmethod
    def observe(self, taps: Taps) -> Memory:
        """Turn taps of verified tokens into memory. Runs in the target's process."""

    @abstractmethod
    def open(self, number: int) -> None:
        """Announce that drafts of a sequence will be requested; no effect if it is open already."""

    @abstractmethod
    def can_draft(self, number: int) -> bool:
        """Whether a draft can be requested now. A remote source first looks for a drafter process if the sequence has
        none, and reads the replies that have arrived."""

    @abstractmethod
    def num_known(self, number: int) -> int:
        """How many verified tokens of a sequence the source has received; 0 if it does not know the sequence."""

    @abstractmethod
    def extend(self, number: int, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int) -> None:
        """Hand over the next verified tokens of a sequence and their memory (see `Drafter.extend`)."""

    @abstractmethod
    def submit(self, jobs: Sequence[DraftJob]) -> None:
        """Start drafting."""

    @abstractmethod
    def is_under_way(self, number: int) -> bool:
        """Whether another process is still working on the requested draft, so that `collect` would have to wait. Takes
        in the replies that have arrived."""

    @abstractmethod
    def collect(self, numbers: Sequence[int]) -> dict[int, TokenTree]:
        """Return the requested drafts, by sequence; those that have not arrived in time are missing and never
        follow."""

    @abstractmethod
    def close(self, number: int) -> None:
        """Forget a sequence."""


class LocalDrafts(DraftSource):
    """A drafter in the same process as the target."""

    def __init__(self, drafter: Drafter, max_model_len: int, max_expanded: int, cost: SyntheticCost = NO_COST) -> None:
        """
        Args:
            drafter: may be shared.
            max_model_len: maximum number of tokens of a sequence.
            max_expanded: maximum number of nodes that are expanded in a tree.
            cost: synthetic cost of a draft, if any.
        """
        self.drafter = drafter
        self._sizes = max_model_len, max_expanded
        self._cost = cost
        self._states: dict[int, object] = {}
        self._known: dict[int, int] = {}
        self._free: list[object] = []
        self._jobs: dict[int, DraftJob] = {}

    @property
    def observed(self) -> TapNeeds:
        return self.drafter.observed

    @property
    def max_depth(self) -> int | None:
        return self.drafter.max_depth

    @property
    def layer_counts(self) -> tuple[int, ...]:
        return self.drafter.layer_counts

    def observe(self, taps: Taps) -> Memory:
        return self.drafter.observe(taps)

    def open(self, number: int) -> None:
        pass  # `extend` creates the state

    def can_draft(self, number: int) -> bool:
        return True

    def num_known(self, number: int) -> int:
        return self._known.get(number, 0)

    def extend(self, number: int, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int) -> None:
        if number not in self._states:
            state = self._free.pop() if self._free else self.drafter.new_state(*self._sizes)
            self.drafter.reset(state)
            self._states[number] = state
        self.drafter.extend(self._states[number], tokens, memory, num_kept)
        self._known[number] = self.num_known(number) + tokens.shape[0]

    def submit(self, jobs: Sequence[DraftJob]) -> None:
        self._jobs.update({job.number: job for job in jobs})

    def is_under_way(self, number: int) -> bool:
        return False

    def collect(self, numbers: Sequence[int]) -> dict[int, TokenTree]:
        alike: dict[tuple[GrowableShape, int | None], list[DraftJob]] = {}
        for number in numbers:
            if number in self._jobs:
                job = self._jobs.pop(number)
                alike.setdefault((job.shape, job.num_target_layers), []).append(job)
        drafted: dict[int, TokenTree] = {}
        for (shape, num_target_layers), jobs in alike.items():
            roots = on_device(self.drafter.head.weight.device, [job.root for job in jobs])
            states = [self._states[job.number] for job in jobs]
            if num_target_layers is not None:
                for state in states:
                    self.drafter.set_num_target_layers(state, num_target_layers)
            picks = picks_of([job.sampler for job in jobs], [job.position for job in jobs], shape)
            with self._cost.spent(len(jobs)):
                trees = self.drafter.propose_many(states, roots, shape, picks)
            drafted |= zip((job.number for job in jobs), trees, strict=True)
        return drafted

    def close(self, number: int) -> None:
        self._known.pop(number, None)
        self._jobs.pop(number, None)
        if number in self._states:
            self._free.append(self._states.pop(number))
