"""What every sweep's configuration has: a way to search, a ladder, an objective. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field

from moray.config import Config

Objective = Literal["speedup", "tau", "tokens_per_second"]


class GridSearch(Config):
    """Every combination once."""

    type: Literal["grid"]


class RandomSearch(Config):
    """Combinations drawn at random."""

    type: Literal["random"]
    num_trials: int = Field(ge=1)
    """Number of combinations to try."""
    seed: int = 0
    """Seed of the draws."""


class OptunaSearch(Config):
    """Bayesian: Optuna's tree-structured Parzen estimator looks at the objective of earlier trials."""

    type: Literal["optuna"]
    num_trials: int = Field(ge=1)
    """Number of combinations to try."""
    num_random: int = Field(default=8, ge=1)
    """Trials drawn at random before the first that is proposed."""
    seed: int = 0
    """Seed of the draws."""


Search = Annotated[GridSearch | RandomSearch | OptunaSearch, Field(discriminator="type")]


class LadderConfig(Config):
    """The rungs at which trials are measured. Training tokens, or questions, grow by `reduction` from one to the next.

    With `stop`, ASHA (arXiv 1810.05934) lets the best 1 / reduction of a rung go on, and the others stop there.
    """

    rungs: int = Field(default=3, ge=1)
    """Number of rungs, the times that a trial is measured at most."""
    reduction: int = Field(default=3, ge=2)
    """Factor by which training tokens, or questions, grow from one rung to the next."""
    stop: bool = True
    """Stop all but the best 1 / reduction of a rung (ASHA); false lets every trial go on."""
