"""Configures the processes that build a cache. Imports neither ray nor torch."""

from pydantic import Field

from moray.config import Config


class CaptureConfig(Config):
    """Processes that build the cache, and their resources."""

    num_tokenisers: int = Field(default=1, ge=1)
    """Number of processes that read and tokenise chats."""
    num_targets: int = Field(default=1, ge=1)
    """Number of target replicas, one actor each."""
    cpus_per_target: float = Field(default=1.0, gt=0)
    """Logical CPUs of each target replica."""
    gpus_per_target: float = Field(default=0.0, ge=0)
    """GPUs of each target replica; 0 runs it on the CPU."""
    threads_per_target: int = Field(default=1, ge=1)
    """Number of torch threads of each target replica."""
