"""Configuration of checkpoint validation during training. Torch-free."""

import math

from pydantic import Field, model_validator

from moray.config import Config


class ValidationConfig(Config):
    """Validation of checkpoints on held-out chats, in parallel with training and without blocking it."""

    chats: str
    """File, folder or glob pattern of held-out chats; the drafter must not be trained on them."""
    max_chats: int = Field(default=32, ge=1)
    """Maximum number of chats to read for validation."""
    max_new_tokens: int = Field(default=64, ge=2)
    """Maximum number of tokens per answer."""
    depth: int = Field(default=5, ge=1, le=32)
    """Number of tokens per draft chain; capped by what the drafter can draft."""
    every_checkpoints: int | None = Field(default=1, ge=1)
    """Validate every n-th checkpoint and always the last; null for only the last. With null, validation runs after the
    workers have ended and their CPUs and GPUs are free."""
    cpus: float = Field(default=1.0, gt=0)
    """Logical CPUs for the validator."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs for the validator; 0 runs target and drafter on the CPU."""
    threads: int = Field(default=1, ge=1)
    """Number of torch threads of the validator."""

    @model_validator(mode="after")
    def _check(self) -> "ValidationConfig":
        if self.every_checkpoints is not None and self.threads > math.ceil(self.cpus):
            raise ValueError(
                f"threads is {self.threads} but cpus is {self.cpus:g}: beside training, threads without a core of "
                f"their own wait for each other and for the workers; give cpus={self.threads}, fewer threads, or "
                "every_checkpoints=null, which validates when the workers have gone"
            )
        return self
