"""Configuration of `pipelines.prune`. Torch-free."""

from typing import Annotated

from pydantic import Field, model_validator

from moray.config import Config
from moray.drafters.configs import IndependentConfig
from moray.targets.spec import TargetConfig


class PruneConfig(Config):
    """The target to prune, the shape of the result, and the chats that importance is measured on."""

    target: TargetConfig
    drafter: IndependentConfig
    """Shape of the result: a drafter of type independent, in no dimension larger than the target."""
    activations: str
    """Folder of an activation cache of this target; only the text of its chats is read."""
    output: str
    """Folder to write the drafter to."""
    num_chats: int = Field(default=64, ge=1)
    """Number of chats by which importance is measured."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    """Layers to keep, ascending; null keeps the last one and those that change their input most."""

    @model_validator(mode="after")
    def _check(self) -> "PruneConfig":
        if self.layers is None:
            return self
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers is {list(self.layers)}; give them in ascending order, each once")
        if len(self.layers) != self.drafter.num_layers:
            raise ValueError(
                f"layers has {len(self.layers)} numbers, drafter.num_layers is {self.drafter.num_layers}: give as many"
            )
        return self
