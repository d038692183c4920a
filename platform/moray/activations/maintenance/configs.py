"""Configures the verification of a cache. Torch-free."""

from pydantic import Field

from moray.config import Config


class VerifyConfig(Config):
    """Optional checks of a cache. Every shard is hashed in any case."""

    sample_chats: int = Field(default=0, ge=0)
    """Number of chats to run through the target again and compare column by column; 0 for none."""
    seed: int = 0
    """Seed that selects the sampled chats; the same seed selects the same chats."""
    max_error: float | None = Field(default=None, gt=0)
    """Maximum relative RMS error of a column; null for 0.02 at 16 or 32 bits, 0.08 at 8, 0.3 below."""
    threads: int = Field(default=8, ge=1)
    """Number of files to read in parallel, each with 8 MiB in memory."""
    repair: bool = False
    """Uncommit damaged shards and parts, so that the caching command rewrites only these."""
