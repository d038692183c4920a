"""Chains of every depth from one pass over a log.

`ChainMatches` is what a replay says of chains. `MatchCounter` finds it for drafters whose drafts may end early, such as
prompt lookup; `replay.ranks` is for all others. A chain is drafted at
every token of a continuation, whatever was accepted before. How many of its tokens agree with the continuation tells
what a chain of any smaller depth would have had accepted there, so the cycles of each depth follow by arithmetic: a
cycle at token i goes on at token i + accepted + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from moray.decoding.sampling.accept import Accepted, accept
from moray.decoding.sampling.sampler import Sampler
from moray.trees.tree import TokenTree


@dataclass(frozen=True)
class ChainMatches:
    """The chains of one continuation of `len(matched) + 1` tokens, drafted after each of its tokens but the last."""

    uid: str
    matched: list[int]
    """By root: the draft's first tokens that agree with the continuation."""
    drafted: list[int]
    """By root: tokens of the draft; fewer than asked for where prompt lookup finds nothing more."""

    def cycles(self, depth: int) -> Iterator[tuple[int, int, int]]:
        """The cycles of chains of this depth: (draft tokens, accepted ones, tokens emitted)."""
        root, last = 0, len(self.matched)
        while root < last:
            accepted = min(self.matched[root], depth)
            emitted = min(accepted + 1, last - root)
            yield min(self.drafted[root], depth), min(accepted, emitted), emitted
            root += accepted + 1


class MatchCounter:
    """An acceptance method that accepts nothing and notes what the lossless one would have accepted."""

    def __init__(self) -> None:
        self.matched: list[int] = []
        self.drafted: list[int] = []

    def __call__(self, tree: TokenTree, logits: Tensor, sampler: Sampler, root_position: int) -> Accepted:
        """See `sampling.accept.Accept`."""
        found = accept(tree, logits, sampler, root_position)
        self.matched.append(len(found.path))
        self.drafted.append(tree.num_nodes - 1)
        return Accepted([], [], found.tokens[0] if found.path else found.next_token)

    def take(self, uid: str) -> ChainMatches:
        """What was noted since the last call, for one continuation."""
        found = ChainMatches(uid, self.matched, self.drafted)
        self.matched, self.drafted = [], []
        return found


def tau_of_chains(continuations: Sequence[ChainMatches], depth: int) -> float:
    """Tokens per cycle of chains of this depth; 0 without any cycle."""
    cycles = [emitted for each in continuations for _, _, emitted in each.cycles(depth)]
    return sum(cycles) / len(cycles) if cycles else 0.0


def as_row(drafter: str, depth: int, continuations: Sequence[ChainMatches], seconds: float) -> dict[str, Any]:
    """The entry of one drafter in the replay's JSON."""
    return {
        "drafter": drafter,
        "depth": depth,
        "tau": {str(each): tau_of_chains(continuations, each) for each in range(1, depth + 1)},
        "continuations": [asdict(each) for each in continuations],
        "seconds": seconds,
    }
