"""What is measured, and how: evaluations, benchmarks, a tree's search, comparisons, live decoding. Torch-free."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from moray.config import Config
from moray.decoding.params import CompileMode, SamplingParams
from moray.drafters.configs import TrainableConfig, UsableConfig
from moray.targets.spec import TargetConfig
from moray.trees.shapes import MAX_DEPTH, AdaptiveShape, ChainShape, Shape

ChannelName = Literal["socket", "actor", "handle", "handle tuned", "compiled graph"]


class EvaluateConfig(Config):
    """Which drafters and trees to measure, on what, and how."""

    target: TargetConfig
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """Folders of trained drafters, or {type: trained, folder: ..., effort: 1, name: ...} to fix N of several; those
    that need no training as {type: ngram} or {type: pretrained, model: ...}."""
    trees: tuple[Shape, ...] = Field(min_length=1)
    questions: str
    """Spec-Bench JSON Lines, rows of {prompt}, or chats whose user turns are asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """How many, spread evenly over categories; None for all."""
    categories: tuple[str, ...] = ()
    """Empty for all."""
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Each question is asked at each of them; empty for `sampling.temperature` alone."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=128, ge=1)
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the end-of-sequence tokens."""
    compare_generate: bool = True
    """Measure Hugging Face `generate` beside our own plain decoding."""
    threads: int | None = Field(default=1, ge=1)
    """torch threads; None for torch's own choice."""
    max_context: int = Field(default=8192, ge=2)
    """Most tokens of prompt and answer together, if the target takes more: what the cache is allocated for."""
    compile: CompileMode = "off"
    """torch.compile for target and drafters."""
    exact_phases: bool = False
    """Wait for the device after each phase, so that their times can be told apart; it costs some overlap."""
    output: str
    """Folder of answers.jsonl, report.json and report.html."""

    @field_validator("sampling", mode="before")
    @classmethod
    def _begin_with_the_first_temperature(cls, value: Any, info: ValidationInfo) -> Any:
        """Beside `temperatures` a `sampling.temperature` of 0 counts as not given; typical acceptance refuses it."""
        match value, info.data:
            case {"rule": "typical"}, {"temperatures": (first, *_)}:
                return value | {"temperature": value.get("temperature") or first}
        return value

    @model_validator(mode="after")
    def _check(self) -> "EvaluateConfig":
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures are {list(self.temperatures)}; name each of them once")
        if self.temperatures and self.sampling.temperature not in (0.0, *self.temperatures):
            raise ValueError(
                f"sampling.temperature is {self.sampling.temperature} but temperatures are {list(self.temperatures)}; "
                "give one of the two"
            )
        _ = self.samplings  # what a temperature cannot be combined with is refused here
        return self

    @property
    def samplings(self) -> tuple[SamplingParams, ...]:
        """How tokens are drawn, once per temperature."""
        temperatures = self.temperatures or (self.sampling.temperature,)
        given = self.sampling.model_dump()
        return tuple(SamplingParams.model_validate(given | {"temperature": value}) for value in temperatures)


class DecodeBenchmarkConfig(Config):
    """What `pipelines.benchmark decode` measures."""

    target: TargetConfig
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """Folders of trained drafters, or {type: trained, folder: ..., effort: 1, name: ...} to fix N of several; those
    that need no training as {type: ngram} or {type: pretrained, model: ...}."""
    trees: tuple[Shape, ...] = Field(min_length=1)
    questions: str
    """As for pipelines.evaluate."""
    num_questions: int | None = Field(default=None, ge=1)
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=128, ge=1)
    threads: int | None = Field(default=1, ge=1)
    """torch threads; None for torch's own choice."""
    compile: CompileMode = "off"
    """torch.compile for target and drafters."""
    report: str | None = None
    """JSON file to write; the same as `--json FILE`."""

    def evaluation(self) -> EvaluateConfig:
        """The evaluation that measures it."""
        shared = self.model_dump(exclude={"report", "compile"})
        own = {"output": "", "compare_generate": False, "exact_phases": True, "compile": self.compile}
        return EvaluateConfig.model_validate(shared | own)


