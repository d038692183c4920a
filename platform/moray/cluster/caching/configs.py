"""How a cache is made in parallel. Imports neither ray nor torch."""

from pydantic import Field

from moray.config import Config


class CaptureConfig(Config):
    """How the cache is made in parallel."""

    num_tokenisers: int = Field(default=1, ge=1)
    """Processes that read and tokenise chats."""
    num_targets: int = Field(default=1, ge=1)
    """Target replicas, one actor each."""
    cpus_per_target: float = Field(default=1.0, gt=0)
    """Logical CPUs of each target replica."""
    gpus_per_target: float = Field(default=0.0, ge=0)
    """GPUs of each target replica; 0 runs it on the CPU."""
    threads_per_target: int = Field(default=1, ge=1)
    """Number of torch threads of each target replica."""
