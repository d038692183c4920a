"""How checkpoints are validated while a drafter trains. Torch-free."""

from pydantic import Field

from moray.config import Config


class ValidationConfig(Config):
    """Held-out chats that every checkpoint drafts for, beside training and never in its way."""

    chats: str
    """File, folder or glob of chats, as for pipelines.cache_activations; others than those that are trained on."""
    max_chats: int = Field(default=32, ge=1)
    max_new_tokens: int = Field(default=64, ge=2)
    """Most tokens of an answer."""
    depth: int = Field(default=5, ge=1, le=32)
    """Of the chains that are drafted; a drafter of fewer levels drafts those."""
    every_checkpoints: int | None = Field(default=1, ge=1)
    """Validate every n-th checkpoint. The last one is validated in any case; None validates it alone, when the
    workers have gone and their CPUs and GPUs are free."""
    cpus: float = Field(default=1.0, gt=0)
    """Logical CPUs of the validator."""
    gpus: float = Field(default=0.0, ge=0)
    """Its GPUs; 0 runs target and drafter on the CPU."""
    threads: int = Field(default=1, ge=1)
    """torch threads."""
