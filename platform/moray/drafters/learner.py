"""What training needs of a drafter, or of anything else that learns from the target's cached activations.

A learner sees whole chats with the target's taps, and predicts at every position. `distill` trains it; it knows the
target's sizes and frozen head, never the target itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moray.batch import TapNeeds, TrainBatch
from moray.drafters.common.vocabulary import DraftVocabulary
from moray.drafters.config_base import DrafterConfigBase
from moray.targets.head import TargetHead


@dataclass(frozen=True)
class DraftView:
    """How much of each training sequence counts as verified (see `distill.masks`)."""

    start: Int[Tensor, "batch seq"]
    """Latest verified position <= i."""
    staircase: Bool[Tensor, " batch"] | None
    """Sequences whose self-attention must not look further back than `start`; None for no sequence."""
    seed: int = 0
    """Seed for random numbers that a drafter draws itself in this step, such as noise on features."""
    layer_counts: tuple[int, ...] | None = None
    """For each sequence, which of the drafter's values of N it trains; None: the first N for all. Known on the host,
    because sequences with the same N go through the same layers together."""
    progress: float = 1.0
    """Share of the run's updates that are done."""


@dataclass(frozen=True)
class Prediction:
    """A drafter's prediction of the token after every position of a training batch."""

    hidden: Float[Tensor, "batch seq hidden"]
    """Input of `project`."""
    start: Int[Tensor, "batch seq"]
    """Last verified position that the prediction was made from; i itself if there is none."""
    project: Callable[..., Float[Tensor, "rows draft"]]
    """project(rows of hidden, *trained): logits over the draft vocabulary."""
    weight: float = 1.0
    """Weight of its losses."""
    trained: tuple[Tensor, ...] = ()
    """The trainable weights that `project` reads; the loss takes their gradients."""

    def score(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft"]:
        """Logits over the draft vocabulary."""
        return self.project(hidden, *self.trained)


class Feature(NamedTuple):
    """A hidden state of the target that a drafter predicts."""

    predicted: Float[Tensor, "batch seq hidden"]
    scale: float | Float[Tensor, ""]
    """Its loss is taken in this unit: the rms of the feature."""
    weight: float | Float[Tensor, " batch"]
    """Weight of its loss in each sequence: 0 where it is not predicted; over all depths, the weights of a sequence add
    up to 1."""


@dataclass(frozen=True)
class DraftOutput:
    """Everything a drafter predicts in one training pass."""

    predictions: tuple[Prediction, ...]
    features: dict[int, Feature] = field(default_factory=dict)
    """By depth."""
    penalty: Float[Tensor, ""] | None = None
    """What is added to the losses of the predictions, which are sums over positions."""


Block = TypeVar("Block")
"""Return type of a block of layers."""


class Learner(nn.Module, ABC):
    """Something that is trained on the target's activations."""

    def __init__(self, config: DrafterConfigBase, head: TargetHead) -> None:
        super().__init__()
        self.config = config
        self.head = head  # frozen, and not an nn.Module: never trained, moved or saved with the learner
        self.spec = head.spec
        self.vocabulary = DraftVocabulary(head, config.num_draft_tokens)
        self.recomputes = False
        """In training, keep only the inputs of each block of layers and recompute the rest in the backward pass."""

    @property
    @abstractmethod
    def needs(self) -> TapNeeds:
        """Taps that `forward` reads, and those that the losses compare with; a drafter's `observe` reads some of them
        too."""

    @abstractmethod
    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        """Predict the target's features and tokens at every position, all positions in parallel."""

    def run_block(self, block: Callable[..., Block], *inputs: Any) -> Block:
        """Run a block of `forward`; if the drafter `recomputes`, its activations are not kept."""
        if not self.recomputes or not torch.is_grad_enabled():
            return block(*inputs)
        return cast("Block", checkpoint(block, *inputs, use_reentrant=False))

    def set_scale(self, hidden_rms: Mapping[int, float]) -> None:
        """Set the sizes of the target's features from the cache's statistics; called once, before training."""

    def choose_vocabulary(self, counts: Int[Tensor, " vocab"]) -> None:
        """Choose the draft vocabulary from the token counts of the cache's responses; called once, before training."""
        self.vocabulary.choose(counts)

    def load_target_layers(self, layers: Sequence[Callable[[str], Tensor]], final_norm: Tensor) -> None:
        """Start from layers of the target, each a function that reads a tensor of it by its Hugging Face name, and from
        its final norm. Only drafters whose configuration has `sizes_for_target_layers` can."""
        raise NotImplementedError

    @property
    def num_parameters(self) -> int:
        """Trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
