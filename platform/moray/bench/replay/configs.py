"""What is recorded, and what is replayed. Torch-free."""

from typing import Literal

from pydantic import Field, model_validator

from moray.config import Config
from moray.decoding.params import SamplingParams
from moray.drafters.configs import UsableConfig
from moray.targets.spec import TargetConfig
from moray.trees.shapes import ChainShape, Shape


class _LogConfig(Config):
    """A log, with all that drafters read of it."""

    head_layers: int = Field(default=0, ge=0)
    """The target's last layers to keep with the log, for drafters that run them: at least their N."""
    kv_layers: tuple[int, ...] | None = None
    """Layers whose keys and values are kept; null for all, as MoA reads them. GLIDE reads the last one."""
    hidden_depths: tuple[int, ...] = (-1,)
    """Depths of hidden states that are kept. EAGLE and Medusa read -1, MoA with N reads -1-N, EAGLE-3 three others."""
    codec: Literal["float32", "bfloat16", "float16"] = "float32"
    """How they are stored: float32, bfloat16 or float16. With float32 the replay is exact."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads; null leaves it to torch."""
    output: str
    """Folder of the log."""


class RecordConfig(_LogConfig):
    """A log of what a target writes, with all that drafters read of it."""

    target: TargetConfig
    questions: str
    """File of questions, as for pipelines.evaluate; only the first turn of each is asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of different questions, one of each category in turn; null for all."""
    max_new_tokens: int = Field(default=200, ge=2)
    """Maximum tokens of a continuation."""
    sampling: SamplingParams = SamplingParams()
    """How tokens are drawn; greedy by default. Drafters that are replayed draw with the same noise."""
    max_num_seqs: int = Field(default=8, ge=1, le=1024)
    """Number of continuations that the target writes at the same time. Each takes memory for its keys and values."""


class ImportConfig(_LogConfig):
    """A log of greedy continuations that another program has written."""

    prompts: str
    """File of the prompts, one JSON object with `prompt` per line."""
    outputs: str
    """Text file of printed tensors of token ids, tensor([[...]]), one for each prompt, in their order."""
    target: TargetConfig | None = None
    """The target that wrote them, for all that drafters read of it; null for a log of the texts alone. Only prompt
    lookup and pretrained models can be replayed over those."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer that wrote them; null with a target."""

    @model_validator(mode="after")
    def _check(self) -> "ImportConfig":
        if (self.target is None) == (self.tokenizer is None):
            given = "neither target nor tokenizer is" if self.target is None else "both target and tokenizer are"
            raise ValueError(f"{given} given; give one of the two")
        return self


class ReplayConfig(Config):
    """Drafters and trees that are replayed over a log."""

    log: str
    """Folder that `pipelines.replay record` or `import` has written."""
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """Folders of drafters that were trained for the log's target, or drafters by type."""
    trees: tuple[Shape, ...] = (ChainShape(type="chain", depth=5),)
    """Shapes of the draft trees; adaptive ones follow measured costs and cannot be replayed."""
    max_depth: int | None = Field(default=None, ge=1, le=32)
    """Also replay chains of every depth up to this one; null for none. `pipelines.plan` reads them."""
    num_continuations: int | None = Field(default=None, ge=1)
    """Number of continuations to replay; null for all."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads; null leaves it to torch."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    @model_validator(mode="after")
    def _check(self) -> "ReplayConfig":
        if not self.trees and self.max_depth is None:
            raise ValueError("trees is empty and max_depth null; give trees, or a max_depth of chains")
        return self
