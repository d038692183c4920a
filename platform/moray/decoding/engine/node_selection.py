"""Selects the nodes of a draft tree that go on at layer K of a sparse target (SpaDec); the others are dropped.

A sparse target reads a layer if any node runs through it, so every node costs weights. A dropped node counts as never
drafted: the kept nodes form a tree with the same root, and each of them computes exactly what it would compute in the
whole tree. So the text does not depend on the selection, as long as a node is accepted if it is the target's own
choice. With another acceptance method, such as rejection, dropping a sampled node would bend the distribution, so it is
refused.

Passes over several sequences select nothing. How nodes are chosen is in `trees.node_choice`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from moray.decoding.engine.config import NodeSelection
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.accept import Accepted, is_by_choice
from moray.errors import ConfigError, DataError
from moray.targets.model import Target, TargetOutput
from moray.targets.sparse.measured import Measured
from moray.targets.sparse.predictor import Predictor, load_predictor
from moray.targets.sparse.target import SparseTarget
from moray.trees.node_choice import PassCost, best_budget, best_path, likely_nodes
from moray.trees.ranking import subtree
from moray.trees.shapes import AdaptiveShape, AnyShape, DynamicShape
from moray.trees.tree import TokenTree


class NodeSelector(ABC):
    """Selects nodes at layer K."""

    def __init__(self, layer: int, *, needs_scores: bool = False) -> None:
        """
        Args:
            layer: K.
            needs_scores: whether trees must have the drafter's scores.
        """
        self.layer = layer
        self.needs_scores = needs_scores

    @abstractmethod
    def choose(self, tree: TokenTree, hidden: Float[Tensor, "nodes hidden"]) -> list[int]:
        """The nodes to keep, in order: the root, and no node without its parent.

        Args:
            tree: at least two nodes.
            hidden: what enters layer K.
        """


class LikelyNodes(NodeSelector):
    """`trie` and `path` (see `trees.node_choice`), by the predictor's probabilities or by the drafter's. By the
    drafter's, a tree without scores, such as a client's, is kept whole."""

    def __init__(self, predictor: Predictor, *, is_path: bool, by_drafter: bool = False) -> None:
        super().__init__(predictor.layer, needs_scores=by_drafter)
        self._predictor, self._is_path = predictor, is_path

    def choose(self, tree: TokenTree, hidden: Float[Tensor, "nodes hidden"]) -> list[int]:
        """See `NodeSelector.choose`. Waits for the device."""
        if self.needs_scores:
            if tree.scores is None:
                return list(range(tree.num_nodes))
            probabilities = tree.scores.exp().tolist()
        else:
            probabilities = self._predictor.probabilities(hidden)
        parents = tree.parents.tolist()
        nodes = likely_nodes(probabilities, parents)
        return best_path(probabilities, parents, tree.depths.tolist(), nodes)[0] if self._is_path else nodes


class BudgetedNodes(NodeSelector):
    """`budget` (see `trees.node_choice`)."""

    def __init__(self, predictor: Predictor, cost: PassCost) -> None:
        super().__init__(predictor.layer)
        self._predictor, self._cost = predictor, cost

    def choose(self, tree: TokenTree, hidden: Float[Tensor, "nodes hidden"]) -> list[int]:
        """See `NodeSelector.choose`. Waits for the device."""
        return best_budget(self._predictor.probabilities(hidden), tree.parents.tolist(), self._cost)


def selector_of(
    target: Target, select: NodeSelection, shape: AnyShape, field: str = "engine.select"
) -> NodeSelector | None:
    """The selector of a target; None to keep all nodes.

    Args:
        target: a sparse one with a predictor, unless all nodes are kept.
        select: which nodes to keep.
        shape: of the drafts.
        field: name of the setting `select`, for errors.

    Raises:
        ConfigError: the target or the shape does not support the selection.
    """
    if select == "all":
        return None
    if not isinstance(target, SparseTarget):
        raise ConfigError(f"{field} is '{select}', which is for sparse targets; this one is dense: give {field}=all")
    predictor = load_predictor(target.folder, target.spec, field).to(target.device)
    if select == "budget":
        return BudgetedNodes(predictor, _cost_from(target, predictor.layer))
    has_scores = isinstance(shape, DynamicShape) or (isinstance(shape, AdaptiveShape) and shape.breadth > 1)
    if select == "drafter" and not has_scores:
        raise ConfigError(
            f"{field} is 'drafter', which needs drafts with scores; '{shape.name}' has none: give a dynamic tree, or "
            "an adaptive one with a breadth"
        )
    return LikelyNodes(predictor, is_path=select != "trie", by_drafter=select == "drafter")


def _cost_from(target: SparseTarget, layer: int) -> PassCost:
    spec, measured = target.spec, Measured.read(target.folder, target.spec.fingerprint)
    assert spec.routing is not None
    total = spec.routing.share if measured is None else measured.share
    num_routed = len(target.routers)
    share = (total * spec.num_layers - (spec.num_layers - num_routed)) / num_routed
    after = sum(number >= layer for number in target.routers)
    model: Any = target.model
    head = model.lm_head.weight.numel() / sum(weight.numel() for weight in model.model.layers[0].parameters())
    return PassCost(always=spec.num_layers - after + head, routed=after, share=min(1.0, max(0.0, share)))


def check_selectable(params: SamplingParams, selector: NodeSelector | None) -> None:
    """Refuse an acceptance method with which dropping nodes would change the text.

    Raises:
        DataError: names the method.
    """
    if selector is not None and not is_by_choice(params):
        raise DataError(
            f"acceptance_method is '{params.acceptance_method}', but this target drops nodes of drafts on the way "
            "(engine.select): 'gumbel_coupled' is accepted, and temperature 0"
        )


@dataclass(frozen=True)
class KeptPart:
    """The part of the drafts of a pass that the acceptance method gets to see."""

    trees: list[TokenTree]
    last: Float[Tensor, "rows nodes hidden"]
    """The target's final hidden states at their nodes."""
    nodes: list[int] | None
    """Where the only tree's nodes are in its draft; None if nothing was dropped."""

    def in_drafts(self, results: list[Accepted]) -> list[Accepted]:
        """The same results with paths through the drafts."""
        nodes = self.nodes
        if nodes is None:
            return results
        return [replace(result, path=[nodes[node] for node in result.path]) for result in results]


def kept_part(trees: list[TokenTree], output: TargetOutput) -> KeptPart:
    """The trees without the nodes that were dropped."""
    nodes = output.selected
    if nodes is None:
        return KeptPart(trees, output.last, None)
    (tree,) = trees
    return KeptPart([subtree(tree, nodes, tree.parents.tolist(), tree.depths.tolist())], output.last[:, nodes], nodes)
