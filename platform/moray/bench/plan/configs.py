"""What is planned, from which acceptance and which costs. Torch-free."""

from typing import Annotated

from pydantic import Field, model_validator

from moray.config import Config
from moray.targets.spec import TargetConfig

_Rate = Annotated[float, Field(ge=0, le=1)]
_Depth = Annotated[int, Field(ge=1, le=32)]
_Batch = Annotated[int, Field(ge=1, le=1024)]


class PlanConfig(Config):
    """Predict tokens per second of drafters, chains, trees and batches, and choose the best."""

    costs: str
    """YAML file of seconds: `pipelines.plan costs` measures one. For another machine, write one by hand."""
    replay: str | None = None
    """JSON file of `pipelines.replay` with max_depth, for what is accepted; null for acceptance."""
    acceptance: dict[str, tuple[_Rate, ...]] = Field(default_factory=dict)
    """In place of replay: by drafter and depth, how often a token is accepted if all before it were."""
    drafters: tuple[str, ...] = ()
    """Names of the drafters to plan with; empty for all."""
    trees: tuple[str, ...] | None = None
    """Names of trees to plan besides chains, as dynamic-4x4-16; null for all in the replay, [] for none."""
    max_depth: _Depth = 8
    """Chains of every depth up to this are planned, as far as acceptance and costs are known."""
    batches: tuple[_Batch, ...] = Field(default=(1, 4, 16), min_length=1)
    """Numbers of sequences that decode at the same time."""
    num_continuations: int | None = Field(default=None, ge=1)
    """Number of the replay's continuations to use; null for all."""
    output: str
    """Folder for plan.json, report.html and the settings of the best row, best.yaml."""

    @model_validator(mode="after")
    def _check(self) -> "PlanConfig":
        if (self.replay is None) == (not self.acceptance):
            given = "neither replay nor acceptance is" if self.replay is None else "both replay and acceptance are"
            raise ValueError(f"{given} given; give one of the two")
        if self.trees and self.replay is None:
            raise ValueError(
                f"trees is {list(self.trees)}, but acceptance describes chains alone: give replay in its place, or "
                "leave trees out"
            )
        if any(not rates for rates in self.acceptance.values()):
            raise ValueError("acceptance has a drafter without rates; give one rate for each depth, such as [0.7, 0.6]")
        return self


class PlanCheckConfig(PlanConfig):
    """Measure the rows of a plan and compare them with what it predicts."""

    target: TargetConfig
    depths: tuple[_Depth, ...] = Field(default=(1, 2, 4, 8), min_length=1)
    """Depths of the chains that are measured. Plain decoding and the trees are always measured."""
    rounds: int = Field(default=2, ge=1)
    """Number of times that each row is measured; the rows take turns."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads; null leaves it to torch."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


class CostsConfig(Config):
    """Measure what passes and drafts cost on this machine."""

    target: TargetConfig
    replay: str
    """JSON file of `pipelines.replay`, which names the log and the drafters."""
    drafters: tuple[str, ...] = ()
    """Names of the drafters to measure; empty for all."""
    trees: tuple[str, ...] | None = None
    """Names of trees to measure besides chains, as dynamic-4x4-16; null for all in the replay, [] for none."""
    depths: tuple[_Depth, ...] = Field(default=(1, 2, 4, 8), min_length=1)
    """Depths of the chains that are measured; those between them are interpolated."""
    batches: tuple[_Batch, ...] = Field(default=(1, 4, 16), min_length=1)
    """Numbers of sequences that are measured; those between them are interpolated."""
    num_cycles: int = Field(default=24, ge=4)
    """Cycles per drafter, chain or tree, and batch. Measured in two halves, to see whether the machine drifts."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads; null leaves it to torch."""
    output: str
    """YAML file to write."""


class ShapesConfig(Config):
    """Measure what a step of an independent drafter costs by its shape, from deep and narrow to shallow and wide."""

    target: TargetConfig
    depths: tuple[_Depth, ...] = Field(default=(1, 2, 4, 8), min_length=2)
    """Numbers of decoder layers. The hidden size follows, so that all drafters have about the same parameters."""
    block_parameters: int | None = Field(default=None, ge=1)
    """Parameters of all decoder layers together, without embeddings; null for two layers of the target."""
    draft_vocab_size: int | None = Field(default=None, ge=2)
    """Number of tokens that can be proposed; null for all."""
    chain_depths: tuple[_Depth, ...] = Field(default=(1, 3, 5), min_length=1)
    """Depths of the chains whose tau to break even is computed."""
    step_depth: _Depth = 5
    """Tokens of the chain that is timed; a step is its time over its tokens."""
    context: int = Field(default=128, ge=1)
    """Tokens before the draft."""
    rounds: int = Field(default=5, ge=1)
    """Number of times that each shape is measured; the shapes and the target take turns."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads; null leaves it to torch."""
    output: str
    """Folder for shapes.html, and for a YAML file of each drafter."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    @model_validator(mode="after")
    def _check(self) -> "ShapesConfig":
        if len(set(self.depths)) < len(self.depths):
            raise ValueError(f"depths is {list(self.depths)}; name each number of layers once, such as [1, 2, 4]")
        return self
