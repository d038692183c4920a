"""Configuration of sweeps over decoding choices. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from moray.bench.configs import EvaluateConfig
from moray.cluster.configs import RayConfig
from moray.config import Config, validate
from moray.decoding.params import SamplingParams
from moray.errors import ConfigError
from moray.explain import did_you_mean
from moray.targets.spec import TargetConfig
from moray.trees.shapes import AnyShape, Shape
from sweeps.decoding.combinations import BUILT, KEYS
from sweeps.tuning.configs import GridSearch, LadderConfig, Objective, Search
from sweeps.tuning.spaces import Space


class _Trees(Config):
    """Wraps the trees of a space, so that they are validated like any configuration."""

    tree: tuple[Shape, ...]


class ConfirmShapesConfig(Config):
    """How the winners are confirmed. The best shapes of every drafter are measured again in one process, in turn on the
    same questions, with nothing else running."""

    finalists: int = Field(default=2, ge=1)
    """Number of best shapes per drafter to measure again."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions of that measurement; null for as many as on the ladder's last rung."""


class TuneDecodingConfig(Config):
    """The tree shapes to try on trained drafters, and how to search them."""

    target: TargetConfig
    drafters: tuple[str, ...] = Field(min_length=1)
    """Folders of trained drafters; each drafter gets its own winner."""
    space: Space = Field(min_length=1)
    """Lists or ranges of tree.type, tree.depth, tree.breadth, tree.nodes, tree and draft_vocab_size. `tree` lists whole
    trees; `draft_vocab_size` is the number of tokens that may be proposed (null: as trained)."""
    activations: str | None = None
    """Cache whose responses give the token frequencies for draft_vocab_size; null without draft_vocab_size."""
    search: Search = GridSearch(type="grid")
    """How shapes are chosen for each drafter: all (grid), at random, or proposed by Optuna."""
    ladder: LadderConfig = LadderConfig(rungs=3, reduction=2)
    """Rungs at which shapes are compared, each with more questions; the last rung asks all."""
    objective: Objective = "speedup"
    """Figure to maximise: speed-up over plain decoding, tokens per target pass, or tokens per second."""
    questions: str
    """File of JSON Lines: Spec-Bench questions, rows of {prompt}, or chats whose user turns are asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions on the last rung, one of each category in turn; null for all."""
    max_new_tokens: int = Field(default=64, ge=2)
    """Maximum number of tokens per answer."""
    max_model_len: int = Field(default=8192, ge=2)
    """Maximum tokens of prompt and answer together; capped by the target's context."""
    sampling: SamplingParams = SamplingParams()
    threads: int | None = Field(default=1, ge=1)
    """Number of torch threads per measurement; null leaves it to torch."""
    cpus: float = Field(default=1.0, gt=0)
    """Logical CPUs per measurement."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs per measurement; 0 runs it on the CPU."""
    confirm: ConfirmShapesConfig = ConfirmShapesConfig()
    max_concurrent: int | None = Field(default=None, ge=1)
    """Maximum parallel measurements; null for one on a machine without GPUs, else as many as fit. Parallel measurements
    on one machine distort each other's timings."""
    max_failures: int = Field(default=2, ge=0)
    """How often a measurement is retried if its process dies; 0 for never."""
    output: str
    """Folder of the sweep: its measurements, summary and report."""
    resume: bool = False
    """Resume the sweep in output, the same as --resume."""
    ray: RayConfig = RayConfig()

    renamed: ClassVar[Mapping[str, str]] = {"max_context": "max_model_len"}

    @field_validator("drafters")
    @classmethod
    def _names_differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [Path(folder).name for folder in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two folders are called '{name}', which is the drafter's name here: rename one")
        return value

    @field_validator("space")
    @classmethod
    def _knows_its_keys(cls, value: Space) -> Space:
        for key in value:
            if key not in KEYS:
                raise ValueError(f"'{key}' is no decoding choice{did_you_mean(key, KEYS)}; there are {', '.join(KEYS)}")
        if "tree" in value and any(key.startswith("tree.") for key in value):
            raise ValueError("'tree' lists whole trees; 'tree.type' and the others build them: give one or the other")
        if "tree" not in value and "tree.type" not in value:
            raise ValueError("no trees: give 'tree' as a list of trees, or 'tree.type' as a list of types")
        for key, dimension in value.items():
            if not isinstance(dimension, list) and (key in ("tree", "tree.type") or dimension.type != "integers"):
                raise ValueError(f"'{key}' is a range of {dimension.type}; it takes a list, a number also integers")
        _check_trees(value.get("tree", []), value.get("tree.type", []))
        return value

    @model_validator(mode="after")
    def _check(self) -> "TuneDecodingConfig":
        ranges = [key for key, dimension in self.space.items() if not isinstance(dimension, list)]
        if ranges and self.search.type == "grid":
            raise ValueError(
                f"search.type is grid, but '{ranges[0]}' is a range: list its values, or use search.type=random or "
                "optuna"
            )
        sizes = self.space.get("draft_vocab_size", [None])
        if self.activations is None and sizes != [None]:
            raise ValueError(
                "draft_vocab_size needs activations: the cache whose responses tell which tokens are frequent"
            )
        if self.target.device == "cuda" and not self.gpus:
            raise ValueError("target.device is cuda, but gpus is 0: give the GPUs of a measurement")
        return self

    @property
    def folders(self) -> dict[str, str]:
        """The drafters' folders by name."""
        return {Path(folder).name: folder for folder in self.drafters}

    def evaluation(
        self, drafters: tuple[str, ...], trees: tuple[AnyShape, ...], output: str, num_questions: int
    ) -> EvaluateConfig:
        """The evaluation that measures drafter folders with these trees and stores its answers in `output`."""
        target = self.target if self.gpus else self.target.model_copy(update={"device": "cpu"})
        return EvaluateConfig(
            target=target,
            drafters=drafters,
            trees=trees,
            questions=self.questions,
            num_questions=num_questions,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            max_model_len=self.max_model_len,
            threads=self.threads,
            compare_generate=False,
            exact_phases=True,
            output=output,
        )


def _check_trees(trees: object, types: object) -> None:
    """Refuse invalid trees, and types of tree that cannot be built from other keys."""
    try:
        validate(_Trees, {"tree": trees})
    except ConfigError as error:
        raise ValueError(str(error)) from None
    for name in types if isinstance(types, list) else []:
        if name not in BUILT:
            raise ValueError(
                f"'tree.type' holds '{name}'{did_you_mean(str(name), tuple(BUILT))}; it builds {', '.join(BUILT)}; "
                "list others whole, as 'tree'"
            )