class EngineBenchmarkConfig(Config):
    """What `pipelines.benchmark engine` measures."""

    target: TargetConfig
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """As for `pipelines.benchmark decode`."""
    tree: Shape = AdaptiveShape(type="adaptive", depth=8)
    batches: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(default=(1, 2, 4, 8, 16, 32), min_length=1)
    """Sequences at a time."""
    questions: str
    """As for pipelines.evaluate; of several turns the first."""
    num_questions: int | None = Field(default=None, ge=1)
    num_answers: int | None = Field(default=None, ge=1)
    """Answers in each round; None for one to every question, and never fewer than run at a time."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=96, ge=1)
    rounds: int = Field(default=3, ge=1)
    threads: int | None = Field(default=1, ge=1)
    """torch threads; None for torch's own choice."""
    report: str | None = None
    """JSON file to write; the same as `--json FILE`."""


class ChannelsBenchmarkConfig(Config):
    """What `pipelines.benchmark channels` measures."""

    target: TargetConfig
    drafter: str | UsableConfig
    """Folder of a trained drafter, or one that needs no training; its messages are what crosses."""
    tree: Shape = ChainShape(type="chain", depth=5)
    channels: tuple[ChannelName, ...] = Field(default=get_args(ChannelName), min_length=1)
    """Ways from the target's process to the drafter's, in turn."""
    batches: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(default=(1, 4, 16, 32), min_length=1)
    """Sequences at a time."""
    questions: str
    """As for pipelines.evaluate; of several turns the first."""
    num_questions: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=96, ge=2)
    num_cycles: int = Field(default=100, ge=2)
    """Messages of each batch size that are recorded."""
    rounds: int = Field(default=10, ge=1)
    """How often each recording goes through each channel."""
    drafted_rounds: int = Field(default=1, ge=0)
    """The same with the drafter at work behind it."""
    threads: int | None = Field(default=1, ge=1)
    """torch threads of each process; None for torch's own choice."""
    report: str | None = None
    """JSON file to write; the same as `--json FILE`."""

    @model_validator(mode="after")
    def _check(self) -> "ChannelsBenchmarkConfig":
        for key in ("channels", "batches"):
            values = getattr(self, key)
            if len(set(values)) < len(values):
                raise ValueError(f"{key} is {list(values)}; name each of them once")
        return self


class StalenessConfig(Config):
    """What `pipelines.benchmark staleness` measures: tau of chains whose memory is late."""

    target: TargetConfig
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """As for `pipelines.benchmark decode`."""
    questions: str
    """As for pipelines.evaluate; of several turns the first."""
    num_questions: int | None = Field(default=None, ge=1)
    """How many, spread evenly over categories; None for all."""
    depth: int = Field(default=6, ge=1)
    """Tokens of a draft."""
    lags: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 1, 2, 4, 6, 8, 12), min_length=1)
    """How many tokens before the root memory ends. 0, as decoding has it, is what the others are compared with."""
    max_new_tokens: int = Field(default=96, ge=2)
    max_context: int = Field(default=8192, ge=2)
    """Most tokens of prompt and answer together, if the target takes more."""
    threads: int | None = Field(default=1, ge=1)
    """torch threads; None for torch's own choice."""
    report: str | None = None
    """JSON file to write; the same as `--json FILE`."""

    @model_validator(mode="after")
    def _check(self) -> "StalenessConfig":
        if 0 not in self.lags or len(set(self.lags)) < len(self.lags):
            raise ValueError(f"lags are {list(self.lags)}; name 0, and each once")
        if self.depth + max(self.lags) > MAX_DEPTH:
            raise ValueError(
                f"depth is {self.depth} and the largest of lags {max(self.lags)}; together at most {MAX_DEPTH} levels "
                "can be drafted"
            )
        if self.depth >= self.max_new_tokens:
            raise ValueError(f"depth is {self.depth}; it must be less than max_new_tokens, {self.max_new_tokens}")
        return self


