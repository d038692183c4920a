"""Configuration of an evaluation. Torch-free."""

from typing import Annotated

from pydantic import Field, model_validator

from moray.config import Config
from moray.decoding.params import SamplingParams
from moray.targets.spec import TargetConfig
from moray.trees.shapes import Shape


class EvaluateConfig(Config):
    """Which drafters and trees to measure, on what, and how."""

    target: TargetConfig
    drafters: tuple[str, ...] = Field(min_length=1)
    """Folders of trained drafters."""
    trees: tuple[Shape, ...] = Field(min_length=1)
    questions: str
    """Spec-Bench JSON Lines, rows of {prompt}, or chats whose user turns are asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """How many, spread evenly over categories; None for all."""
    categories: tuple[str, ...] = ()
    """Empty for all."""
    sampling: SamplingParams = SamplingParams()
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Each question is asked at each of them; empty for `sampling.temperature` alone."""
    max_new_tokens: int = Field(default=128, ge=1)
    compare_generate: bool = True
    """Measure Hugging Face `generate` beside our own plain decoding."""
    threads: int | None = Field(default=1, ge=1)
    """torch threads; None for torch's own choice."""
    output: str
    """Folder of answers.jsonl, report.json and report.html."""

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


class LiveConfig(Config):
    """One prompt to decode in the terminal."""

    target: TargetConfig
    drafter: str
    """Folder of a trained drafter."""
    tree: Shape
    prompt: str
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = Field(default=128, ge=1)
