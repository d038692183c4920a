"""Chains and static trees of every size from one pass over a log ("ranks" in "Decoding Speculative Decoding", arXiv
2402.01528).

A drafter is teacher-forced: below every token of a continuation it scores the tokens that really follow.

    text      t0 ... t5   t6    t7    t8     t0..t5 given to `extend`, t6 the root
    step at   level 0: t6   level 1: t7      level 2: t8
    next            t7            t8               t9     its rank among the candidates is kept

Static trees name their nodes by ranks on the path (see `SparseShape`), so the ranks below a root tell how far each of
them follows the text there. Cycles come by arithmetic: a cycle at token i goes on at token i + accepted + 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from moray.bench.replay.chains import ChainMatches
from moray.bench.replay.recorded import RecordedText
from moray.decoding.stats import Generation
from moray.drafters.base import Drafter
from moray.drafters.independent import Independent
from moray.drafters.pretrained import Pretrained
from moray.trees.grow import Select
from moray.trees.shapes import ChainShape, FixedShape, SparseShape

StaticShape = ChainShape | FixedShape | SparseShape
"""Trees whose nodes are fixed ranks, whatever the drafter's scores are."""

NOT_A_CANDIDATE = -1

SelectAt = Callable[[int], Select]
"""For the index of a root in the text: how the tree below it picks children (see `Sampler.selector`)."""


@dataclass(frozen=True)
class TokenRanks:
    """The ranks of one continuation of `len(below) + 1` tokens."""

    uid: str
    below: list[list[int]]
    """By root, then by level: rank of the text's token among the candidates, or NOT_A_CANDIDATE. Levels end with the
    text."""

    def generation(self, shape: StaticShape) -> Generation:
        """The cycles of this tree, without tokens and times."""
        made = Generation([])
        root, last = 0, len(self.below)
        while root < last:
            accepted = num_accepted(shape, self.below[root])
            emitted = min(accepted + 1, last - root)
            made.accepted.append(min(accepted, emitted))
            made.emitted.append(emitted)
            made.drafted.append(shape.depth)
            made.nodes.append(shape.num_nodes)
            root += emitted
        return made

    def matches(self, depth: int) -> ChainMatches:
        """The same for chains of every depth up to this one."""
        shape = ChainShape(type="chain", depth=depth)
        return ChainMatches(self.uid, [num_accepted(shape, ranks) for ranks in self.below], [depth] * len(self.below))


def num_accepted(shape: StaticShape, ranks: Sequence[int]) -> int:
    """How many levels of a tree follow the text, given the ranks of the text's tokens below its root."""
    known = set(shape.paths) if isinstance(shape, SparseShape) else set()
    for level, rank in enumerate(ranks[: shape.depth]):
        if isinstance(shape, SparseShape):
            is_node = tuple(ranks[: level + 1]) in known
        else:
            width = 1 if isinstance(shape, ChainShape) else shape.branching[level]
            is_node = 0 <= rank < width
        if not is_node:
            return level
    return min(len(ranks), shape.depth)


def ranks_below(
    drafter: Drafter, state: object, text: Int[Tensor, " seq"], root: int, levels: int, select: Select, num_ranks: int
) -> Int[Tensor, " reached"]:
    """Teacher-force a drafter below one root, given that `state` holds the text before it.

    Args:
        drafter: the drafter.
        state: one of its states.
        text: prompt and answer.
        root: index of the root in the text.
        levels: levels below the root; fewer are reached at the end of the text, or where the drafter proposes nothing.
        select: picks candidates from scores (see `trees.grow.Select`).
        num_ranks: number of candidates of each level.
    """
    reached = []
    for level in range(min(levels, text.shape[0] - 1 - root)):
        logits = drafter.step(state, text[root + level : root + level + 1], None, level)
        if logits is None:
            break
        candidates, _, _ = select(logits, level, num_ranks)
        is_next = candidates[0] == text[root + level + 1]
        reached.append(torch.where(is_next.any(), is_next.int().argmax(), NOT_A_CANDIDATE))
    return torch.stack(reached) if reached else torch.empty(0, dtype=torch.long, device=text.device)


@torch.inference_mode()
def ranks_of(
    drafter: Drafter, text: RecordedText, num_prompt: int, levels: int, num_ranks: int, select: SelectAt
) -> list[list[int]]:
    """Ranks below every token of an answer but the last; waits for the device once.

    A drafter that reads nothing but text scores a token the same below every root before it, so one step per root is
    enough; the others take a step per root and level.

    Args:
        drafter: one whose drafts do not end early (see `Drafter.may_end_early`).
        text: prompt and answer, with the taps that the drafter observes.
        num_prompt: number of tokens of the prompt.
        levels: levels below each root.
        num_ranks: number of candidates of each level.
        select: how trees pick children.
    """
    reads_text_alone = isinstance(drafter, Independent | Pretrained)
    steps = 1 if reads_text_alone else levels
    tokens = torch.tensor(text.tokens, device=drafter.head.weight.device)
    last = len(text.tokens) - 1
    state = drafter.new_state(len(text.tokens), levels)
    drafter.reset(state)
    drafter.set_num_target_layers(state, drafter.layer_counts[0])
    memory = drafter.observe(text.taps(drafter.observed))
    found: list[Tensor] = []
    for known, until in pairwise([0, *range(num_prompt, last), last]):
        if known >= num_prompt:
            ranks = ranks_below(drafter, state, tokens, known, steps, select(known), num_ranks)
            found.append(F.pad(ranks, (0, steps - ranks.shape[0]), value=NOT_A_CANDIDATE))
        part = {name: value[:, known:until] for name, value in memory.items()}
        drafter.extend(state, tokens[known:until], part)
    rows: list[list[int]] = torch.stack(found).tolist() if found else []
    if reads_text_alone:
        first = [row[0] for row in rows]
        return [first[root : root + levels] for root in range(len(first))]
    return [row[: len(rows) - root] for root, row in enumerate(rows)]
