"""How checkpoints are validated while a drafter trains. Torch-free."""

import math

from pydantic import Field, model_validator

from moray.config import Config


class ValidationConfig(Config):
    """Held-out chats that every checkpoint drafts for, beside training and never in its way."""

    chats: str
    """File, folder or glob pattern of held-out chats, none of them trained on."""
    max_chats: int = Field(default=32, ge=1)
    """Most chats that are read for validation."""
    max_new_tokens: int = Field(default=64, ge=2)
    """Most tokens of an answer."""
    depth: int = Field(default=5, ge=1, le=32)
    """Tokens of the chains that are drafted; a drafter of fewer levels drafts fewer."""
    every_checkpoints: int | None = Field(default=1, ge=1)
    """Validate every n-th checkpoint, and always the last; null for the last alone. With null it runs when the workers
    have gone and their CPUs and GPUs are free."""
    cpus: float = Field(default=1.0, gt=0)
    """Logical CPUs of the validator."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of the validator; 0 runs target and drafter on the CPU."""
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
