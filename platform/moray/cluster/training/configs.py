"""Configuration of training on Ray Train. Imports neither ray nor torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from moray.activations.format.schema import CacheConfig
from moray.bench.validation_config import ValidationConfig
from moray.cluster.caching.configs import CaptureConfig
from moray.cluster.configs import RayConfig
from moray.config import Config
from moray.data.ultrachat import ChatsConfig
from moray.distill.configs import (
    DdpConfig,
    InitialWeights,
    LossConfig,
    Optim,
    Parallel,
    Schedule,
    SpikeSchedule,
    TrainConfig,
)
from moray.distill.sparse.configs import SparseConfig
from moray.distill.tracking.trackers import TrackerConfig
from moray.drafters.config_base import DrafterConfigBase
from moray.drafters.configs import TrainableConfig
from moray.targets.spec import TargetConfig, read_spec

_IDLE_AT_FIRST = (
    "losses.total_variation_start_share is {:g}, and no other loss has a weight: nothing would be trained before; give "
    "losses.kl or {} a weight, or leave total_variation_start_share out"
)


class WorkersConfig(Config):
    """Ray Train workers of one distillation run."""

    num_workers: int | tuple[int, int] = 1
    """Number of workers, or the fewest and the most as [1, 4]: as many train as there is room for. Ray Train takes what
    is free, and more when more gets free. The number may change when a run goes on: the run's data shards are shared
    out anew (see train.gradient_accumulation_steps)."""
    use_gpu: bool = False
    """Train on GPUs; false trains on the CPU."""
    gpus_per_worker: float = Field(default=1.0, gt=0, le=1)
    """GPUs of each worker if use_gpu is true; below 1, several runs of one worker share a GPU. NCCL refuses two workers
    of one run on one GPU."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """Logical CPUs of each worker."""
    threads_per_worker: int = Field(default=1, ge=1)
    """Number of torch threads of each worker."""
    max_failures: int = Field(default=3, ge=0)
    """How often the worker group is restarted from the last checkpoint; 0 for never."""
    prefetch_windows: int = Field(default=2, ge=1)
    """Windows of the cache that are read ahead, per worker."""
    window_mib: int = Field(default=1024, ge=1)
    """Most MiB of the cache that a worker mixes batches from, all its data shards together. Never less than a batch of
    each data shard. The plan of a run keeps it: with half of the workers, each has twice the data shards and holds
    twice as much."""

    @property
    def min_workers(self) -> int:
        """Workers without which training does not start."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        """Maximum number of workers."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def resources(self) -> dict[str, float]:
        """What Ray reserves for each worker."""
        return {"CPU": self.cpus_per_worker} | ({"GPU": self.gpus_per_worker} if self.use_gpu else {})

    @model_validator(mode="after")
    def _check(self) -> "WorkersConfig":
        if self.gpus_per_worker < 1 and self.max_workers > 1:
            raise ValueError(
                f"gpus_per_worker is {self.gpus_per_worker} with num_workers {self.num_workers}, whose workers cannot "
                "share a GPU: give gpus_per_worker=1 or num_workers=1"
            )
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"num_workers is {self.num_workers}: give a number from 1, or the fewest and the most as [1, 4]"
            )
        return self


class DiskSource(Config):
    """Activations are read from a complete cache."""

    type: Literal["disk"]


class LiveSource(Config):
    """Activations are made by target replicas beside the trainers, on resources of their own.

    `stream` writes none, and runs the target in every epoch. `hybrid` writes the cache in the first epoch and reads it
    from then on. Chats are tokenised into `activations` first, 4 bytes a token.
    """

    type: Literal["stream", "hybrid"]
    chats: ChatsConfig
    cache: CacheConfig = CacheConfig()
    """What is written (hybrid), and how taps are encoded on their way to the trainers (both)."""
    capture: CaptureConfig = CaptureConfig()
    """`num_targets` of all trainers together."""


Source = Annotated[DiskSource | LiveSource, Field(discriminator="type")]


