"""What `pipelines.benchmark cache` and `train` measure. Torch-free."""

from typing import Literal

from pydantic import Field

from moray.activations.format.schema import CacheConfig, CodecName
from moray.config import Config
from moray.data.ultrachat import ChatsConfig
from moray.targets.spec import TargetConfig


class CacheBenchmarkConfig(Config):
    """Which chats and codecs, on which target."""

    target: TargetConfig
    chats: ChatsConfig
    cache: CacheConfig = CacheConfig()
    codecs: tuple[tuple[CodecName, CodecName], ...] = Field(default=(("bfloat16", "bfloat16"),), min_length=1)
    """Pairs of number formats, of keys and values and of hidden states, each measured by itself."""
    train_batch_tokens: int = Field(default=4096, ge=16)
    """Most tokens, padding included, of a training batch made of what is read."""
    threads: int = Field(default=1, ge=1)
    """Number of torch threads of one target."""
    folder: str | None = None
    """Folder where the caches are written for a while; null for the system's temporary folder."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


class TrainBenchmarkConfig(Config):
    """Which drafters, from which cache, against which other ways to train them."""

    target: TargetConfig
    runs: tuple[str, ...] = Field(min_length=1)
    """YAML files as for pipelines.distill, one per drafter; their caches must exist."""
    updates: int = Field(default=12, ge=2)
    """Optimiser updates of each way to train, in each round."""
    rounds: int = Field(default=5, ge=1)
    """Rounds in which all ways take turns; the median round counts."""
    recipe: bool = True
    """Also measure the published recipe, for drafters of type moa with target_layers=0."""
    threads: int = Field(default=1, ge=1)
    """Number of torch threads of a worker."""
    workers: int = Field(default=2, ge=1)
    """Workers that train together where the whole machine is measured: its cores, or its GPUs."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of the computation."""
    peak_flops: float | None = Field(default=None, gt=0)
    """Peak FLOP per second of the device in this precision, for its used share (MFU); null for none."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""
