"""Chooses the nodes of a draft tree that go on at layer K of a sparse target (SpaDec); the others are dropped.

A sparse target reads a layer if any node runs through it, so every node costs weights. A dropped node counts as never
drafted: the kept nodes form a tree with the same root, and each of them computes exactly what it would compute in the
whole tree. So the text does not depend on the selection, as long as nodes are proposals that the target's choice either
equals or not; with the rule of rejection, dropping by a sampled token would bend the distribution, so it is refused.

    p           probability that a node is accepted, by the target's `Predictor`
    trie        drops the nodes below the tree's mean p, with everything under them
    path        the path of `trie`'s tree that maximises V(n) = p(n) g(depth) + max V(child), as published
    budget      the nodes that give the most expected tokens per layer read
    drafter     `path` with the drafter's own probabilities in place of p: what SpaDec has to beat
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from moray.decoding.engine.config import NodeSelection
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.accept import Accepted, is_by_choice
from moray.errors import ConfigError, DataError
from moray.targets.model import Target, TargetOutput
from moray.targets.sparse.predictor import PREDICTOR, Predictor
from moray.targets.sparse.target import SparseTarget
from moray.trees.tree import TokenTree, structure_of


def likely_nodes(probabilities: Sequence[float], parents: Sequence[int]) -> list[int]:
    """The root, and the nodes at or above the mean of all probabilities whose parents are kept too."""
    mean = sum(probabilities) / len(probabilities)
    kept = {0}
    for node in range(1, len(parents)):
        if parents[node] in kept and probabilities[node] >= mean:
            kept.add(node)
    return sorted(kept)


def depth_weight(depth: int) -> float:
    """g(depth): how much a node at this depth is worth; published."""
    return math.log(depth + 1) if depth < 3 else 1.0 / math.cosh(depth - 3)


def best_path(probabilities: Sequence[float], parents: Sequence[int], nodes: Sequence[int]) -> tuple[list[int], float]:
    """The path from the root through some of the nodes, root included, that is worth most, and V(root)."""
    depths = _depths(parents)
    value = {node: probabilities[node] * depth_weight(depths[node]) for node in nodes}
    best_child: dict[int, int] = {}
    for node in reversed(nodes):  # children come after their parents
        if node in best_child:
            value[node] += value[best_child[node]]
        above = parents[node]
        if node and (above not in best_child or value[node] >= value[best_child[above]]):
            best_child[above] = node
    path = [0]
    while path[-1] in best_child:
        path.append(best_child[path[-1]])
    return path, value[0]


def best_budget(
    probabilities: Sequence[float], parents: Sequence[int], num_before: int, num_after: int, share: float, head: float
) -> list[int]:
    """The likeliest nodes, as many as give the most expected tokens per layer read.

    A layer from K on is read with probability 1 - (1 - share)^nodes: the nodes are taken to choose independently.

    Args:
        probabilities: by node; a child counts for at most its parent's.
        parents: by node.
        num_before: layers before K.
        num_after: layers from K on.
        share: share of the nodes that run through one of these.
        head: cost of the vocabulary projection, in layers.
    """
    reach = [1.0]
    for node in range(1, len(parents)):
        reach.append(min(probabilities[node], reach[parents[node]]))
    order = sorted(range(len(reach)), key=lambda node: -reach[node])  # stable: parents stay before their children
    expected = accumulate(reach[node] for node in order)
    rates = [
        tokens / (num_before + head + num_after * (1.0 - (1.0 - share) ** count))
        for count, tokens in enumerate(expected, start=1)
    ]
    return sorted(order[: 1 + rates.index(max(rates))])


def subtree(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """The tree of some of the nodes, renumbered.

    Raises:
        AssertionError: the root or a kept node's parent is missing.
    """
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    place = {node: index for index, node in enumerate(nodes)}
    assert nodes[0] == 0 and all(parents[node] in place for node in nodes[1:]), "a kept node has no way to the root"  # noqa: PT018
    device = tree.tokens.device
    kept_depths = [depths[node] for node in nodes]
    structure = structure_of([place.get(parents[node], -1) for node in nodes], kept_depths, device)
    index = torch.tensor(list(nodes), device=device)
    deepest = max(kept_depths)
    return TokenTree(
        tree.tokens[index],
        structure.parents,
        structure.depths,
        structure.ancestors,
        deepest,
        draft_probs=None if tree.draft_probs is None else tree.draft_probs[index],
        is_chain=tree.is_chain,
        scores=None if tree.scores is None else tree.scores[index],
        num_empty_levels=tree.num_levels - deepest,
    )


def check_selectable(params: SamplingParams, selector: "NodeSelector | None") -> None:
    """Refuse a rule of acceptance under which dropping nodes would change the text.

    Raises:
        DataError: names the rule.
    """
    if selector is not None and not is_by_choice(params):
        raise DataError(
            f"acceptance_method is '{params.acceptance_method}', but this target drops nodes of drafts on the way "
            "(engine.select): 'gumbel_coupled' is accepted, and temperature 0"
        )


@dataclass(frozen=True)
class Judged:
    """What the rule of acceptance gets to see of the drafts of a pass."""

    trees: list[TokenTree]
    last: Float[Tensor, "rows nodes hidden"]
    """The target's final hidden states at their nodes."""
    nodes: list[int] | None
    """Where the only tree's nodes are in its draft; None if nothing was dropped."""

    def in_drafts(self, results: list[Accepted]) -> list[Accepted]:
        """The same results with paths through the drafts."""
        if self.nodes is None:
            return results
        return [replace(result, path=[self.nodes[node] for node in result.path]) for result in results]


