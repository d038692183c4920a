"""How tokens are drawn, and how models are run. Torch-free."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from moray.config import Config

_GREEDY_BELOW = 1e-5
"""Lower temperatures are treated as 0; logits divided by much less would not be finite."""

CompileMode = Literal["off", "default"]
"""What torch.compile does to target and drafters (see `decoding.compiling`)."""


class SamplingParams(Config):
    """The target's output distribution and the randomness it is drawn with."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy, and so is anything below 1e-5."""
    top_k: int = Field(default=0, ge=0)
    """Number of likeliest tokens to draw from; 0 for all tokens."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the likeliest tokens that make up this share of the probability; 1 for all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Tokens below this share of the likeliest one's probability are dropped; 0 drops none. See arXiv 2407.01082."""
    seed: int = 0
    """Seed of the random numbers."""
    acceptance_method: Literal["gumbel_coupled", "rejection", "typical"] = "gumbel_coupled"
    """How drafts are tested when sampling; gumbel_coupled and rejection are lossless, typical is NOT. "gumbel_coupled":
    the token is the target's Gumbel-max sample, with noise that depends on seed and position alone, so the text is the
    same for every drafter and tree. "rejection": the classic test (a chain is sampled from q; a tree's children count
    as point masses). "typical": NOT lossless, so it must be named: a draft is kept if the target finds it probable
    enough (Medusa, arXiv 2401.10774, section on typical acceptance), so the text does not follow the target's
    distribution."""
    typical_epsilon: float = Field(default=0.09, ge=0, le=1)
    """typical only: probability above which a draft is always kept. A draft x is kept if p(x) > min(typical_epsilon,
    typical_delta * exp(-entropy of p))."""
    typical_delta: float = Field(default=0.3, ge=0)
    """typical only: factor of exp(-entropy); a draft more probable than the product is kept."""

    renamed: ClassVar[Mapping[str, str]] = {"rule": "acceptance_method"}
    renamed_values: ClassVar[Mapping[str, Mapping[str, str]]] = {"acceptance_method": {"coupled": "gumbel_coupled"}}

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is always the likeliest one."""
        return self.temperature < _GREEDY_BELOW

    @property
    def is_lossless(self) -> bool:
        """Whether the text follows the target's distribution (and is its exact text, if greedy or Gumbel-coupled)."""
        return self.acceptance_method != "typical"

    @model_validator(mode="after")
    def _check_acceptance_method(self) -> "SamplingParams":
        if self.acceptance_method == "typical" and self.is_greedy:
            raise ValueError(
                f"acceptance_method is 'typical' and temperature {self.temperature:g}; typical acceptance needs one of "
                f"{_GREEDY_BELOW:g} or more: set temperature, or leave acceptance_method out for the greedy text"
            )
        return self
