"""What an evaluation of sparse targets compares. Torch-free."""

from pydantic import Field, model_validator

from moray.config import Config
from moray.decoding.engine.config import NodeSelection
from moray.drafters.configs import UsableConfig
from moray.targets.spec import TargetConfig
from moray.trees.shapes import AdaptiveShape, DynamicShape, Shape


class PredictorConfig(Config):
    """Training of a sparse target's predictor of accepted nodes."""

    target: TargetConfig
    """The sparse target; the predictor is written into its folder."""
    drafter: str | UsableConfig
    """Folder of a drafter that was trained for this target, or a drafter by type. Its drafts are learnt from."""
    tree: Shape = DynamicShape(type="dynamic", depth=4, breadth=4, nodes=16)
    """Shape of the drafts."""
    layer: int = Field(default=6, ge=1)
    """K: the predictor reads what enters this layer, and drops nodes from there on. Published: 6 of 32."""
    chats: str
    """Chats whose first questions are answered: a file of JSON rows or Parquet."""
    skip_chats: int = Field(default=0, ge=0)
    """Chats to leave out at the beginning of the file. Leave out those that target and drafter were trained on."""
    max_chats: int | None = Field(default=400, ge=2)
    """Number of chats to read after those; null for all."""
    max_new_tokens: int = Field(default=64, ge=2)
    """Maximum tokens of an answer."""
    num_nodes: int = Field(default=20_000, ge=100)
    """Number of nodes to collect."""
    held_out: float = Field(default=0.2, gt=0, lt=1)
    """Share of the prompts that test the predictor."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads; null leaves it to torch."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


class SparseRowConfig(Config):
    """One way to decode."""

    target: str
    """Name of one of `targets`."""
    drafter: str | UsableConfig
    """Folder of a drafter that was trained for that target, or a drafter by type. Targets alone are measured anyway."""
    tree: Shape = AdaptiveShape(type="adaptive", depth=8)
    """Shape of the draft trees."""
    select: NodeSelection = "all"
    """Nodes that the target's later layers verify (see `engine.select`)."""


class SparseEvaluationConfig(Config):
    """Sparse targets and baselines beside the dense target that they come from."""

    targets: dict[str, TargetConfig] = Field(min_length=1)
    """Targets by name, the dense one first; all have its tokenizer."""
    rows: tuple[SparseRowConfig, ...] = ()
    """Ways to decode besides each target alone; every prompt is answered by all of them, in turn."""
    chats: str
    """Held-out chats, for perplexity and agreement: a file of JSON rows or Parquet."""
    skip_chats: int = Field(default=0, ge=0)
    """Chats to leave out at the beginning of the file, because a target was trained on them."""
    max_chats: int | None = Field(default=64, ge=1)
    """Number of chats to read after those; null for all."""
    max_length: int = Field(default=1024, ge=16)
    """Maximum tokens of a chat; longer ones are cut."""
    questions: str
    """File of questions, as for pipelines.evaluate; only the first turn of each is asked."""
    num_questions: int | None = Field(default=8, ge=1)
    """Number of different questions, one of each category in turn; null for all."""
    max_new_tokens: int = Field(default=80, ge=2)
    """Maximum tokens of an answer."""
    rounds: int = Field(default=2, ge=1)
    """How often every question is asked in every way; every other round reverses the order of the ways."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads; null leaves it to torch."""
    report: str | None = None
    """JSON file to write, with an HTML page beside it; the same as --json FILE; null for none."""

    @model_validator(mode="after")
    def _check(self) -> "SparseEvaluationConfig":
        for index, row in enumerate(self.rows):
            if row.target not in self.targets:
                known = ", ".join(self.targets)
                raise ValueError(f"rows[{index}].target is '{row.target}'; targets has {known}")
        return self
