"""What is asked of the engine, and what it says while it answers. Torch-free: requests cross processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from moray.config import Config
from moray.decoding.params import SamplingParams

MAX_TOP_LOGPROBS = 20


class Request(Config):
    """One sequence to answer. From it alone the sequence can be taken up anywhere, at any token."""

    prompt: tuple[int, ...] = Field(min_length=1)
    params: SamplingParams = SamplingParams()
    """`acceptance_method` is "gumbel_coupled": of the methods for sampling, it makes the text a function of the
    seed."""
    max_new_tokens: int = Field(ge=1)
    """Those already `generated` among them."""
    stop: tuple[str, ...] = ()
    continues_prompt: bool = False
    """The answer's text, in which stop strings are looked for, goes on with the prompt's (see `SettledText`)."""
    ignore_eos: bool = False
    """An end-of-sequence token does not end the answer."""
    sequence: int = 0
    """Numbers answers to the same prompt: each is drawn with noise of its own."""
    generated: tuple[int, ...] = ()
    """The first tokens of the answer, where it was begun elsewhere."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the answer holds."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token as often as the answer holds it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of tokens."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Report the target's log-probability of every token, and of so many of the likeliest; None: of none."""
    drafter: str | None = ""
    """Name of one of the engine's draft sources; "" is its first, None decodes plainly."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities under the target's own distribution, before temperature and all filters."""

    token: float
    top: list[tuple[int, float]]
    """The likeliest tokens, best first."""


@dataclass(frozen=True)
class RequestOutput:
    """What one step has added to an answer."""

    number: int
    """That `Engine.submit` gave."""
    tokens: list[int]
    num_accepted: int = 0
    """So many of them, from the first on, were drafted."""
    num_path: int = 0
    """Draft tokens that the target accepted; more than `num_accepted` where the answer ended among them."""
    num_levels: int = 0
    """Levels drafted for this cycle (see `TokenTree.num_levels`)."""
    num_target_layers: int = 0
    """N of this cycle's draft (see `Drafter.layer_counts`); without a draft it says nothing."""
    rejected: list[int] = field(default_factory=list)
    """Drafted tokens of this cycle that were not accepted."""
    finish_reason: str | None = None
    """"stop", "length", or None while the answer goes on."""
    logprobs: list[TokenLogprobs] | None = None
