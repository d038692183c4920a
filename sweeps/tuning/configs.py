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
    seed: int = 0


class OptunaSearch(Config):
    """Bayesian: Optuna's tree-structured Parzen estimator looks at the objective of earlier trials."""

    type: Literal["optuna"]
    num_trials: int = Field(ge=1)
    num_random: int = Field(default=8, ge=1)
    """Trials drawn at random before the first that is proposed."""
    seed: int = 0


Search = Annotated[GridSearch | RandomSearch | OptunaSearch, Field(discriminator="type")]


class LadderConfig(Config):
    """The rungs at which trials are measured: training tokens, or questions, grow by `reduction` from one to the next.

    With `stop`, ASHA (arXiv 1810.05934) lets the best 1 / reduction of a rung go on, and the others stop there.
    """

    rungs: int = Field(default=3, ge=1)
    reduction: int = Field(default=3, ge=2)
    stop: bool = True
