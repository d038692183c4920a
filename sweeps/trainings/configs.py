"""Configuration of sweeps. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from moray.bench.configs import EvaluateConfig
from moray.cluster.configs import RayConfig
from moray.cluster.training.configs import DistillConfig
from moray.config import Config, load_config
from moray.errors import ConfigError
from moray.targets.spec import TargetConfig
from moray.trees.shapes import Shape
from sweeps.tuning.configs import GridSearch, LadderConfig, Objective, Search
from sweeps.tuning.spaces import Choices, Space, overrides

_OWN_KEYS = {
    "output": "every trial has a folder of its own below the sweep's output",
    "activations": "all trials read one cache: name it in distill",
    "source": "all trials read one cache",
    "train.max_steps": "training_tokens and the ladder decide how long a trial trains",
    "ray": "it belongs to the sweep",
    "target": "all trials train for one target",
    "workers": "they say how much room a trial takes, which is the same for all",
    "validation": "the sweep measures every trial itself",
    "trackers": "they are the same for all trials: name them in distill",
}


class DecodingConfig(Config):
    """How a drafter is measured: plain decoding and speculation in turn, on the same prompts."""

    tree: Shape
    """Shape of the draft trees."""
    questions: str
    """File of JSON Lines: Spec-Bench questions, rows of {prompt}, or chats whose user turns are asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    max_new_tokens: int = Field(default=64, ge=2)
    """Most tokens of an answer."""
    rounds: int = Field(default=3, ge=1)
    """How often each prompt is decoded each way; the fastest counts. Other trials can only make it slower."""
    batch_size: int = Field(default=1, ge=1)
    """Sequences that are decoded together. What a drafter is worth falls as it grows: passes over many sequences have
    less to spare. Give several times as many questions."""
    max_context: int = Field(default=8192, ge=2)
    """Most tokens of prompt and answer together; capped by the target's context."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    cpus: float = Field(default=1.0, gt=0)
    """Logical CPUs of the task that measures."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs of the task that measures, 0 for the CPU; null for as many as a worker has."""

    def evaluation(self, target: TargetConfig, folders: tuple[str, ...]) -> EvaluateConfig:
        """The evaluation that measures the drafters in these folders."""
        return EvaluateConfig(
            target=target,
            drafters=folders,
            trees=(self.tree,),
            questions=self.questions,
            num_questions=self.num_questions,
            max_new_tokens=self.max_new_tokens,
            max_context=self.max_context,
            threads=self.threads,
            compare_generate=False,
            exact_phases=True,
            output="",
        )


class ConfirmConfig(Config):
    """How the winner is made sure of. The best trials are trained again from other seeds, and all are measured side by
    side, alone on the machine."""

    finalists: int = Field(default=2, ge=1)
    """Best trials that are trained again from other seeds."""
    seeds: int = Field(default=2, ge=1)
    """Trainings of each finalist, the one of the sweep included."""


class SweepConfig(Config):
    """Which distillations to compare, how, and for how long."""

    distill: tuple[str, ...] = Field(min_length=1)
    """Words of pipelines.distill that all trials share: YAML files, then overrides."""
    space: Space = Field(min_length=1)
    """Lists or ranges of values of any key of pipelines.distill, by its dotted name."""
    search: Search = GridSearch(type="grid")
    """How trials are chosen: every combination (grid), at random, or proposed by Optuna."""
    ladder: LadderConfig = LadderConfig()
    training_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a trial trained to the end, counting every batch as full; null for what distill says."""
    objective: Objective = "speedup"
    """What is maximised: speed-up over plain decoding, tokens per target pass, or tokens per second."""
    decoding: DecodingConfig
    confirm: ConfirmConfig = ConfirmConfig()
    max_concurrent: int | None = Field(default=None, ge=1)
    """Most trials at a time; null for as many as the machine or cluster has room for."""
    max_failures: int = Field(default=2, ge=0)
    """How often a trial whose process died is tried again; 0 for never."""
    output: str
    """Folder of the sweep: its trials, summary, report and best drafter."""
    resume: bool = False
    """Go on with the sweep in output, the same as --resume."""
    ray: RayConfig = RayConfig()

    renamed: ClassVar[Mapping[str, str]] = {"distil": "distill"}

    @field_validator("space")
    @classmethod
    def _leaves_ours_alone(cls, value: Space) -> Space:
        for key in value:
            for own, reason in _OWN_KEYS.items():
                if key == own or key.startswith(f"{own}."):
                    raise ValueError(f"'{key}' cannot be swept: {reason}")
        return value

    @model_validator(mode="after")
    def _check(self) -> "SweepConfig":
        ranges = [key for key, dimension in self.space.items() if not isinstance(dimension, list)]
        if ranges and self.search.type == "grid":
            raise ValueError(
                f"search.type is grid, but '{ranges[0]}' is a range without end: list its values, or use "
                "search.type=random or optuna"
            )
        return self

    def trial(self, choices: Choices, output: str = "") -> DistillConfig:
        """The distillation that a trial is, in full length.

        Raises:
            ConfigError: a key or a value of the space is not one of pipelines.distill.
        """
        folder = output or str(Path(self.output) / "trials" / "any")
        words = [*self.distill, *overrides(choices), f"output={folder}", "validation=null"]
        try:
            return load_config(DistillConfig, words)
        except ConfigError as error:
            where = f"with {', '.join(overrides(choices))}: " if choices else ""
            raise ConfigError(f"distill and space, {where}{error}") from None
