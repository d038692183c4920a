"""One sequence in the engine: its tokens, and what the cache and its draft source know of it."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.decoding.planning.controller import DraftPlan
from moray.decoding.request import Request
from moray.decoding.sampling.logits_processors import LogitsProcessors
from moray.decoding.sampling.sampler import Sampler
from moray.decoding.sampling.stop import Decode, StopChecker, StopStrings
from moray.errors import DataError

if TYPE_CHECKING:
    from moray.decoding.engine.draft_scheduler import Draft, DraftScheduler
    from moray.decoding.engine.paced import Pace


class EngineSequence:
    """Prompt and answer of one request while the engine holds it."""

    def __init__(
        self,
        number: int,
        request: Request,
        vocab_size: int,
        device: torch.device,
        stop_checker: StopChecker,
    ) -> None:
        self.number = number
        self.request = request
        self.sampler = Sampler(request.params, vocab_size, device, request.sequence)
        self.stop_checker = stop_checker
        self.processors = LogitsProcessors(request, vocab_size, device)
        self.tokens = [*request.prompt, *request.generated]
        """Prompt and answer."""
        self.num_read = 0
        """Prompt tokens that are in the cache. Once the prompt has been read, all tokens but the last are."""
        self.hidden: dict[int, list[Float[Tensor, "new hidden"]]] = {}
        """By depth, hidden states of tokens that the draft source has not received yet."""
        self.num_kept = 0
        """See `Drafter.extend`; counts from the first token that the draft source has not received yet."""
        self.requested: DraftPlan | None = None
        """Plan of the draft that was requested and not collected yet."""
        self.draft: Draft | None = None
        """The draft of this cycle."""
        self.num_passed_over = 0
        """Cycles that other sequences have had while its first draft was under way."""
        self.draft_scheduler: DraftScheduler | None = None
        """Scheduler of the source that drafts for it; None for plain decoding."""
        self.pace: Pace | None = None
        """What its client offers, if a client drafts for it (see `decoding.engine.paced`)."""
        self.stop_checker.cut([*request.generated])
        self.processors.emit(request.generated)

    @property
    def length(self) -> int:
        """Cached tokens of a running sequence: all but the last one, which is the next root and has this position."""
        return len(self.tokens) - 1

    @property
    def need(self) -> int:
        """Maximum number of tokens that it can reach."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def _observed_depths(self) -> tuple[int, ...]:
        """Depths of the hidden states that its drafter reads."""
        if self.pace is not None:
            return self.pace.observer.needs.hidden_depths
        return self.draft_scheduler.observed.hidden_depths if self.draft_scheduler is not None else ()

    def keep_hidden(
        self, hidden: Mapping[int, Float[Tensor, "rows nodes hidden"]], row: int, index: slice | Int[Tensor, " some"]
    ) -> None:
        """Keep the hidden states of some tokens of a row of a pass, at the depths that its drafter reads."""
        for depth in self._observed_depths:
            own = hidden[depth][row, index]
            is_whole = own.numel() == hidden[depth].numel()
            self.hidden.setdefault(depth, []).append(own if is_whole else own.clone())  # a view would keep it all alive

    def take_hidden(self, depth: int, count: int) -> Float[Tensor, "count hidden"]:
        """Remove and return the first `count` hidden states kept at a depth."""
        parts = self.hidden[depth]
        kept = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.hidden[depth] = [kept[count:]] if count < kept.shape[0] else []
        return kept[:count]


def stop_checker_of(request: Request, eos_ids: Collection[int], decode: Decode | None) -> StopChecker:
    """Create the check of where the answer to a request ends.

    Raises:
        DataError: stop strings without a tokenizer, or invalid stop strings.
    """
    if request.stop and decode is None:
        raise DataError("stop holds strings, but this engine was given no tokenizer: leave them out")
    stop = StopStrings(request.stop, decode) if decode is not None and request.stop else None
    context = request.prompt if request.continues_prompt else ()
    return StopChecker(request.max_new_tokens, () if request.ignore_eos else eos_ids, stop, context)


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Refuse a request that an engine cannot serve.

    Args:
        request: from anybody.
        vocab_size: of the target.
        max_model_len: maximum number of tokens of prompt and answer together.

    Raises:
        DataError: says what is wrong.
    """
    num_prompt = len(request.prompt)
    if num_prompt + request.max_new_tokens > max_model_len:
        raise DataError(
            f"the prompt has {num_prompt} tokens and max_new_tokens is {request.max_new_tokens}; both together may be "
            f"{max_model_len}"
        )
    known = (*request.prompt, *request.generated, *request.logit_bias)
    strange = [token for token in known if not 0 <= token < vocab_size]
    if strange:
        raise DataError(f"token {strange[0]} is not in the vocabulary, which has {vocab_size}")
