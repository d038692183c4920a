"""Configuration of sweeps over sparse targets. Torch-free."""

from pathlib import Path

from pydantic import Field, model_validator

from moray.cluster.configs import RayConfig
from moray.cluster.training.configs import SparsifyConfig
from moray.config import Config, load_config
from moray.errors import ConfigError
from sweeps.tuning.configs import GridSearch, RandomSearch, check_space
from sweeps.tuning.spaces import Choices, Space, overrides

_OWN_KEYS = {
    "output": "every trial has a folder of its own below the sweep's output",
    "activations": "all trials read one cache: name it in sparsify",
    "source": "all trials read one cache",
    "ray": "it belongs to the sweep",
    "target": "all trials start from one target",
    "workers": "they say how much room a trial takes, which is the same for all",
    "trackers": "they are the same for all trials: name them in sparsify",
}


class SparseQualityConfig(Config):
    """How the sparse target of a trial is compared with the dense one: one pass over each held-out chat."""

    chats: str
    """Held-out chats: a file of JSON rows or Parquet."""
    skip_chats: int = Field(default=0, ge=0)
    """Chats to leave out at the beginning of the file, because the trials are trained on them."""
    max_chats: int | None = Field(default=64, ge=1)
    """Number of chats to read after those; null for all."""
    max_length: int = Field(default=1024, ge=16)
    """Maximum tokens of a chat; longer ones are cut."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    cpus: float = Field(default=1.0, gt=0)
    """Logical CPUs of the measuring task."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of the measuring task; 0 runs it on the CPU."""


class SparseSweepConfig(Config):
    """The sparse targets to train, and how to compare them."""

    sparsify: tuple[str, ...] = Field(min_length=1)
    """Arguments of pipelines.sparsify that all trials share: YAML files, then overrides."""
    space: Space = Field(min_length=1)
    """Values to try, as lists or ranges, by the dotted name of a key of pipelines.sparsify."""
    search: GridSearch | RandomSearch = Field(default=GridSearch(type="grid"), discriminator="type")
    """How trials are chosen: all combinations (grid), or at random. No trial is best: fewer layers cost quality."""
    quality: SparseQualityConfig
    max_concurrent: int | None = Field(default=None, ge=1)
    """Maximum parallel trials; null for as many as fit on the machine or cluster."""
    max_failures: int = Field(default=2, ge=0)
    """How often a trial is retried if its process dies; 0 for never."""
    output: str
    """Folder of the sweep: its trials, each with its sparse target, summary and report."""
    resume: bool = False
    """Resume the sweep in output, the same as --resume."""
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _check(self) -> "SparseSweepConfig":
        check_space(self.space, self.search, _OWN_KEYS)
        return self

    def trial(self, choices: Choices, output: str = "") -> SparsifyConfig:
        """The training of a trial.

        Raises:
            ConfigError: pipelines.sparsify does not accept a key or value of the space.
        """
        folder = output or str(Path(self.output) / "trials" / "any")
        try:
            return load_config(SparsifyConfig, [*self.sparsify, *overrides(choices), f"output={folder}"])
        except ConfigError as error:
            where = f"with {', '.join(overrides(choices))}: " if choices else ""
            raise ConfigError(f"sparsify and space, {where}{error}") from None
