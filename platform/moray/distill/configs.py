"""Configuration of losses, optimizers, schedules and the training run. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from moray.config import Config


class LossConfig(Config):
    """Weights of the distillation losses (MoA, table 6)."""

    feature: float = Field(default=1.0, ge=0)
    """Weight of the smooth L1 loss between predicted and real hidden states; 0 leaves it out. The loss is the mean over
    the hidden size."""
    kl: float = Field(default=0.1, ge=0)
    """Weight of KL(target || drafter) over the vocabulary; 0 leaves it out."""
    total_variation: float = Field(default=0.0, ge=0)
    """Weight of the total variation distance, 1 - sum min(p, q); 0 leaves it out. It is the probability that a drafted
    token is rejected."""
    total_variation_start_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the run's updates before total_variation has its weight; until then the weight is 0."""
    kl_top_k: int | None = Field(default=None, ge=1)
    """Compare the k most likely tokens and the sum of all others in the KL; null for every token. Both are of the draft
    vocabulary. The reported KL is that of these k + 1 events, which is at most the whole one."""
    position_share: float = Field(default=1.0, gt=0, le=1)
    """Share of a batch's positions whose distributions are compared, drawn anew for every batch; 1 for all. The feature
    loss still takes all positions."""

    renamed: ClassVar[Mapping[str, str]] = {"acceptance": "total_variation"}

    @model_validator(mode="after")
    def _check(self) -> "LossConfig":
        if self.total_variation_start_share and not self.total_variation:
            raise ValueError(
                f"losses.total_variation_start_share is {self.total_variation_start_share:g}, but "
                "losses.total_variation is 0: give it a weight, or leave total_variation_start_share out"
            )
        if self.kl_top_k is not None and not self.kl:
            raise ValueError(
                f"losses.kl_top_k is {self.kl_top_k}, but losses.kl is 0: give kl a weight, or leave kl_top_k out"
            )
        if self.position_share < 1 and not self.kl + self.total_variation:
            raise ValueError(
                f"losses.position_share is {self.position_share:g}, but losses.kl and losses.total_variation are 0: "
                "give one of them a weight, or leave position_share out"
            )
        return self

    @property
    def is_idle_at_first(self) -> bool:
        """Whether no loss between distributions has a weight before `total_variation_start_share`."""
        return self.total_variation_start_share > 0 and not self.kl

    def at(self, progress: float) -> "LossConfig":
        """The weights of the update after which this share of the run's updates is done."""
        if progress > self.total_variation_start_share or not self.total_variation:
            return self
        return self.model_copy(update={"total_variation": 0.0})

    def for_validation(self) -> "LossConfig":
        """The final weights, over all tokens and positions, so that drafters can be compared."""
        return self.model_copy(update={"kl_top_k": None, "position_share": 1.0})


class InitialWeights(Config):
    """What a new drafter starts from, in place of random weights: layers of the target, or another drafter."""

    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Target layers, from 0, to initialise the drafter's layers from; exactly one for glide. The final norm is copied
    too."""
    drafter: str | None = None
    """Folder of a drafter of the same settings, for the same target, to train further; null for none."""

    @model_validator(mode="after")
    def _check(self) -> "InitialWeights":
        if bool(self.layers) == (self.drafter is not None):
            given = "both layers and drafter are" if self.layers else "neither layers nor drafter is"
            raise ValueError(f"init: {given} given; give one of the two, or leave init out")
        return self


class AdamWConfig(Config):
    """AdamW for every parameter, as published."""

    type: Literal["adamw"]
    lr: float = Field(default=3e-5, gt=0)
    """Base learning rate, which the schedule scales."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of gradients and of their squares, per update."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; 0 for none."""


class MuonConfig(Config):
    """Muon for matrices between hidden states, AdamW for everything else: far fewer steps on small budgets."""

    type: Literal["muon"]
    lr: float = Field(default=0.02, gt=0)
    """Base learning rate of the matrices, which the schedule scales."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of the matrices' updates; 0 for none."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of the matrices; 0 for none."""
    vector_lr: float = Field(default=3e-3, gt=0)
    """AdamW's learning rate, for norms, biases, embeddings and vocabulary projections."""


