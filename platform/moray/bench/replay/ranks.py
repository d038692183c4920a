"""Chains and static trees of every size from one pass over a log ("ranks" in "Decoding Speculative Decoding", arXiv
2402.01528).

A drafter is teacher-forced: below every token of a continuation it scores the tokens that really follow.

    text      t0 ... t5   t6    t7    t8     t0..t5 given to `extend`, t6 the root
    step at   level 0: t6   level 1: t7      level 2: t8
    next            t7            t8               t9     its rank among the candidates is kept

Static trees name their nodes by ranks on the path (see `SparseShape`), so the ranks below a root tell how far each of
them follows the text there. Cycles come by arithmetic: a cycle at token i goes on at token i + accepted + 1.

Candidates are picked by the very calls of live decoding, once for each number of children, because calls that pick
another number may put equal scores in another order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from moray.bench.replay.chains import ChainMatches
from moray.bench.replay.recorded import RecordedText
from moray.decoding.generation import Generation
from moray.decoding.sampling.sampler import Sampler
from moray.drafters.base import Drafter
from moray.trees.shapes import ChainShape, FixedShape, SparseShape

StaticShape = ChainShape | FixedShape | SparseShape
"""Trees whose nodes are fixed ranks, whatever the drafter's scores are."""

NOT_A_CANDIDATE = -1
CHAIN = 0
"""Stands for the number of children in a chain, whose only child is picked by a call of its own."""

Pick = Callable[[Float[Tensor, "1 vocab"], int], Int[Tensor, "1 candidates"]]
"""pick(logits, level): candidates, best first."""


def num_children(shape: StaticShape) -> tuple[int, ...]:
    """How many children live decoding picks for a node, level by level; CHAIN for all levels of a chain."""
    if isinstance(shape, ChainShape):
        return (CHAIN,) * shape.depth
    if isinstance(shape, FixedShape):
        return shape.branching
    deepest = range(1, shape.depth + 1)
    return tuple(1 + max(path[-1] for path in shape.paths if len(path) == level) for level in deepest)


def _nodes(shape: StaticShape) -> frozenset[tuple[int, ...]] | None:
    """The nodes of a sparse tree; None for the others, whose nodes are all candidates."""
    return frozenset(shape.paths) if isinstance(shape, SparseShape) else None


@dataclass(frozen=True)
class TokenRanks:
    """The ranks of one continuation's tokens."""

    uid: str
    below: Mapping[int, list[list[int]]]
    """By number of children, by root, by level: rank of the text's token among the candidates, or NOT_A_CANDIDATE. A
    continuation of n tokens has n - 1 roots. Levels end with the text."""

    @property
    def num_roots(self) -> int:
        """Tokens of the continuation that have a successor."""
        return len(next(iter(self.below.values())))

    def num_accepted(self, shape: StaticShape) -> list[int]:
        """By root, how many levels of a tree below it follow the text."""
        counts, nodes = num_children(shape), _nodes(shape)
        return [self._follow(counts, nodes, root) for root in range(self.num_roots)]

    def _follow(self, counts: Sequence[int], nodes: frozenset[tuple[int, ...]] | None, root: int) -> int:
        path: tuple[int, ...] = ()
        for level, count in enumerate(counts):
            ranks = self.below[count][root]
            if level == len(ranks):
                return level
            path = (*path, ranks[level])
            if path[-1] == NOT_A_CANDIDATE or (nodes is not None and path not in nodes):
                return level
        return len(counts)

    def generation(self, shape: StaticShape) -> Generation:
        """The cycles of this tree, without tokens and times."""
        made, accepted_at = Generation([]), self.num_accepted(shape)
        root, last = 0, self.num_roots
        while root < last:
            accepted = accepted_at[root]
            emitted = min(accepted + 1, last - root)
            made.accepted.append(min(accepted, emitted))
            made.emitted.append(emitted)
            made.drafted.append(shape.depth)
            made.nodes.append(shape.num_nodes)
            root += emitted
        return made

    def matches(self, depth: int) -> ChainMatches:
        """Where chains of this depth agree with the text, from which those of smaller depths follow."""
        shape = ChainShape(type="chain", depth=depth)
        return ChainMatches(self.uid, self.num_accepted(shape), [depth] * self.num_roots)


