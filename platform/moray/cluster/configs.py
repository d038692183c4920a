"""Configuration of everything that runs on Ray. Imports neither ray nor torch."""

from pydantic import Field, model_validator

from moray.activations.ultrachat import ChatsConfig
from moray.config import Config
from moray.distill.configs import LossConfig, Optim, Schedule, SpikeSchedule, TrainConfig
from moray.drafters.configs import TrainableConfig
from moray.targets.spec import TargetConfig


class RayConfig(Config):
    """Which cluster to use."""

    address: str | None = None
    """None: the cluster that started this job (RAY_ADDRESS), else a new one on this machine."""
    num_cpus: int | None = Field(default=None, ge=1)
    """Logical CPUs of a new local cluster; None for the cores plus a few for data tasks."""
    dashboard: bool = False
    """Start the dashboard of a new local cluster."""


class CaptureConfig(Config):
    """How the cache is made in parallel."""

    num_tokenisers: int = Field(default=1, ge=1)
    """Processes that read and tokenise chats."""
    num_targets: int = Field(default=1, ge=1)
    """Target replicas, one actor each."""
    cpus_per_target: float = Field(default=1.0, gt=0)
    gpus_per_target: float = Field(default=0.0, ge=0)
    threads_per_target: int = Field(default=1, ge=1)


class RegenerateConfig(Config):
    """Which chats the target answers anew, and how."""

    target: TargetConfig
    chats: ChatsConfig
    output: str
    """Folder of JSON Lines parts; give it to pipelines.cache_activations as chats.path."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Most tokens of one answer."""
    batch_size: int = Field(default=32, ge=1)
    chats_per_part: int = Field(default=512, ge=1)
    """Chats that are answered and written together: what a kill costs at most."""
    num_targets: int = Field(default=1, ge=1)
    """Target replicas, one actor each."""
    cpus_per_target: float = Field(default=1.0, gt=0)
    gpus_per_target: float = Field(default=0.0, ge=0)
    threads_per_target: int = Field(default=1, ge=1)
    ray: RayConfig = RayConfig()


class WorkersConfig(Config):
    """Ray Train workers of one distillation run."""

    num_workers: int = Field(default=1, ge=1)
    use_gpu: bool = False
    cpus_per_worker: float = Field(default=1.0, gt=0)
    threads_per_worker: int = Field(default=1, ge=1)
    max_failures: int = Field(default=3, ge=0)
    """How often the worker group is restarted from the last checkpoint."""
    prefetch_windows: int = Field(default=2, ge=1)
    """Windows of the cache that Ray Data reads ahead, per worker."""


class DistilConfig(Config):
    """One distillation run."""

    target: TargetConfig
    activations: str
    """Folder or URI of the activation cache."""
    output: str
    """Folder of the drafter, its checkpoints and metrics."""
    drafter: TrainableConfig
    losses: LossConfig = LossConfig()
    optim: Optim
    schedule: Schedule = SpikeSchedule(type="spike")
    train: TrainConfig = TrainConfig()
    workers: WorkersConfig = WorkersConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _check(self) -> "DistilConfig":
        if self.losses.feature and not self.drafter.predicts_features:
            raise ValueError(
                f"losses.feature is {self.losses.feature}, but a drafter of type '{self.drafter.type}' predicts no "
                "features: give losses.feature=0, and losses.kl or losses.acceptance"
            )
        return self
