"""How tokens are drawn, and how models are run. Torch-free."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from moray.config import Config

_GREEDY_BELOW = 1e-5
"""Lower temperatures are taken as 0; logits divided by still less are not finite."""

CompileMode = Literal["off", "default"]
"""What torch.compile does to target and drafters (see `decoding.compiling`)."""


class SamplingParams(Config):
    """The target's output distribution and the randomness it is drawn with."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy, and so is anything below 1e-5."""
    top_k: int = Field(default=0, ge=0)
    """Number of likeliest tokens that are drawn from; 0 for every token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Share of the probability, likeliest tokens first, that is drawn from; 1 for every token."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Tokens below this share of the likeliest one's probability are dropped; 0 drops none. See arXiv 2407.01082."""
    seed: int = 0
    """Seed of the draws."""
    acceptance_method: Literal["gumbel_coupled", "rejection", "typical"] = "gumbel_coupled"
    """How drafts are tested when sampling; gumbel_coupled and rejection are lossless, typical is NOT. "gumbel_coupled":
    the token is the Gumbel-max sample of the target with noise that depends on seed and position alone, so the text is
    the same for every drafter and tree. "rejection": the classic test (chain sampled from q; a tree's children as point
    masses). "typical": NOT lossless, only by name: a draft is kept if the target finds it probable enough (Medusa,
    arXiv 2401.10774, section on typical acceptance), so the text does not follow the target's distribution."""
    typical_epsilon: float = Field(default=0.09, ge=0, le=1)
    """typical only: probability from which a draft is kept in any case. A draft x is kept if p(x) >
    min(typical_epsilon, typical_delta * exp(-entropy of p))."""
    typical_delta: float = Field(default=0.3, ge=0)
    """typical only: factor of exp(-entropy), the probability from which a draft is kept if that is lower."""

    renamed: ClassVar[Mapping[str, str]] = {"rule": "acceptance_method"}
    renamed_values: ClassVar[Mapping[str, Mapping[str, str]]] = {"acceptance_method": {"coupled": "gumbel_coupled"}}

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the likeliest one."""
        return self.temperature < _GREEDY_BELOW

    @property
    def is_lossless(self) -> bool:
        """Whether the text follows the target's distribution (and is its very text, where greedy or Gumbel-coupled)."""
        return self.acceptance_method != "typical"

    @model_validator(mode="after")
    def _check_rule(self) -> "SamplingParams":
        if self.acceptance_method == "typical" and self.is_greedy:
            raise ValueError(
                f"acceptance_method is 'typical' and temperature {self.temperature:g}; typical acceptance needs one of "
                f"{_GREEDY_BELOW:g} or more: set temperature, or leave acceptance_method out for the greedy text"
            )
        return self