Optim = Annotated[AdamWConfig | MuonConfig, Field(discriminator="type")]


class SpikeSchedule(Config):
    """The published schedule: linear warm-up to `peak` times the base rate, linear decay to the base rate over
    `decay_epochs`, then constant."""

    type: Literal["spike"]
    warmup_steps: int = Field(default=50, ge=1)
    """Updates over which the rate rises to its peak."""
    peak: float = Field(default=20.0, ge=1)
    """Highest learning rate, as a multiple of the base rate."""
    decay_epochs: float = Field(default=1.0, gt=0)
    """Epochs, from the start of training, after which the rate is back at the base rate."""

    def factor(self, step: int, steps_per_epoch: int, total_steps: int) -> float:
        """Factor on the base learning rate at `step` (0-based)."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        decayed = (step - self.warmup_steps) / max(1.0, self.decay_epochs * steps_per_epoch - self.warmup_steps)
        return max(1.0, self.peak + (1.0 - self.peak) * decayed)


class LinearSchedule(Config):
    """Linear warm-up to the base rate, linear decay to `min_lr_ratio` times that rate at the last step."""

    type: Literal["linear"]
    warmup_steps: int = Field(default=20, ge=1)
    """Updates over which the rate rises to the base rate."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate of the last update, as a multiple of the base rate; 0 decays to zero."""

    renamed: ClassVar[Mapping[str, str]] = {"final": "min_lr_ratio"}

    def factor(self, step: int, steps_per_epoch: int, total_steps: int) -> float:
        """Factor on the base learning rate at `step` (0-based)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        return 1.0 + (self.min_lr_ratio - 1.0) * done


Schedule = Annotated[SpikeSchedule | LinearSchedule, Field(discriminator="type")]


class DdpConfig(Config):
    """Every worker holds all weights and the whole optimizer state."""

    type: Literal["ddp"]


class DeepSpeedConfig(Config):
    """DeepSpeed ZeRO (arXiv 1910.02054): workers shard what each would hold. AdamW in float32 or bfloat16."""

    type: Literal["deepspeed"]
    stage: Literal[1, 2, 3]
    """What is sharded over workers: 1 the optimizer state, 2 also gradients, 3 also weights."""
    offload_optimizer: bool = False
    """Keep the optimizer state in the CPU's memory, and update the weights there."""
    persistence_threshold: int = Field(default=100_000, ge=0)
    """Stage 3: weights of at most this many elements stay whole on every worker; 0 shards all."""


Parallel = Annotated[DdpConfig | DeepSpeedConfig, Field(discriminator="type")]


class TrainConfig(Config):
    """Length, batch size and logging of a training run."""

    epochs: int = Field(default=1, ge=1)
    """Number of passes over the cache."""
    max_steps: int | None = Field(default=None, ge=1)
    """Maximum number of optimizer updates, which may end the run early; null for all epochs."""
    batch_tokens: int = Field(default=16384, ge=16)
    """Maximum tokens, padding included, that one worker computes at once."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Batches of every worker in one update. Multiplied by the number of workers, it gives the run's number of data
    shards, which stays the same if the run continues with fewer workers."""
    seed: int = 0
    """Seed of the initial weights, the order of batches and the masks."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum norm of the gradient; a larger gradient is scaled down to it."""
    precision: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Dtype of the forward pass, by autocast; weights stay float32, and float16 uses a loss scale. With auto, a GPU
    gets bfloat16 if it supports it, a CPU only if it multiplies at least 1.1 times as fast in it; the run keeps the
    choice."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more work. Only the inputs of each block
    of layers are kept; the gradients are the same."""
    save_steps: int = Field(default=500, ge=1)
    """Optimizer updates from one checkpoint to the next; the last update is always saved."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of latest checkpoints to keep."""
    logging_steps: int = Field(default=10, ge=1)
    """Optimizer updates from one report of metrics to the next; the update of a checkpoint is reported too."""

    renamed: ClassVar[Mapping[str, str]] = {
        "accumulate": "gradient_accumulation_steps",
        "clip": "max_grad_norm",
        "checkpoint_steps": "save_steps",
        "log_steps": "logging_steps",
    }
