"""Configuration of `pipelines.benchmark cache` and `train`. Torch-free."""

from typing import Literal

from pydantic import Field

from moray.activations.format.schema import CacheConfig, CodecName
from moray.config import Config
from moray.data.ultrachat import ChatsConfig
from moray.targets.spec import TargetConfig


class CacheBenchmarkConfig(Config):
    """The target, chats and codecs to measure caching with."""

    target: TargetConfig
    chats: ChatsConfig
    cache: CacheConfig = CacheConfig()
    codecs: tuple[tuple[CodecName, CodecName], ...] = Field(default=(("bfloat16", "bfloat16"),), min_length=1)
    """Pairs of number formats (keys and values, hidden states), each pair measured separately."""
    train_batch_tokens: int = Field(default=4096, ge=16)
    """Maximum number of tokens, padding included, in a training batch that is read back."""
    threads: int = Field(default=1, ge=1)
    """Number of torch threads per target."""
    folder: str | None = None
    """Folder for the temporary caches; null for the system's temporary folder."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


class TrainBenchmarkConfig(Config):
    """The drafters and caches to measure training with, and the baselines to compare with."""

    target: TargetConfig
    runs: tuple[str, ...] = Field(min_length=1)
    """YAML files of pipelines.distill, one per drafter; their caches must exist."""
    updates: int = Field(default=12, ge=2)
    """Optimiser updates per way to train and round."""
    rounds: int = Field(default=5, ge=1)
    """Number of rounds in which all ways to train take turns; the median counts."""
    recipe: bool = True
    """Also measure the published recipe, if the drafter is of type moa with target_layers=0."""
    threads: int = Field(default=1, ge=1)
    """Number of torch threads per worker."""
    workers: int = Field(default=2, ge=1)
    """Number of workers that train together when the whole machine is measured."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of the computation."""
    peak_flops: float | None = Field(default=None, gt=0)
    """Peak FLOP per second of the device in this precision, to compute MFU; null to leave MFU out."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""
