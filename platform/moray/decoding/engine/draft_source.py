"""Where the engine's drafts come from: an interface, and drafting in the engine's own process.

The engine asks for the drafts of many sequences at once and collects them when it needs them; what has not come by
then is done without, for one cycle. A source may be away altogether: nothing but speed is lost.
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
class Ask:
    """A draft that is wanted."""

    number: int
    """Of the sequence."""
    root: int
    position: int
    """Of the root, and so the number of tokens before it, which the source must know by then."""
    shape: GrowableShape
    sampler: Sampler
    """Of the sequence: drafted is what the target is likely to draw with the same noise."""
    num_target_layers: int | None = None
    """N to draft with (see `Drafter.set_num_target_layers`); None where there is no choice."""
    wants_scores: bool = False
    """Whether the tree is pruned by its scores."""


class DraftSource(ABC):
    """Drafting states of many sequences, by number."""

    @property
    @abstractmethod
    def observed(self) -> TapNeeds:
        """Taps that `observe` reads."""

    @property
    @abstractmethod
    def max_depth(self) -> int | None:
        """Most levels that can be drafted; None for any number."""

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """The N that drafts may be asked for with (see `Drafter.layer_counts`)."""
        return (0,)

    @property
    def is_remote(self) -> bool:
        """Whether drafts are made in other processes."""
        return False

    @abstractmethod
    def observe(self, taps: Taps) -> Memory:
        """Turn taps of verified tokens into memory, beside the target."""

    @abstractmethod
    def open(self, number: int) -> None:
        """Drafts of a sequence will be wanted; opened already, it stays as it is."""

    @abstractmethod
    def can_draft(self, number: int) -> bool:
        """Whether asking for a draft makes sense at the moment."""

    @abstractmethod
    def num_known(self, number: int) -> int:
        """How many verified tokens of a sequence the source has been given; 0 if it knows nothing of it."""

    @abstractmethod
    def extend(self, number: int, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int) -> None:
        """Hand over the next verified tokens of a sequence and their memory (see `Drafter.extend`)."""

    @abstractmethod
    def ask(self, asks: Sequence[Ask]) -> None:
        """Begin to draft."""

    @abstractmethod
    def is_under_way(self, number: int) -> bool:
        """Whether another process is at work on the draft that was asked for, so that `collect` would have to wait.
        Takes in what has come meanwhile."""

    @abstractmethod
    def collect(self, numbers: Sequence[int]) -> dict[int, TokenTree]:
        """The drafts asked for, by sequence; those that have not come in time are missing, and never come."""

    @abstractmethod
    def close(self, number: int) -> None:
        """Forget a sequence."""


class LocalDrafts(DraftSource):
    """A drafter in the same process as the target."""

    def __init__(self, drafter: Drafter, capacity: int, max_expanded: int, cost: SyntheticCost = NO_COST) -> None:
        """
        Args:
            drafter: may be shared.
            capacity: most tokens of a sequence.
            max_expanded: most nodes of a tree that are expanded.
            cost: of a draft, if it is made up.
        """
        self.drafter = drafter
        self._sizes = capacity, max_expanded
        self._cost = cost
        self._states: dict[int, object] = {}
        self._known: dict[int, int] = {}
        self._free: list[object] = []
        self._asks: dict[int, Ask] = {}

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
        pass  # a state is made when it is needed

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

    def ask(self, asks: Sequence[Ask]) -> None:
        self._asks.update({ask.number: ask for ask in asks})

    def is_under_way(self, number: int) -> bool:
        return False

    def collect(self, numbers: Sequence[int]) -> dict[int, TokenTree]:
        alike: dict[tuple[GrowableShape, int | None], list[Ask]] = {}
        for number in numbers:
            if number in self._asks:
                ask = self._asks.pop(number)
                alike.setdefault((ask.shape, ask.num_target_layers), []).append(ask)
        drafted: dict[int, TokenTree] = {}
        for (shape, num_target_layers), asks in alike.items():
            roots = on_device(self.drafter.head.weight.device, [ask.root for ask in asks])
            states = [self._states[ask.number] for ask in asks]
            if num_target_layers is not None:
                for state in states:
                    self.drafter.set_num_target_layers(state, num_target_layers)
            picks = picks_of([ask.sampler for ask in asks], [ask.position for ask in asks], shape)
            with self._cost.spent(len(asks)):
                trees = self.drafter.propose_many(states, roots, shape, picks)
            drafted |= zip((ask.number for ask in asks), trees, strict=True)
        return drafted

    def close(self, number: int) -> None:
        self._known.pop(number, None)
        self._asks.pop(number, None)
        if number in self._states:
            self._free.append(self._states.pop(number))
