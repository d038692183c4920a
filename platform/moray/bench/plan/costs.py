"""Seconds of the parts of a cycle, in a YAML file: measured here, or written by hand for a machine that is elsewhere.

passes:                 target passes: by sequences, then by tokens of each: 1 if plain, k + 1 for a chain of k
  1: {1: 0.021, 9: 0.032}
drafts:                 chains: by drafter, by sequences, then by tokens of the chain
  eagle: {1: {1: 0.003, 8: 0.020}}
trees:                  other trees: by drafter, by the tree's name, by sequences; left out for none
  eagle: {dynamic-4x4-16: {1: 0.016}}
rest: {1: 0.001}        everything else in a cycle, by sequences; left out for none
plain: {1: 0.021}       a whole cycle of plain decoding, by sequences; left out for a pass of one token and the rest
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import yaml
from pydantic import Field, field_validator

from moray.config import Config, validate
from moray.errors import ConfigError
from moray.explain import one_line
from moray.trees.shapes import AnyShape, SparseShape

MAX_DRIFT = 0.1
"""Largest share by which two measurements of the same cycles may differ on an idle machine."""

_Size = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0)]
_BySize = dict[_Size, _Seconds]

T = TypeVar("T")


class CycleCostTable(Config):
    """Seconds of a cycle's parts. Sizes between those given are interpolated linearly; larger ones are refused, and for
    smaller ones the smallest counts."""

    machine: str = ""
    """Where they were measured."""
    threads: int | None = None
    """Number of torch threads that they were measured with."""
    passes: dict[_Size, _BySize] = Field(min_length=1)
    """Target passes: by number of sequences, then by tokens of each sequence, root included."""
    drafts: dict[str, dict[_Size, _BySize]] = Field(default_factory=dict)
    """Chains, with what the drafter reads of the last cycle: by drafter, number of sequences, tokens of the chain."""
    trees: dict[str, dict[str, _BySize]] = Field(default_factory=dict)
    """Trees that are no chains: by drafter, key of the tree (`tree_key`), number of sequences."""
    rest: _BySize = Field(default_factory=dict)
    """Everything else in a cycle, by number of sequences."""
    plain: _BySize = Field(default_factory=dict)
    """A whole cycle of plain decoding, by number of sequences."""

    @field_validator("passes", "drafts", "trees")
    @classmethod
    def _check(cls, value: dict) -> dict:
        for key, inner in value.items():
            if not inner or any(isinstance(each, dict) and not each for each in inner.values()):
                raise ValueError(f"{key} has no seconds; give at least one size")
        return value

    @field_validator("passes")
    @classmethod
    def _check_plain(cls, value: dict[int, dict[int, float]]) -> dict[int, dict[int, float]]:
        for rows, own in value.items():
            if not own.get(1):
                raise ValueError(f"{rows} lacks the seconds of 1 token per sequence, which plain decoding needs")
        return value

    @classmethod
    def load(cls, path: str) -> "CycleCostTable":
        """Read a file.

        Raises:
            ConfigError: it is missing, not YAML, or lacks what is needed; names the key.
        """
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ConfigError("it holds no keys")
            return validate(cls, values)
        except OSError as error:
            raise ConfigError(
                f"costs '{path}' cannot be read ({error.strerror}); `pipelines.plan costs` makes one"
            ) from None
        except (yaml.YAMLError, ConfigError) as error:
            raise ConfigError(f"costs '{path}' is not a costs file: {one_line(str(error))}") from None

    def pass_seconds(self, num_rows: int, num_tokens: int) -> float:
        """One pass over `num_tokens` tokens of each of `num_rows` sequences.

        Raises:
            ConfigError: that is larger than any size in the file.
        """
        return _between(
            self.passes, num_rows, "passes, sequences", lambda own: _at(own, num_tokens, "passes, tokens per sequence")
        )

    def draft_seconds(self, drafter: str, num_rows: int, depth: int) -> float:
        """One chain of `depth` tokens for each of `num_rows` sequences; 0 for no token.

        Raises:
            ConfigError: the drafter is not there, or that is larger than any size in the file.
        """
        if not depth:
            return 0.0
        if drafter not in self.drafts:
            known = ", ".join(self.drafts) or "none"
            raise ConfigError(f"costs.drafts has no '{drafter}' (there are: {known}): measure it, or plan without it")
        return _between(
            self.drafts[drafter],
            num_rows,
            f"drafts.{drafter}, sequences",
            lambda own: _at(own, depth, f"drafts.{drafter}, tokens"),
        )

    def tree_seconds(self, drafter: str, shape: AnyShape, num_rows: int) -> float:
        """Seconds of drafting this tree once for each of `num_rows` sequences.

        Raises:
            ConfigError: the drafter or the tree is not there, or that is larger than any size in the file.
        """
        own, tree = self.trees.get(drafter, {}), tree_key(shape)
        if tree not in own:
            known = ", ".join(own) or "none"
            raise ConfigError(
                f"costs.trees has no '{tree}' of '{drafter}' (there are: {known}): measure it, or plan without it"
            )
        return _at(own[tree], num_rows, f"trees.{drafter}.{tree}, sequences")

    def rest_seconds(self, num_rows: int) -> float:
        """Everything else in a cycle of `num_rows` sequences."""
        return _at(self.rest, num_rows, "rest, sequences") if self.rest else 0.0

    def plain_seconds(self, num_rows: int) -> float:
        """A whole cycle of plain decoding of `num_rows` sequences.

        Raises:
            ConfigError: that is larger than any size in the file.
        """
        if not self.plain:
            return self.pass_seconds(num_rows, 1) + self.rest_seconds(num_rows)
        return _at(self.plain, num_rows, "plain, sequences")

    def can_draft_tree(self, drafter: str, shape: AnyShape) -> bool:
        """Whether this tree has costs, drafts and passes alike."""
        has_passes = all(max(own) > shape.num_nodes for own in self.passes.values())
        return has_passes and tree_key(shape) in self.trees.get(drafter, {})

    def can_draft(self, drafter: str, depth: int) -> bool:
        """Whether chains of this depth have costs, drafts and passes alike."""
        drafts = self.drafts.get(drafter)
        return (
            bool(drafts)
            and all(max(own) >= depth for own in drafts.values())
            and all(max(own) >= depth + 1 for own in self.passes.values())
        )


def tree_key(shape: AnyShape) -> str:
    """Name of a tree, which for a sparse one also tells its paths: `sparse-26` may be any of 26 nodes."""
    if not isinstance(shape, SparseShape):
        return shape.name
    return f"{shape.name}-{hashlib.sha256(repr(shape.paths).encode()).hexdigest()[:6]}"


def _at(points: Mapping[int, float], size: int, what: str) -> float:
    return _between(points, size, what, lambda seconds: seconds)


def _between(points: Mapping[int, T], size: int, what: str, seconds_of: Callable[[T], float]) -> float:
    """Interpolate linearly between the sizes on both sides; below the smallest, take the smallest."""
    sizes = sorted(points)
    index = bisect_left(sizes, size)
    if index == len(sizes):
        raise ConfigError(f"costs ({what}): {size} was asked for, the largest given is {sizes[-1]}; add larger ones")
    high = seconds_of(points[sizes[index]])
    if index == 0 or sizes[index] == size:
        return high
    low_size = sizes[index - 1]
    low = seconds_of(points[low_size])
    return low + (high - low) * (size - low_size) / (sizes[index] - low_size)
