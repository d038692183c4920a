"""Configuration of every drafter, and the tagged union that is the registry.

Torch-free, so that a misspelt key is answered before torch is loaded; each configuration names the module
that builds it. A variant costs its class here, one module, one YAML.
"""

import importlib
from typing import TYPE_CHECKING, Literal

from pydantic import Field, TypeAdapter, model_validator

from moray.config import Config

if TYPE_CHECKING:
    from moray.drafters.base import Drafter
    from moray.targets.head import TargetHead


class BlockConfig(Config):
    """Sizes of one decoder layer of a drafter."""

    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)

    @model_validator(mode="after")
    def _check(self) -> "BlockConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self


class DrafterConfigBase(Config):
    """What all drafters' configurations have in common."""

    mask_width: tuple[int, int] = (5, 15)
    """T: in training a response position is verified every P tokens, P uniform over low..high-1."""

    @model_validator(mode="after")
    def _check_mask_width(self) -> "DrafterConfigBase":
        low, high = self.mask_width
        if not 2 <= low < high:
            raise ValueError(f"mask_width is {list(self.mask_width)}; needed are two numbers with 2 <= low < high")
        return self

    def build(self, head: "TargetHead") -> "Drafter":
        """A freshly initialised drafter for the target that `head` belongs to."""
        module_name, class_name = self.implementation()
        return getattr(importlib.import_module(module_name), class_name)(self, head)

    def implementation(self) -> tuple[str, str]:
        """Module and class of the drafter."""
        raise NotImplementedError

    @property
    def num_target_layers(self) -> int:
        """How many of the target's last layers the drafter runs itself."""
        return 0


class MoAConfig(DrafterConfigBase):
    """Mixture of Attentions (arXiv 2410.03804)."""

    type: Literal["moa"]
    target_layers: int = Field(default=0, ge=0)
    """N of Target Layer Inference: how many of the target's last layers the drafter runs itself."""
    staircase: bool = True
    """Curriculum on self-attention: early on, some sequences see no token before the last verified one."""
    norm_init: Literal["ones", "normal"] = "ones"
    """"normal" draws RMSNorm weights from N(0, 0.02), as the released code does; it costs tau."""
    layer_self_attention: BlockConfig
    self_attention: BlockConfig
    cross_attention: BlockConfig

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.moa", "MoA"

    @property
    def num_target_layers(self) -> int:
        return self.target_layers


DrafterConfig = MoAConfig
"""The tagged union of all drafters. With one member it is that member; `type` is already its tag."""

DRAFTER_CONFIG: TypeAdapter[DrafterConfig] = TypeAdapter(DrafterConfig)
