"""Configuration of `pipelines.benchmark shaped`, which measures costs that depend only on tensor sizes. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moray.config import Config
from moray.decoding.params import CompileMode
from moray.drafters.configs import TrainableConfig
from moray.trees.shapes import Shape


class ShapeConfig(Config):
    """Shape of a Llama with random weights."""

    num_layers: int = Field(ge=1)
    """Number of decoder layers."""
    hidden_size: int = Field(ge=2)
    """Width of the hidden states, in elements."""
    num_heads: int = Field(ge=1)
    """Number of query heads."""
    num_kv_heads: int = Field(ge=1)
    """Number of key/value heads; must divide num_heads."""
    head_dim: int = Field(ge=2)
    """Width of one attention head, in elements."""
    intermediate_size: int = Field(ge=1)
    """Inner width of the MLP, in elements."""
    vocab_size: int = Field(ge=2)
    """Number of tokens in the vocabulary."""


class RecordedAcceptanceConfig(Config):
    """Which cycles of an evaluation to replay."""

    recorded: str
    """The answers.jsonl of an evaluation, or the folder that holds it."""
    drafter: str
    """Drafter whose cycles are replayed, as the evaluation's report names it."""
    tree: str
    """Tree whose cycles are replayed, as the evaluation's report names it, such as chain-5."""
    temperature: float | None = Field(default=None, ge=0)
    """Temperature whose cycles are replayed; null if the evaluation used only one."""


class ShapedBenchmarkConfig(Config):
    """What `pipelines.benchmark shaped` measures: costs that depend only on tensor sizes."""

    shape: ShapeConfig
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Number format of the weights and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on; auto uses the GPU if there is one."""
    drafter: TrainableConfig
    """Drafter to build with random weights."""
    trees: tuple[Shape, ...] = Field(min_length=1)
    """Shapes of the draft trees; the drafter is measured with each one."""
    tau: float | None = Field(default=None, gt=1)
    """Tokens per target pass that the SYNTHETIC acceptance aims for; null if acceptance is given. Random weights
    accept nothing by themselves."""
    acceptance: RecordedAcceptanceConfig | None = None
    """Recorded acceptance lengths to replay instead of tau, also SYNTHETIC; null to use tau."""
    verify_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 8, 62), min_length=1)
    """Token counts at which target passes are timed."""
    context: int = Field(default=512, ge=1)
    """Number of prompt tokens before the first generated token."""
    max_new_tokens: int = Field(default=256, ge=16)
    """Number of tokens to generate."""
    memory_bandwidth: float | None = Field(default=None, gt=0)
    """Memory bandwidth in bytes per second, for a ceiling in milliseconds; null to leave it out."""
    compile: CompileMode = "off"
    """Whether target and drafters are compiled by torch.compile."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    @model_validator(mode="after")
    def _check(self) -> "ShapedBenchmarkConfig":
        if (self.tau is None) == (self.acceptance is None):
            given = "neither tau nor acceptance is" if self.tau is None else "both tau and acceptance are"
            raise ValueError(f"{given} given; give one of the two, such as tau=4.2, and make the other null")
        return self
