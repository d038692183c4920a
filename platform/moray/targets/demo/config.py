"""Settings of the demo target: its sizes, its training budget and where it is written.

Torch-free, so that `--help` and configuration errors are fast; `moray.targets.demo.make` does the work.
"""

from pathlib import Path

from pydantic import Field, model_validator

from moray.config import Config
from moray.runs_folder import resolve_runs


class DemoModelConfig(Config):
    """Sizes of the demo target. Depth, not width, is what makes speculation pay on a CPU."""

    vocab_size: int = Field(default=1024, ge=512, le=65536)
    """Number of tokens in the vocabulary."""
    hidden_size: int = Field(default=96, ge=32)
    """Width of the hidden states, in elements."""
    num_layers: int = Field(default=20, ge=1)
    """Number of decoder layers."""
    num_heads: int = Field(default=4, ge=1)
    """Number of query heads."""
    num_kv_heads: int = Field(default=1, ge=1)
    """Number of key/value heads; must divide num_heads."""
    head_dim: int = Field(default=24, ge=2, multiple_of=2)
    """Width of one attention head, in elements."""
    intermediate_size: int = Field(default=256, ge=32)
    """Inner width of the MLP, in elements."""
    max_positions: int = Field(default=1024, ge=64)
    """Context of the model, in tokens."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "DemoModelConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        return self


class DemoOptimConfig(Config):
    """How the demo target is trained: Muon for the matrices of the layers, AdamW for the rest."""

    num_steps: int = Field(default=320, ge=1)
    """Number of optimizer updates."""
    rows_per_step: int = Field(default=4, ge=1)
    """Rows per update, over all processes."""
    row_length: int = Field(default=256, ge=32)
    """Tokens per row, in which whole chats are concatenated."""
    matrix_lr: float = Field(default=0.02, gt=0)
    """Muon's learning rate, for the matrices of the layers."""
    embedding_lr: float = Field(default=0.02, gt=0)
    """AdamW's learning rate for the token embeddings."""
    other_lr: float = Field(default=0.004, gt=0)
    """AdamW's learning rate for the output head and the norms."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of all weights except the norms; 0 for none."""
    warmup_steps: int = Field(default=10, ge=0)
    """Updates over which the learning rates rise from zero; 0 for none."""
    decay_share: float = Field(default=0.6, gt=0, le=1)
    """Share of the updates, at the end, over which the learning rates fall to zero."""


class DemoTargetConfig(Config):
    """The demo's target and its chats, which `python -m pipelines.train_demo_target` creates."""

    output: Path = Field(default_factory=lambda: Path(resolve_runs("runs/demo", "output")))
    """Folder for target/, chats/train.jsonl, chats/heldout.jsonl and questions.jsonl."""
    seed: int = 0
    """Seed of chats, questions and weights."""
    num_train_chats: int = Field(default=4000, ge=16)
    """Number of chats to generate for training."""
    num_heldout_chats: int = Field(default=400, ge=8)
    """Number of chats to generate and hold out of training."""
    num_questions: int = Field(default=78, ge=1)
    """Number of questions to generate for evaluations."""
    num_processes: int = Field(default=1, ge=1)
    """Data-parallel processes of one thread each; must divide optim.rows_per_step. Floating-point sums depend on it:
    the same weights need the same seed and number."""
    max_seconds: float = Field(default=150.0, gt=0)
    """Maximum seconds of training; steps that do not fit are dropped, with a message."""
    model: DemoModelConfig = DemoModelConfig()
    optim: DemoOptimConfig = DemoOptimConfig()

    @model_validator(mode="after")
    def _every_process_has_rows(self) -> "DemoTargetConfig":
        if self.optim.rows_per_step % self.num_processes:
            raise ValueError(
                f"num_processes {self.num_processes} must divide optim.rows_per_step {self.optim.rows_per_step}"
            )
        return self
