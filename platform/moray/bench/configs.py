"""Configuration of evaluations, benchmarks, tree search, comparisons and live decoding. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from moray.config import Config
from moray.decoding.params import CompileMode, SamplingParams
from moray.drafters.configs import UsableConfig
from moray.targets.spec import TargetConfig
from moray.trees.shapes import MAX_DEPTH, AdaptiveShape, Shape


class EvaluateConfig(Config):
    """The drafters and trees to measure, on which questions, and how."""

    target: TargetConfig
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """Folders of trained drafters, or drafters by type: {type: ngram}, {type: trained, folder: ...}. Also accepted:
    {type: pretrained, model: ...}, and {type: trained, folder: ..., num_target_layers: 1, name: ...}, which fixes one N
    of a drafter that is trained for several."""
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
    """Maximum number of tokens per answer."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, in addition to the end-of-sequence tokens."""
    compare_generate: bool = True
    """Also measure Hugging Face generate, next to our own plain decoding."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    max_model_len: int = Field(default=8192, ge=2)
    """Maximum tokens of prompt and answer together, and size of the KV cache; capped by the target."""
    compile: CompileMode = "off"
    """Whether target and drafters are compiled by torch.compile."""
    exact_phases: bool = False
    """Synchronise with the device after each phase, so that phase times are exact; costs some overlap."""
    output: str
    """Folder for answers.jsonl, report.json and report.html."""

    renamed: ClassVar[Mapping[str, str]] = {"max_context": "max_model_len"}

    @field_validator("sampling", mode="before")
    @classmethod
    def _begin_with_the_first_temperature(cls, value: Any, info: ValidationInfo) -> Any:
        """With typical acceptance, which refuses temperature 0, replace it by the first of `temperatures`."""
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
        _ = self.samplings  # building them refuses settings that a temperature cannot be combined with
        return self

    @property
    def samplings(self) -> tuple[SamplingParams, ...]:
        """The sampling parameters, one set per temperature."""
        temperatures = self.temperatures or (self.sampling.temperature,)
        given = self.sampling.model_dump()
        return tuple(SamplingParams.model_validate(given | {"temperature": value}) for value in temperatures)


class DecodeBenchmarkConfig(Config):
    """What `pipelines.benchmark decode` measures."""

    target: TargetConfig
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """Folders of trained drafters, or drafters by type: {type: ngram}, {type: trained, folder: ...}. Also accepted:
    {type: pretrained, model: ...}, and {type: trained, folder: ..., num_target_layers: 1, name: ...}, which fixes one N
    of a drafter that is trained for several."""
    trees: tuple[Shape, ...] = Field(default=(AdaptiveShape(type="adaptive", depth=8),), min_length=1)
    """Shapes of the draft trees; every drafter is measured with each of them."""
    questions: str
    """File of JSON Lines: Spec-Bench questions, rows of {prompt}, or chats whose user turns are asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=128, ge=1)
    """Maximum number of tokens per answer."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    compile: CompileMode = "off"
    """Whether target and drafters are compiled by torch.compile."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    def evaluation(self) -> EvaluateConfig:
        """The evaluation that this benchmark runs."""
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
    """Numbers of sequences that are decoded at the same time, measured one after another."""
    questions: str
    """File of questions, as for pipelines.evaluate; only the first turn of each is asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    num_answers: int | None = Field(default=None, ge=1)
    """Answers per round, raised to the batch size if that is larger; null for one per question."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=96, ge=1)
    """Maximum number of tokens per answer."""
    rounds: int = Field(default=3, ge=1)
    """Number of rounds; each measures plain and drafted decoding."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


class StalenessConfig(Config):
    """What `pipelines.benchmark staleness` measures: tau of chains that are drafted with stale memory."""

    target: TargetConfig
    drafters: tuple[str | UsableConfig, ...] = Field(min_length=1)
    """Folders of trained drafters, or drafters by type, as for pipelines.benchmark decode."""
    questions: str
    """File of questions, as for pipelines.evaluate; only the first turn of each is asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    depth: int = Field(default=6, ge=1)
    """Number of tokens per draft chain."""
    lags: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 1, 2, 4, 6, 8, 12), min_length=1)
    """How many tokens before the root the memory ends; must include 0, the baseline of the others."""
    max_new_tokens: int = Field(default=96, ge=2)
    """Maximum number of tokens per answer."""
    max_model_len: int = Field(default=8192, ge=2)
    """Maximum tokens of prompt and answer together; capped by the target's context."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    renamed: ClassVar[Mapping[str, str]] = {"max_context": "max_model_len"}

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
    """What `pipelines.benchmark tree` searches: the best sparse tree for one drafter."""

    target: TargetConfig
    drafter: str | UsableConfig
    """Folder of a trained drafter, or a drafter by type, such as {type: ngram}."""
    questions: str
    """File of questions, as for pipelines.evaluate; do not reuse those of a later measurement."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    nodes: int = Field(default=63, ge=1, le=512)
    """Number of nodes in the tree, not counting the root."""
    levels: int = Field(default=5, ge=1, le=32)
    """Maximum number of levels below the root; capped by what the drafter can draft."""
    ranks: int = Field(default=10, ge=1, le=64)
    """Number of most likely tokens per level that are considered as candidates."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Maximum number of tokens per answer."""
    max_model_len: int = Field(default=8192, ge=2)
    """Maximum tokens of prompt and answer together; capped by the target's context."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    output: str | None = None
    """YAML file to write the tree to, for the key trees of other commands; null prints it."""
    report: str | None = None
    """JSON file for rates and tree, the same as --json FILE; null for none."""

    renamed: ClassVar[Mapping[str, str]] = {"max_context": "max_model_len"}

    @model_validator(mode="after")
    def _check(self) -> "TreeSearchConfig":
        if self.output and self.report and Path(self.output).resolve() == Path(self.report).resolve():
            raise ValueError(
                f"output is '{self.output}' and report (--json) '{self.report}', the same file; the tree is YAML and "
                "the report JSON: name two files"
            )
        return self


class CompareConfig(Config):
    """Two reports to compare."""

    a: str
    """First report.json, the baseline."""
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
    """Text of the user's message."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=128, ge=1)
    """Maximum number of tokens in the answer."""