class TreeSearchConfig(Config):
    """What `pipelines.benchmark tree` searches: a sparse tree for one drafter."""

    target: TargetConfig
    drafter: str | UsableConfig
    """Folder of a trained drafter, or {type: trained, ...}, {type: ngram} or {type: pretrained, model: ...}."""
    questions: str
    """As for pipelines.evaluate; others than those it will be measured on."""
    num_questions: int | None = Field(default=None, ge=1)
    """How many, spread evenly over categories; None for all."""
    nodes: int = Field(default=63, ge=1, le=512)
    """Of the tree, its root not counted."""
    levels: int = Field(default=5, ge=1, le=32)
    """Most levels below the root; a drafter of fewer has fewer."""
    ranks: int = Field(default=10, ge=1, le=64)
    """Candidates of a level that are looked at."""
    max_new_tokens: int = Field(default=128, ge=2)
    max_context: int = Field(default=8192, ge=2)
    """Most tokens of prompt and answer together, if the target takes more."""
    threads: int | None = Field(default=1, ge=1)
    """torch threads; None for torch's own choice."""
    output: str | None = None
    """YAML file to write the tree to, for `trees` of other commands; None prints it."""
    report: str | None = None
    """JSON file for rates and tree; the same as `--json FILE`."""

    @model_validator(mode="after")
    def _check(self) -> "TreeSearchConfig":
        if self.output and self.report and Path(self.output).resolve() == Path(self.report).resolve():
            raise ValueError(
                f"output is '{self.output}' and report (--json) '{self.report}', the same file; the tree is YAML and "
                "the report JSON: name two files"
            )
        return self


class ShapeConfig(Config):
    """Sizes of a Llama of random weights."""

    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=2)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    intermediate_size: int = Field(ge=1)
    vocab_size: int = Field(ge=2)


class RecordedAcceptanceConfig(Config):
    """Which cycles of an evaluation to replay."""

    recorded: str
    """answers.jsonl of an evaluation, or its folder."""
    drafter: str
    """As its report names it."""
    tree: str
    """As its report names it, such as chain-5."""
    temperature: float | None = Field(default=None, ge=0)
    """None: the only one that was asked at."""


class ShapedBenchmarkConfig(Config):
    """What `pipelines.benchmark shaped` measures: costs that depend on sizes alone."""

    shape: ShapeConfig
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    drafter: TrainableConfig
    trees: tuple[Shape, ...] = Field(min_length=1)
    tau: float | None = Field(default=None, gt=1)
    """Tokens per target pass that the SYNTHETIC acceptance is set to: random weights accept nothing."""
    acceptance: RecordedAcceptanceConfig | None = None
    """In place of tau: the lengths that an evaluation recorded, replayed in order. SYNTHETIC all the same."""
    verify_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 8, 62), min_length=1)
    """Tokens of the target passes that are timed."""
    context: int = Field(default=512, ge=1)
    """Tokens that stand before the first one generated."""
    max_new_tokens: int = Field(default=256, ge=16)
    memory_bandwidth: float | None = Field(default=None, gt=0)
    """Bytes per second of the device, for the ceiling in milliseconds; None leaves it out."""
    compile: CompileMode = "off"
    report: str | None = None
    """JSON file to write; the same as `--json FILE`."""

    @model_validator(mode="after")
    def _check(self) -> "ShapedBenchmarkConfig":
        if (self.tau is None) == (self.acceptance is None):
            given = "neither tau nor acceptance is" if self.tau is None else "both tau and acceptance are"
            raise ValueError(f"{given} given; give one of the two, such as tau=4.2, and make the other null")
        return self


class CompareConfig(Config):
    """Two reports to put side by side."""

    a: str
    """A report.json."""
    b: str
    """Another one; ratios are b / a."""
    report: str | None = None
    """JSON file to write; the same as `--json FILE`."""


class LiveConfig(Config):
    """One prompt to decode in the terminal."""

    target: TargetConfig
    drafter: str
    """Folder of a trained drafter."""
    tree: Shape
    prompt: str
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=128, ge=1)
