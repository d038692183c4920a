"""Configuration of what is done with a cache once it is there: verify, statistics, compaction. Torch-free."""

from pydantic import Field

from moray.config import Config


class VerifyConfig(Config):
    """How closely a cache is looked at. Every shard is hashed in any case."""

    sample_chats: int = Field(default=0, ge=0)
    """Chats that are run through the target again and compared column by column; 0 for none."""
    seed: int = 0
    """Seed that chooses the sampled chats: the same seed, the same chats."""
    max_error: float | None = Field(default=None, gt=0)
    """Largest relative rms error of a column; null for 0.02 at 16 or 32 bits, 0.08 at 8, 0.3 below."""
    threads: int = Field(default=8, ge=1)
    """Shards that are read at once, 8 MiB of each in memory."""
    repair: bool = False
    """Un-commit what is damaged, so that the caching command makes it again and nothing else."""
