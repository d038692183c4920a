"""Configuration of sweeps of trainings. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from moray.bench.configs import EvaluateConfig
from moray.cluster.configs import RayConfig
from moray.cluster.training.configs import DistillConfig
from moray.config import Config, load_config
from moray.errors import ConfigError
from moray.targets.spec import TargetConfig
from moray.trees.shapes import AdaptiveShape, Shape
from sweeps.tuning.configs import GridSearch, LadderConfig, Objective, OptunaSearch, Search, check_space
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
    """Maximum number of tokens per answer."""
    rounds: int = Field(default=3, ge=1)
    """How often each prompt is decoded each way; the fastest counts. Parallel trials can only make it slower."""
    batch_size: int = Field(default=1, ge=1)
    """Number of sequences decoded together. The speed-up falls as it grows, because larger passes have less spare
    compute for drafts. Give several times as many questions."""
    max_model_len: int = Field(default=8192, ge=2)
    """Maximum tokens of prompt and answer together; capped by the target's context."""
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads; null leaves it to torch."""
    cpus: float = Field(default=1.0, gt=0)
    """Logical CPUs of the measuring task."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs of the measuring task, 0 for the CPU; null for as many as a worker has."""

    renamed: ClassVar[Mapping[str, str]] = {"max_context": "max_model_len"}

    def evaluation(self, target: TargetConfig, folders: tuple[str, ...]) -> EvaluateConfig:
        """The evaluation that measures the drafters in these folders."""
        return EvaluateConfig(
            target=target,
            drafters=folders,
            trees=(self.tree,),
            questions=self.questions,
            num_questions=self.num_questions,
            max_new_tokens=self.max_new_tokens,
            max_model_len=self.max_model_len,
            threads=self.threads,
            compare_generate=False,
            exact_phases=True,
            output="",
        )


class ConfirmConfig(Config):
    """How the winner is confirmed. The best trials are trained again from other seeds, and all are measured side by
    side with nothing else running."""

    finalists: int = Field(default=2, ge=1)
    """Number of best trials to train again from other seeds."""
    seeds: int = Field(default=2, ge=1)
    """Number of trainings per finalist, including the one from the search."""


class SweepConfig(Config):
    """The distillations to compare, and how to search them."""

    distill: tuple[str, ...] = Field(min_length=1)
    """Arguments of pipelines.distill that all trials share: YAML files, then overrides."""
    space: Space = Field(min_length=1)
    """Values to try, as lists or ranges, by the dotted name of a key of pipelines.distill."""
    search: Search = GridSearch(type="grid")
    """How trials are chosen: all combinations (grid), at random, or proposed by Optuna."""
    ladder: LadderConfig = LadderConfig()
    stop_below_break_even: float | None = Field(default=None, gt=0, le=1)
    """Stop a trial on a rung if its tau is below this share of the tau at which drafts pay; null for never. That tau is
    measured before anything trains."""
    training_tokens: int | None = Field(default=None, ge=1)
    """Training tokens of a full trial, counting each batch as full; null for the length that distill sets."""
    objective: Objective = "speedup"
    """Figure to maximise: speed-up over plain decoding, tokens per target pass, or tokens per second."""
    decoding: DecodingConfig
    confirm: ConfirmConfig = ConfirmConfig()
    max_concurrent: int | None = Field(default=None, ge=1)
    """Maximum parallel trials; null for as many as fit on the machine or cluster."""
    max_failures: int = Field(default=2, ge=0)
    """How often a trial is retried if its process dies; 0 for never."""
    output: str
    """Folder of the sweep: its trials, summary, report and best drafter."""
    resume: bool = False
    """Resume the sweep in output, the same as --resume."""
    ray: RayConfig = RayConfig()

    renamed: ClassVar[Mapping[str, str]] = {"distil": "distill"}

    @model_validator(mode="after")
    def _check(self) -> "SweepConfig":
        check_space(self.space, self.search, _OWN_KEYS)
        if self.stop_below_break_even is not None:
            if isinstance(self.search, OptunaSearch):
                raise ValueError(
                    "stop_below_break_even measures all trials before the first one trains, and search.type optuna "
                    "proposes them later: give grid or random, or leave it out"
                )
            if isinstance(self.decoding.tree, AdaptiveShape):
                raise ValueError(
                    "stop_below_break_even needs a tree of fixed size, and decoding.tree is adaptive, which drafts "
                    "only where it pays: give another tree, or leave it out"
                )
        return self

    def trial(self, choices: Choices, output: str = "") -> DistillConfig:
        """The configuration of the distillation that a trial runs, at full length.

        Raises:
            ConfigError: pipelines.distill does not accept a key or value of the space.
        """
        folder = output or str(Path(self.output) / "trials" / "any")
        words = [*self.distill, *overrides(choices), f"output={folder}", "validation=null"]
        try:
            return load_config(DistillConfig, words)
        except ConfigError as error:
            where = f"with {', '.join(overrides(choices))}: " if choices else ""
            raise ConfigError(f"distill and space, {where}{error}") from None