def judged_part(trees: list[TokenTree], output: TargetOutput) -> Judged:
    """The trees without the nodes that were dropped."""
    nodes = output.selected
    if nodes is None:
        return Judged(trees, output.last, None)
    return Judged([subtree(trees[0], nodes)], output.last[:, nodes], nodes)


class NodeSelector:
    """Selects nodes at layer K. One per engine."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def choose(self, tree: TokenTree, hidden: Float[Tensor, "nodes hidden"]) -> list[int]:
        """The nodes to keep, in order: the root, and no node without its parent.

        Args:
            tree: at least two nodes.
            hidden: what enters layer K.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class _Sizes:
    """What `budget` needs to know of the target."""

    num_layers: int
    share: float
    head: float


class PredictedNodes(NodeSelector):
    """Selects by the target's predictor, or by the drafter's scores."""

    def __init__(self, select: NodeSelection, predictor: Predictor, sizes: _Sizes) -> None:
        super().__init__(predictor.layer)
        self._select, self._predictor, self._sizes = select, predictor, sizes

    def choose(self, tree: TokenTree, hidden: Float[Tensor, "nodes hidden"]) -> list[int]:
        """See `NodeSelector.choose`."""
        parents = tree.parents.tolist()
        if self._select == "drafter" and tree.scores is not None:
            probabilities = tree.scores.exp().tolist()
        else:
            probabilities = self._predictor.probabilities(hidden)
        if self._select == "budget":
            sizes = self._sizes
            after = sizes.num_layers - self.layer
            return best_budget(probabilities, parents, self.layer, after, sizes.share, sizes.head)
        nodes = likely_nodes(probabilities, parents)
        return nodes if self._select == "trie" else best_path(probabilities, parents, nodes)[0]


def selector_of(target: Target, select: NodeSelection, field: str = "engine.select") -> NodeSelector | None:
    """The selector of a target; None to keep all nodes.

    Raises:
        ConfigError: the target is not sparse, or has no predictor.
    """
    if select == "all":
        return None
    routing = target.spec.routing
    if routing is None or not isinstance(target, SparseTarget):
        raise ConfigError(f"{field} is '{select}', which is for sparse targets; this one is dense: give {field}=all")
    spec, predictor = target.spec, target.predictor
    if predictor is None:
        raise ConfigError(
            f"{field} is '{select}', but there is no {PREDICTOR} in the target's folder: train one with `python -m "
            f"pipelines.sparsify predictor`, or give {field}=all"
        )
    after = [layer in target.routers for layer in range(predictor.layer, spec.num_layers)]
    routed = len(routing.routed_layers(spec.num_layers))
    own = (routing.share * spec.num_layers - (spec.num_layers - routed)) / routed
    share = (sum(after) * own + after.count(False)) / len(after)
    model: Any = target.model
    head = model.lm_head.weight.numel() / sum(weight.numel() for weight in model.model.layers[0].parameters())
    return PredictedNodes(select, predictor, _Sizes(spec.num_layers, share, head))


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths
