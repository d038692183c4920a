"""Requests to the engine, and its outputs while it answers. Torch-free: requests cross processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from moray.config import Config
from moray.decoding.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOP_LOGPROBS = 20


class Request(Config):
    """One sequence to answer. It alone is enough to continue the sequence anywhere, from any token."""

    prompt: tuple[int, ...] = Field(min_length=1)
    params: SamplingParams = SamplingParams()
    """Sampling parameters; `acceptance_method` is "gumbel_coupled". Of the sampling methods, only this one makes the
    text a function of the seed."""
    max_new_tokens: int = Field(ge=1)
    """Maximum number of tokens of the answer, those already `generated` included."""
    stop: tuple[str, ...] = ()
    continues_prompt: bool = False
    """Whether the answer's text continues the prompt's when stop strings are searched (see `SettledText`)."""
    ignore_eos: bool = False
    """Whether to go on after an end-of-sequence token."""
    sequence: int = 0
    """Numbers the answers to the same prompt: each is drawn with its own noise."""
    generated: tuple[int, ...] = ()
    """The first tokens of the answer, if another engine has begun it."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that is in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it is in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of tokens."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Report log-probabilities of every token and of this many of the likeliest ones; None for no report."""
    drafter: str | None = ""
    """Name of one of the engine's draft sources; "" for the first, None for plain decoding."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities under the target's own distribution, before temperature and filters."""

    token: float
    top: list[tuple[int, float]]
    """The likeliest tokens, best first."""


@dataclass(frozen=True)
class TailPiece:
    """Keys and values of consecutive tokens in one of the target's last layers."""

    layer: int
    """1 for the last layer, 2 for the one before it, and so on."""
    begin: int
    """Position of the first of the tokens."""
    kv: "Tensor"
    """[tokens, width], heads as [k_h ; v_h]."""


@dataclass(frozen=True)
class PacedOutput:
    """What a paced sequence's client gets besides the tokens (see `decoding.engine.paced`)."""

    begin: int
    """Position of the first token whose memory this is."""
    num_new: int
    """Number of tokens whose memory this is."""
    memory: "tuple[Mapping[str, Tensor], ...]" = ()
    """Consecutive pieces [1, tokens, width] of each part of the drafter's memory, without its `TAIL`."""
    tail: tuple[TailPiece, ...] = ()
    """What is new of the target's last layers, as many as the client's drafts run."""
    seq: int = 0
    """The offer that this answers; 0 while the prompt is read."""
    is_void: bool = False
    """Whether the offer did not continue the sequence and was dropped."""
    is_last: bool = True
    """Whether the offer is answered completely; one without a tree may be answered token by token."""
    seconds: float = 0.0
    """Time of the pass."""


@dataclass(frozen=True)
class RequestOutput:
    """What one step has added to an answer."""

    number: int
    """The number that `Engine.submit` returned."""
    tokens: list[int]
    num_accepted: int = 0
    """How many of them, from the first on, were drafted."""
    num_path: int = 0
    """Draft tokens that the target accepted; more than `num_accepted` if the answer ended within them."""
    num_levels: int = 0
    """Levels drafted for this cycle (see `TokenTree.num_levels`)."""
    num_nodes: int = 0
    """Draft nodes that this cycle's pass verified, root not counted."""
    num_target_layers: int = 0
    """N of this cycle's draft (see `Drafter.layer_counts`); meaningless without a draft."""
    rejected: list[int] = field(default_factory=list)
    """Tokens drafted in this cycle that were not accepted."""
    finish_reason: str | None = None
    """"stop", "length", or None while the answer goes on."""
    logprobs: list[TokenLogprobs] | None = None
    paced: PacedOutput | None = None
    """For a paced sequence only."""

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None
