"""What the passes of a target cost: weights read, and products of a weight and a token.

Attention over earlier tokens is left out: it grows with the context, and is small beside the weights for the contexts
that are measured.
"""

from dataclasses import dataclass
from typing import Any

from moray.targets.model import Target
from moray.targets.sparse.target import PassCounts, SparseTarget


@dataclass(frozen=True)
class Weights:
    """Numbers of weights of a target's parts."""

    layer: int
    """Of one layer."""
    head: int
    """Of the `lm_head`."""
    routers: int
    """Of all routers; 0 for a dense target."""
    num_layers: int

    @classmethod
    def of(cls, target: Target) -> "Weights":
        """Count a target's weights."""
        model: Any = target.model
        routers = target.routers.values() if isinstance(target, SparseTarget) else ()
        return cls(
            layer=_count(model.model.layers[0]),
            head=model.lm_head.weight.numel(),
            routers=sum(_count(router) for router in routers),
            num_layers=target.spec.num_layers,
        )

    @property
    def total(self) -> int:
        """Of a pass that runs all layers, without routers."""
        return self.num_layers * self.layer + self.head

    def read(self, counts: PassCounts) -> float:
        """Mean number of weights that a pass reads."""
        return counts.layers_read * self.num_layers * self.layer + self.routers + self.head

    def products(self, counts: PassCounts) -> float:
        """Products of a weight and a token, over all passes."""
        return counts.num_rows_run * self.layer + counts.num_tokens * self.routers + counts.num_kept * self.head


def _count(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters())
