"""Configuration that all sweeps share: search, ladder and objective. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field

from moray.config import Config

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
