"""Configuration that all sweeps share: search, ladder and objective. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from moray.config import Config
from sweeps.tuning.spaces import Space

Objective = Literal["speedup", "tau", "tokens_per_second"]


class GridSearch(Config):
    """Tries every combination once."""

    type: Literal["grid"]


class RandomSearch(Config):
    """Draws combinations at random."""

    type: Literal["random"]
    num_trials: int = Field(ge=1)
    """Number of combinations to try."""
    seed: int = 0
    """Seed of the draws."""


class OptunaSearch(Config):
    """Bayesian search: Optuna's tree-structured Parzen estimator learns from the objective of earlier trials."""

    type: Literal["optuna"]
    num_trials: int = Field(ge=1)
    """Number of combinations to try."""
    num_random: int = Field(default=8, ge=1)
    """Number of random trials before the estimator proposes any."""
    seed: int = 0
    """Seed of the draws."""


Search = Annotated[GridSearch | RandomSearch | OptunaSearch, Field(discriminator="type")]


def check_space(space: Space, search: Search, own_keys: Mapping[str, str]) -> None:
    """Check the space of a sweep over trainings.

    Args:
        space: values to try.
        search: how they are chosen.
        own_keys: keys that cannot be swept, with the reason.

    Raises:
        ValueError: a key belongs to the sweep, or a grid is asked for a range.
    """
    for key, dimension in space.items():
        for own, reason in own_keys.items():
            if key == own or key.startswith(f"{own}."):
                raise ValueError(f"'{key}' cannot be swept: {reason}")
        if search.type == "grid" and not isinstance(dimension, list):
            raise ValueError(
                f"search.type is grid, but '{key}' is a range without end: list its values, or use another search.type"
            )


class LadderConfig(Config):
    """The rungs at which trials are measured. Each has `reduction` times the training tokens or questions of the last.

    With `stop`, ASHA (arXiv 1810.05934) promotes the best 1 / reduction of the trials on a rung and stops the others.
    """

    rungs: int = Field(default=3, ge=1)
    """Number of rungs, the maximum number of times that a trial is measured."""
    reduction: int = Field(default=3, ge=2)
    """Factor by which training tokens or questions grow from one rung to the next."""
    stop: bool = True
    """Stop all but the best 1 / reduction of the trials on a rung (ASHA); false continues all trials."""
