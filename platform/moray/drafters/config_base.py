"""What the configurations of drafters have in common. Packages with their own drafters build on this module.

Torch-free, so that a misspelt key is reported before torch is loaded; each configuration names the module that builds
its drafter.
"""

import importlib
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from moray.config import Config

if TYPE_CHECKING:
    from moray.drafters.base import Drafter
    from moray.targets.head import TargetHead
    from moray.targets.spec import TargetSpec


class BlockConfig(Config):
    """Sizes of one decoder layer of a drafter."""

    num_heads: int = Field(ge=1)
    """Number of query heads."""
    num_kv_heads: int = Field(ge=1)
    """Number of key/value heads; must divide num_heads."""
    intermediate_size: int = Field(ge=1)
    """Inner width of the MLP, in elements."""

    @model_validator(mode="after")
    def _check(self) -> "BlockConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self

    def sizes_for(self, spec: "TargetSpec") -> dict[str, tuple[int, int]]:
        """By key of `layer`, each size as it is and as it is in the target."""
        return {
            "layer.num_heads": (self.num_heads, spec.num_heads),
            "layer.num_kv_heads": (self.num_kv_heads, spec.num_kv_heads),
            "layer.intermediate_size": (self.intermediate_size, spec.intermediate_size),
        }


class DrafterConfigBase(Config):
    """What all drafters' configurations have in common."""

    has_weights: ClassVar[bool] = True
    """Whether the drafter has weights and computations that are worth a process of their own."""

    def build(self, head: "TargetHead") -> "Drafter":
        """A newly initialised drafter for the target that `head` belongs to."""
        module_name, class_name = self.implementation()
        return getattr(importlib.import_module(module_name), class_name)(self, head)

    def implementation(self) -> tuple[str, str]:
        """Module and class of the drafter."""
        raise NotImplementedError

    @property
    def num_target_layers(self) -> int:
        """How many of the target's last layers the drafter runs itself."""
        return 0

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Numbers of target layers that a draft step can use, cheapest first; one is chosen in every cycle. Most
        drafters have one."""
        return (self.num_target_layers,)

    @property
    def max_depth(self) -> int | None:
        """Maximum number of levels that the drafter can draft; None for no limit."""
        return None

    @property
    def verified_period(self) -> tuple[int, int] | None:
        """Bounds low, high of the period P in T-step training: every P-th response position counts as verified, P
        uniform over low..high-1. None: every position is predicted from the one before it."""
        return None

    @property
    def num_draft_tokens(self) -> int | None:
        """How many of the target's tokens the drafter may propose; None for all."""
        return None

    @property
    def predicts_features(self) -> bool:
        """Whether it predicts hidden states of the target, for the loss `losses.feature`."""
        return False

    def sizes_for_target_layers(self, spec: "TargetSpec", num_layers: int) -> dict[str, tuple[int, int]] | None:
        """By key, each size as it is and as it must be for `init.layers` with so many of the target's layers; None for
        drafters that cannot be initialised from them."""
        return None


class TrainableBase(DrafterConfigBase):
    """Drafters that are distilled and score tokens with a vocabulary projection."""

    draft_vocab_size: int | None = Field(default=None, ge=2)
    """Number of tokens that can be proposed, the most frequent in the cache's responses; null for all. With a large
    vocabulary, the projection is most of the cost of a draft step."""

    @property
    def num_draft_tokens(self) -> int | None:
        return self.draft_vocab_size


class LayeredBase(TrainableBase):
    """Trainable drafters made of decoder layers."""

    norm_init: Literal["ones", "normal"] = "ones"
    """Initial RMSNorm weights: ones, or normal, drawn from N(0, 0.02) as in MoA's code, which lowers tau."""


class ReadyBase(DrafterConfigBase):
    """Drafters that need no training."""

    name: str | None = Field(default=None, min_length=1)
    """Name in tables; null for the type. Required to measure two drafters of one type."""
