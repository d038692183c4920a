"""How tokens are drawn. Torch-free."""

from typing import Literal

from pydantic import Field

from moray.config import Config


class SamplingParams(Config):
    """The target's output distribution and the randomness it is drawn with."""

    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_k: int = Field(default=0, ge=0)
    """0 keeps every token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = 0
    rule: Literal["coupled", "rejection"] = "coupled"
    """How drafts are tested when sampling. "coupled": the token is the Gumbel-max sample of the target with
    noise that depends on seed and position alone, so the text is the same for every drafter and tree.
    "rejection": the classic test (chain sampled from q; a tree's children as point masses)."""

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the likeliest one."""
        return self.temperature == 0
