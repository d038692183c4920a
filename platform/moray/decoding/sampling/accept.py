"""Acceptance methods: which path of a verified tree is accepted, and which token follows it.

Two lossless methods cover every case. Choice: the target's logits fix the token at each node (argmax, or
Gumbel-max with the position's noise), and a child is accepted if it is that token. Rejection: a child x
drawn from q is accepted with probability min(1, p(x)/q(x)); if it is refused, p becomes
norm((p - q)+) and the next sibling is tried. A deterministic child is the point mass q = 1 at x, for which
this is: accept with p(x), else zero x and renormalise.

A third method, typical acceptance, is lossy and must be asked for by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.decoding.params import SamplingParams
from moray.decoding.sampling.sampler import STREAM_RESIDUAL, STREAM_TEST, Sampler, gumbel, highest
from moray.trees.stack import stack_padded
from moray.trees.tree import TokenTree

_SUM_TOLERANCE = 1e-3
"""How far the sum of a drafter's probabilities may be from 1 for them still to count as a distribution."""


@dataclass(frozen=True)
class Accepted:
    """An accepted path (node indices below the root, in order), its tokens, and the token after it."""

    path: list[int]
    tokens: list[int]
    next_token: int
    rejected: list[int] = field(default_factory=list, compare=False)
    """Tokens of all other nodes below the root."""


AcceptRows = Callable[
    [Sequence[TokenTree], Float[Tensor, "rows nodes vocab"], Sequence[Sampler], Sequence[int]], list[Accepted]
]
"""accept(trees, logits, samplers, root_positions); see `accept_rows`."""


Accept = Callable[[TokenTree, Float[Tensor, "nodes vocab"], Sampler, int], Accepted]
"""accept(tree, logits, sampler, root_position); see `accept`."""


def row_by_row(accept_one: Accept) -> AcceptRows:
    """Make an acceptance function for several sequences from one for a single sequence."""

    def accept_each(
        trees: Sequence[TokenTree],
        logits: Float[Tensor, "rows nodes vocab"],
        samplers: Sequence[Sampler],
        root_positions: Sequence[int],
    ) -> list[Accepted]:
        rows = zip(trees, logits, samplers, root_positions, strict=True)
        return [accept_one(tree, own[: tree.num_nodes], sampler, at) for tree, own, sampler, at in rows]

    return accept_each


def accept(tree: TokenTree, logits: Float[Tensor, "nodes vocab"], sampler: Sampler, root_position: int) -> Accepted:
    """Apply the method that `sampler.params` asks for.

    Args:
        tree: the verified tree, whose root is at `root_position` of the sequence.
        logits: the target's logits at every node.
        sampler: the sequence's sampler.
        root_position: index of the root in the sequence, counted from 0.
    """
    if is_by_choice(sampler.params):
        return accept_by_choice(tree, choose(tree, logits, sampler, root_position))
    log_p = sampler.log_probs(logits)
    if sampler.params.acceptance_method == "typical":
        return accept_typical(tree, log_p, sampler, root_position)
    return accept_by_rejection(tree, log_p.exp(), sampler, root_position)


def accept_rows(
    trees: Sequence[TokenTree],
    logits: Float[Tensor, "rows nodes vocab"],
    samplers: Sequence[Sampler],
    root_positions: Sequence[int],
) -> list[Accepted]:
    """`accept` for the trees of several sequences.

    By choice, it waits for the device once for all of them; with another method, as often as for each one alone.

    Args:
        trees: of any sizes.
        logits: rows past a smaller tree's nodes are ignored.
        samplers: one for each sequence.
        root_positions: position of each root.
    """
    rows = list(zip(trees, logits, samplers, root_positions, strict=True))
    if len(rows) == 1 or not all(is_by_choice(sampler.params) for sampler in samplers):
        return [accept(tree, own[: tree.num_nodes], sampler, at) for tree, own, sampler, at in rows]
    most = logits.shape[1]
    if all(sampler.params.is_greedy for sampler in samplers):
        choices = highest(logits)
    else:
        choices = stack_padded(
            [choose(tree, own[: tree.num_nodes], sampler, at) for tree, own, sampler, at in rows], most
        )
    tokens = stack_padded([tree.tokens for tree in trees], most)
    parents = stack_padded([tree.parents for tree in trees], most, -1)
    host = torch.stack([tokens, parents, choices]).tolist()
    return [walk(*sides) for sides in zip(*host, strict=True)]


def is_by_choice(params: SamplingParams) -> bool:
    """Whether the target's token at each node is fixed, so that acceptance is a walk down the tree."""
    return params.is_greedy or params.acceptance_method == "gumbel_coupled"


def choose(
    tree: TokenTree, logits: Float[Tensor, "nodes vocab"], sampler: Sampler, root_position: int
) -> Int[Tensor, " nodes"]:
    """The target's token at each node: the likeliest, or the Gumbel-max sample. Does not wait for the device."""
    if sampler.params.is_greedy:
        return highest(logits)
    noise = sampler.noise(root_position + 1, tree.max_depth + 1)  # all nodes of one depth share a position
    return highest(sampler.log_probs(logits) + noise[tree.depths])


