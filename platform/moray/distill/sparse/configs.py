"""What a sparse target is trained to be. Torch-free."""

from typing import Literal

from pydantic import Field, model_validator

from moray.drafters.config_base import DrafterConfigBase
from moray.targets.spec import RoutingSpec


class SparseConfig(DrafterConfigBase):
    """Routers and low-rank changes of a target (D-LLM, NeurIPS 2024); the defaults are the published ones."""

    first_layer: int = Field(default=2, ge=0)
    """First layer with a router; those before it run for every token."""
    last_layers: int = Field(default=0, ge=0)
    """How many of the last layers run for every token. A drafter that runs the target's last N layers needs N."""
    router_size: int = Field(default=512, ge=1)
    """Inner width of a router, in elements."""
    router_bits: int | None = Field(default=None, ge=1, le=8)
    """Bits of the codes that routers read in place of hidden states (SpaDec: 4); null for hidden states."""
    initial_tokens: int = Field(default=2, ge=1)
    """The first tokens of a sequence run through every layer, so that no layer is ever without keys."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Mean share of all layers that a token should run through, those without routers included."""
    share_per: Literal["token", "batch"] = "token"
    """Which share the loss compares with `share`: each token's, as published, or the mean of a batch.
    With batch, some tokens may run through more layers than others."""
    share_weight: float = Field(default=5.0, ge=0)
    """Weight of the absolute difference from `share` in the loss. It rises from 0 to this value over the run, along a
    quarter of a sine wave."""
    noise_decay_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the updates in which the routers' noise falls to 0; null keeps it, as published.
    After that, training takes the likelier decision, as decoding does."""
    calibration_chats: int = Field(default=8, ge=0)
    """Chats of the cache on which routers are shifted until `share` is met; 0 leaves them as trained."""
    ce_weight: float = Field(default=0.0, ge=0)
    """Weight of the cross-entropy of the chats' own responses; 0 leaves it out. Published: 1, without losses.kl."""
    lora_rank: int = Field(default=8, ge=0)
    """Rank of the changes of the query, key and value projections of every layer; 0 for none."""
    lora_dropout: float = Field(default=0.05, ge=0, lt=1)
    """Share of the outputs of these changes that training leaves out."""
    has_routers: bool = True
    """Whether to train routers; false trains the low-rank changes alone, as a baseline."""
    dropped_layers: tuple[int, ...] = ()
    """Layers that no token runs through, a baseline without routers; none by default."""

    @model_validator(mode="after")
    def _check(self) -> "SparseConfig":
        if self.dropped_layers and self.has_routers:
            raise ValueError("dropped_layers is a baseline without routers: give has_routers=false too")
        if not self.has_routers and not self.lora_rank:
            raise ValueError("has_routers is false and lora_rank is 0: there is nothing to train")
        return self

    def implementation(self) -> tuple[str, str]:
        return "moray.distill.sparse.learner", "SparseLearner"

    @property
    def routing(self) -> RoutingSpec:
        """The part that the sparse target keeps."""
        return RoutingSpec(
            first_layer=self.first_layer,
            last_layers=self.last_layers,
            router_size=self.router_size,
            router_bits=self.router_bits,
            initial_tokens=self.initial_tokens,
            share=self.share,
        )