class TrainingConfig(Config):
    """One training run on cached activations, whatever learns from them."""

    target: TargetConfig
    activations: str
    """Folder or URI of the activation cache."""
    source: Source = DiskSource(type="disk")
    """Where activations come from: disk reads the cache, stream writes none, hybrid writes and reads it."""
    output: str
    """Folder of the result, its checkpoints and metrics."""
    losses: LossConfig = LossConfig()
    optim: Optim
    """Optimiser: muon for the matrices and AdamW for the rest, or adamw for all parameters."""
    schedule: Schedule = SpikeSchedule(type="spike")
    """Learning-rate schedule: spike as published, or linear to `min_lr_ratio` times the base rate."""
    train: TrainConfig = TrainConfig()
    parallel: Parallel = DdpConfig(type="ddp")
    """How workers share the training state: ddp (each holds all of it) or deepspeed (ZeRO)."""
    workers: WorkersConfig = WorkersConfig()
    validation: ValidationConfig | None = None
    """Held-out chats to measure checkpoints on; null for no validation."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Where figures go besides the output folder and TensorBoard: {type: mlflow, ...}, {type: wandb, ...}."""
    ray: RayConfig = RayConfig()

    @property
    def learner(self) -> DrafterConfigBase:
        """What is trained."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Name of the run in its progress lines."""
        raise NotImplementedError

    @property
    def initial_weights(self) -> InitialWeights | None:
        """What the learner starts from; None for random weights."""
        return None

    @property
    def num_head_layers(self) -> int:
        """How many of the target's last layers the learner runs."""
        return self.learner.num_target_layers

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        if self.source.type != "disk" and self.source.capture.num_targets < self.workers.max_workers:
            raise ValueError(
                f"source.capture.num_targets is {self.source.capture.num_targets}, but every one of "
                f"{self.workers.max_workers} workers needs a target of its own: give at least workers.num_workers"
            )
        if self.parallel.type == "deepspeed":
            if self.optim.type != "adamw":
                raise ValueError(
                    f"parallel.type is deepspeed and optim.type is {self.optim.type}, which needs whole matrices where "
                    "ZeRO cuts them into flat pieces: use optim.type=adamw or parallel.type=ddp"
                )
            if self.train.precision == "float16":
                raise ValueError(
                    "parallel.type is deepspeed and train.precision is float16: use bfloat16, which needs no loss "
                    "scale, or parallel.type=ddp"
                )
        return self


class DistillConfig(TrainingConfig):
    """One distillation run."""

    drafter: TrainableConfig
    """What kind of drafter is trained."""
    init: InitialWeights | None = None
    """Weights to start from: layers of the target, or another drafter; null for random ones."""

    @property
    def learner(self) -> DrafterConfigBase:
        return self.drafter

    @property
    def label(self) -> str:
        return f"distill {self.drafter.type}"

    @property
    def initial_weights(self) -> InitialWeights | None:
        return self.init

    @model_validator(mode="after")
    def _check(self) -> Self:
        losses = self.losses
        if not losses.feature + losses.kl + losses.total_variation:
            raise ValueError("losses: feature, kl and total_variation are all 0: there is nothing to learn from")
        if losses.is_idle_at_first and not losses.feature:
            raise ValueError(_IDLE_AT_FIRST.format(losses.total_variation_start_share, "losses.feature"))
        if self.losses.feature and not self.drafter.predicts_features:
            raise ValueError(
                f"losses.feature is {self.losses.feature}, but a drafter of type '{self.drafter.type}' predicts no "
                "features: give losses.feature=0, and losses.kl or losses.total_variation"
            )
        return self


class SparsifyConfig(TrainingConfig):
    """One run that makes a target sparse."""

    sparse: SparseConfig = SparseConfig()
    """The routers and low-rank changes that are trained."""

    @property
    def learner(self) -> DrafterConfigBase:
        return self.sparse

    @property
    def label(self) -> str:
        return "sparsify"

    @property
    def num_head_layers(self) -> int:
        return read_spec(self.target.model, needs_weights=False).num_layers

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.losses.feature:
            raise ValueError(
                f"losses.feature is {self.losses.feature}, but a sparse target predicts no features: give "
                "losses.feature=0, and losses.kl, or sparse.ce_weight"
            )
        if not self.losses.kl + self.losses.total_variation + self.sparse.ce_weight:
            raise ValueError("losses.kl, losses.total_variation and sparse.ce_weight are all 0: give one of them")
        if self.losses.is_idle_at_first and not self.sparse.ce_weight:
            raise ValueError(_IDLE_AT_FIRST.format(self.losses.total_variation_start_share, "sparse.ce_weight"))
        if self.validation is not None:
            raise ValueError("validation measures drafters; leave it out and measure with pipelines.evaluate sparse")
        if self.parallel.type == "deepspeed":
            raise ValueError("parallel.type is deepspeed, which sparsify does not support: use ddp")
        return self