def accept_by_choice(tree: TokenTree, choices: Int[Tensor, " nodes"]) -> Accepted:
    """Walk from the root along the target's choices. Waits for the device only for one small copy."""
    tokens, parents, chosen = torch.stack([tree.tokens, tree.parents, choices]).tolist()
    return walk(tokens, parents, chosen)


def walk(tokens: list[int], parents: list[int], chosen: list[int]) -> Accepted:
    """Starting at the root, go to the child that is the chosen token, as long as there is one. Runs on the host."""
    child_of: dict[tuple[int, int], int] = {}
    for node in range(len(tokens) - 1, 0, -1):  # among equal siblings the first wins
        child_of[parents[node], tokens[node]] = node
    path: list[int] = []
    node = 0
    while (child := child_of.get((node, chosen[node]))) is not None:
        path.append(child)
        node = child
    return _accepted(tokens, parents, path, chosen[node])


def accept_by_rejection(
    tree: TokenTree, probs: Float[Tensor, "nodes vocab"], sampler: Sampler, root_position: int
) -> Accepted:
    """Speculative sampling (arXiv 2211.17192) along a tree, siblings in order (arXiv 2305.09781).

    Children of one node must be independent draws from that node's `draft_probs`, or distinct deterministic proposals.
    A child whose `draft_probs` are not a distribution (NaN, negative, or a sum other than 1) is tested as a
    deterministic proposal, which is exact whatever the child was drawn from. Waits for the device once per tested
    child.
    """
    q_of = tree.draft_probs
    is_drawn = torch.zeros_like(tree.tokens) if q_of is None else _are_distributions(q_of).to(tree.tokens)
    tokens, parents, depths, drawn = torch.stack([tree.tokens, tree.parents, tree.depths, is_drawn]).tolist()
    children: list[list[int]] = [[] for _ in tokens]
    for node in range(1, len(tokens)):
        children[parents[node]].append(node)
    path: list[int] = []
    node = 0
    while True:
        position = root_position + depths[node] + 1
        p = probs[node].double()
        tests = sampler.uniform(STREAM_TEST, position, max(1, len(children[node])))
        accepted = None
        for test, child in zip(tests, children[node], strict=False):
            token = tokens[child]
            q = q_of[child].double() if q_of is not None and drawn[child] else None
            q_token = 1.0 if q is None else q[token]
            if bool(test * q_token < p[token]):
                accepted = child
                break
            if q is None:
                p = p.clone()
                p[token] = 0.0
            else:
                p = (p - q).clamp(min=0.0)
            p = p / p.sum().clamp(min=1e-300)
        if accepted is None:
            noise = gumbel(sampler.uniform(STREAM_RESIDUAL, position, p.shape[0]))
            return _accepted(tokens, parents, path, int(highest(p.log() + noise)))
        path.append(accepted)
        node = accepted


def _are_distributions(probs: Float[Tensor, "nodes vocab"]) -> Bool[Tensor, " nodes"]:
    """Whether each row can be a distribution; float32 rounding stays far below the tolerance. NaN fails both
    comparisons."""
    return (probs.amin(dim=-1) >= 0) & ((probs.sum(dim=-1) - 1).abs() < _SUM_TOLERANCE)


def accept_typical(
    tree: TokenTree, log_p: Float[Tensor, "nodes vocab"], sampler: Sampler, root_position: int
) -> Accepted:
    """Typical acceptance (Medusa, arXiv 2401.10774): lossy, the text need not follow the target's distribution.

    A child x is typical if p(x) > min(epsilon, delta * exp(-H(p))), where p is its parent's distribution and H the
    entropy in nats: where the target is unsure, the threshold is lower. The longest path of typical tokens wins; among
    equally long ones, the likeliest. The next token is the target's Gumbel-max sample with the noise of its position,
    so the text is a function of seed, drafter and tree. Waits for the device only for two small copies.
    """
    params = sampler.params
    entropy = torch.special.entr(log_p.exp()).sum(dim=-1)
    threshold = (params.typical_delta * (-entropy).exp()).clamp(max=params.typical_epsilon)
    parent_of = tree.parents.clamp(min=0)  # the root's row is never read
    gain = log_p[parent_of, tree.tokens]
    gain = gain.masked_fill(gain.exp() <= threshold[parent_of], -torch.inf)
    rows = torch.stack([tree.tokens.double(), tree.parents.double(), tree.depths.double(), gain.double()]).tolist()
    tokens, parents, depths = (list(map(int, row)) for row in rows[:3])
    scores, best = [0.0], 0
    for node in range(1, len(tokens)):
        scores.append(scores[parents[node]] + rows[3][node])
        if scores[node] > -torch.inf and (depths[node], scores[node]) > (depths[best], scores[best]):
            best = node
    path: list[int] = []
    node = best
    while node:
        path.insert(0, node)
        node = parents[node]
    noise = sampler.noise(root_position + depths[best] + 1, 1)[0]
    return _accepted(tokens, parents, path, int(highest(log_p[best] + noise)))


def _accepted(tokens: list[int], parents: list[int], path: list[int], next_token: int) -> Accepted:
    kept = set(path)
    rejected = [tokens[node] for node, parent in enumerate(parents) if parent >= 0 and node not in kept]
    return Accepted(path, [tokens[node] for node in path], next_token, rejected)
