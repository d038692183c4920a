"""What is measured, and how: evaluations, benchmarks, a tree's search, comparisons, live decoding. Torch-free."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from moray.config import Config
from moray.decoding.params import CompileMode, SamplingParams
from moray.drafters.configs import UsableConfig
from moray.targets.spec import TargetConfig
from moray.trees.shapes import MAX_DEPTH, AdaptiveShape, Shape


class EvaluateConfig(Config):
    """Which drafters and trees to measure, on what, and how."""

    target: TargetConfig
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """Folders of trained drafters, or drafters by type: {type: ngram}, {type: trained, folder: ...}. Also accepted:
    {type: pretrained, model: ...}, and {type: trained, folder: ..., N: 1, name: ...}, which fixes one N of a
    drafter that is trained for several."""
    trees: tuple[Shape, ...] = Field(default=(AdaptiveShape(type="adaptive", depth=8),), min_length=1)
    """Shapes of the draft trees; every drafter is measured with each of them."""
    questions: str
    """File of JSON Lines: Spec-Bench questions, rows of {prompt}, or chats whose user turns are asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    categories: tuple[str, ...] = ()
    """Categories of questions to ask; empty for all."""
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Temperatures at which each question is asked; empty for sampling.temperature alone."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=128, ge=1)
    """Most tokens of an answer."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the end-of-sequence tokens."""
    compare_generate: bool = True
    """Measure Hugging Face generate beside our own plain decoding."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    max_context: int = Field(default=8192, ge=2)
    """Most tokens of prompt and answer together, for which the cache is allocated; capped by the target."""
    compile: CompileMode = "off"
    """Whether target and drafters are compiled by torch.compile."""
    exact_phases: bool = False
    """Wait for the device after each phase, so that their times can be told apart; costs some overlap."""
    output: str
    """Folder of answers.jsonl, report.json and report.html."""

    @field_validator("sampling", mode="before")
    @classmethod
    def _begin_with_the_first_temperature(cls, value: Any, info: ValidationInfo) -> Any:
        """Beside `temperatures` a `sampling.temperature` of 0 counts as not given; typical acceptance refuses it."""
        match value, info.data:
            case {"acceptance_method": "typical"}, {"temperatures": (first, *_)}:
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
    """Folders of trained drafters, or drafters by type: {type: ngram}, {type: trained, folder: ...}. Also accepted:
    {type: pretrained, model: ...}, and {type: trained, folder: ..., N: 1, name: ...}, which fixes one N of a
    drafter that is trained for several."""
    trees: tuple[Shape, ...] = Field(default=(AdaptiveShape(type="adaptive", depth=8),), min_length=1)
    """Shapes of the draft trees; every drafter is measured with each of them."""
    questions: str
    """File of JSON Lines: Spec-Bench questions, rows of {prompt}, or chats whose user turns are asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=128, ge=1)
    """Most tokens of an answer."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    compile: CompileMode = "off"
    """Whether target and drafters are compiled by torch.compile."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    def evaluation(self) -> EvaluateConfig:
        """The evaluation that measures it."""
        shared = self.model_dump(exclude={"report", "compile"})
        own = {"output": "", "compare_generate": False, "exact_phases": True, "compile": self.compile}
        return EvaluateConfig.model_validate(shared | own)


class EngineBenchmarkConfig(Config):
    """What `pipelines.benchmark engine` measures."""

    target: TargetConfig
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """Folders of trained drafters, or drafters by type, as for pipelines.benchmark decode."""
    tree: Shape = AdaptiveShape(type="adaptive", depth=8)
    """Shape of the draft trees."""
    batches: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(default=(1, 2, 4, 8, 16, 32), min_length=1)
    """Numbers of sequences that run at the same time, measured one after another."""
    questions: str
    """File of questions, as for pipelines.evaluate; of several turns the first is asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    num_answers: int | None = Field(default=None, ge=1)
    """Answers in each round, at least as many as run at a time; null for one to every question."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=96, ge=1)
    """Most tokens of an answer."""
    rounds: int = Field(default=3, ge=1)
    """How often every way to decode is measured."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


class StalenessConfig(Config):
    """What `pipelines.benchmark staleness` measures: tau of chains whose memory is late."""

    target: TargetConfig
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """Folders of trained drafters, or drafters by type, as for pipelines.benchmark decode."""
    questions: str
    """File of questions, as for pipelines.evaluate; of several turns the first is asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    depth: int = Field(default=6, ge=1)
    """Tokens of a draft."""
    lags: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 1, 2, 4, 6, 8, 12), min_length=1)
    """Tokens before the root at which memory ends; must hold 0, what the others are compared with."""
    max_new_tokens: int = Field(default=96, ge=2)
    """Most tokens of an answer."""
    max_context: int = Field(default=8192, ge=2)
    """Most tokens of prompt and answer together; capped by the target's context."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

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
    """Folder of a trained drafter, or a drafter by type, such as {type: ngram}."""
    questions: str
    """File of questions, as for pipelines.evaluate; use others than those of a later measurement."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    nodes: int = Field(default=63, ge=1, le=512)
    """Nodes of the tree, its root not counted."""
    levels: int = Field(default=5, ge=1, le=32)
    """Most levels below the root; a drafter of fewer has fewer."""
    ranks: int = Field(default=10, ge=1, le=64)
    """Number of likeliest tokens of a level that are looked at as candidates."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Most tokens of an answer."""
    max_context: int = Field(default=8192, ge=2)
    """Most tokens of prompt and answer together; capped by the target's context."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    output: str | None = None
    """YAML file to write the tree to, for trees of other commands; null prints it."""
    report: str | None = None
    """JSON file for rates and tree, the same as --json FILE; null for none."""

    @model_validator(mode="after")
    def _check(self) -> "TreeSearchConfig":
        if self.output and self.report and Path(self.output).resolve() == Path(self.report).resolve():
            raise ValueError(
                f"output is '{self.output}' and report (--json) '{self.report}', the same file; the tree is YAML and "
                "the report JSON: name two files"
            )
        return self


class CompareConfig(Config):
    """Two reports to put side by side."""

    a: str
    """First report.json, what the other one is compared with."""
    b: str
    """Second report.json; ratios are b / a."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


class LiveConfig(Config):
    """One prompt to decode in the terminal."""

    target: TargetConfig
    drafter: str
    """Folder of a trained drafter."""
    tree: Shape = AdaptiveShape(type="adaptive", depth=8)
    """Shape of the draft trees."""
    prompt: str
    """Text that the model is asked."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=128, ge=1)
    """Most tokens of an answer."""