def picks_at(sampler: Sampler, root: int, levels: int, counts: Sequence[int]) -> list[Pick]:
    """How live decoding picks candidates below the token at index `root` of the text.

    Args:
        sampler: of the sequence.
        root: index of the root.
        levels: levels below the root.
        counts: numbers of children (see `num_children`).
    """
    select = {is_chain: sampler.selector(root, levels, is_chain) for is_chain in {count == CHAIN for count in counts}}

    def pick_of(count: int) -> Pick:
        return lambda logits, level: select[count == CHAIN](logits, level, max(1, count))[0]

    return [pick_of(count) for count in counts]


def ranks_below(
    drafter: Drafter, state: object, text: Int[Tensor, " seq"], root: int, levels: int, picks: Sequence[Pick]
) -> Int[Tensor, "picks reached"]:
    """Teacher-force a drafter below one root, given that `state` holds the text before it. Does not wait for the
    device; call it in inference mode.

    Args:
        drafter: the drafter.
        state: one of its states.
        text: prompt and answer.
        root: index of the root in the text.
        levels: levels below the root; fewer are reached at the end of the text, or where the drafter proposes nothing.
        picks: ways to pick candidates.

    Returns:
        the ranks of the text's tokens among the candidates, or NOT_A_CANDIDATE.
    """
    reached: list[Tensor] = []
    for level in range(min(levels, text.shape[0] - 1 - root)):
        logits = drafter.step(state, text[root + level : root + level + 1], None, level)
        if logits is None:
            break
        following = text[root + level + 1]
        is_next = [pick(logits, level)[0] == following for pick in picks]
        reached.append(torch.stack([torch.where(one.any(), one.int().argmax(), NOT_A_CANDIDATE) for one in is_next]))
    return torch.stack(reached, dim=1) if reached else text.new_empty(len(picks), 0)


@torch.inference_mode()
def ranks_of(
    drafter: Drafter, text: RecordedText, num_prompt: int, levels: int, counts: Sequence[int], sampler: Sampler
) -> dict[int, list[list[int]]]:
    """Ranks below every token of an answer but the last; waits for the device once.

    A drafter that reads nothing but text scores a token the same below every root before it, so one step per root is
    enough; the others take a step per root and level.

    Args:
        drafter: one whose drafts do not end early (see `Drafter.may_end_early`).
        text: prompt and answer, with the taps that the drafter observes.
        num_prompt: number of tokens of the prompt.
        levels: levels below each root.
        counts: numbers of children (see `num_children`).
        sampler: of the sequence.

    Returns:
        see `TokenRanks.below`.
    """
    steps = 1 if drafter.reads_text_alone else levels
    tokens = torch.tensor(text.tokens, device=drafter.head.weight.device)
    last = len(text.tokens) - 1
    state = drafter.new_state(len(text.tokens), levels)
    drafter.reset(state)
    drafter.set_num_target_layers(state, drafter.layer_counts[0])
    memory = drafter.observe(text.taps(drafter.observed))
    found: list[Tensor] = []
    for known, until in pairwise([0, *range(num_prompt, last), last]):
        is_root = known >= num_prompt
        if is_root:
            ranks = ranks_below(drafter, state, tokens, known, steps, picks_at(sampler, known, steps, counts))
            found.append(F.pad(ranks, (0, steps - ranks.shape[1]), value=NOT_A_CANDIDATE))
        part = {name: value[:, known:until] for name, value in memory.items()}
        drafter.extend(state, tokens[known:until], part, num_kept=int(is_root))
    by_count: list[list[list[int]]] = torch.stack(found, dim=1).tolist() if found else [[] for _ in counts]
    return {count: _levels(rows, levels, drafter) for count, rows in zip(counts, by_count, strict=True)}


def _levels(rows: list[list[int]], levels: int, drafter: Drafter) -> list[list[int]]:
    """The ranks below each root, as far as the text goes."""
    if drafter.reads_text_alone:
        first = [row[0] for row in rows]
        return [first[root : root + levels] for root in range(len(first))]
    return [row[: len(rows) - root] for root, row in enumerate(rows)]
