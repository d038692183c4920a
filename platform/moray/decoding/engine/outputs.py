"""Adds the tokens of a cycle to a sequence's answer, and says what is new."""

from jaxtyping import Float
from torch import Tensor

from moray.decoding.engine.sequence import EngineSequence
from moray.decoding.engine.stats import EngineStats
from moray.decoding.request import PacedOutput, RequestOutput
from moray.decoding.sampling.accept import Accepted
from moray.decoding.sampling.logprobs import token_logprobs
from moray.trees.tree import TokenTree


def emit(
    sequence: EngineSequence,
    result: Accepted,
    tree: TokenTree | None,
    logits: Float[Tensor, "nodes vocab"],
    stats: EngineStats,
    paced: PacedOutput | None = None,
) -> RequestOutput:
    """Add the accepted tokens to the answer.

    Args:
        sequence: whose answer it is.
        result: what was accepted.
        tree: what was verified to the end; None for the first token after the prompt.
        logits: the target's, for each node of the tree.
        stats: of the engine.
        paced: what the sequence's client gets besides the tokens, if it runs the drafter.
    """
    draft, sequence.draft = sequence.draft, None  # do not keep its distributions, which are large
    emitted = sequence.stop_checker.cut([*result.tokens, result.next_token])
    sequence.tokens += emitted
    sequence.processors.emit(emitted)
    if tree is not None:
        num_accepted = min(len(result.path), len(emitted))  # those that are in the answer
        drafted = tree if draft is None else draft.tree
        stats.record(drafted.num_nodes - 1, num_accepted, len(emitted))
        if drafted.num_nodes > 1 and sequence.draft_scheduler is not None and draft is not None:
            sequence.draft_scheduler.record(draft, len(result.path))
    logprobs = None
    if sequence.request.logprobs is not None:
        logprobs = token_logprobs(logits[[0, *result.path][: len(emitted)]], emitted, sequence.request.logprobs)
    return RequestOutput(
        sequence.number,
        emitted,
        num_accepted=min(len(result.tokens), len(emitted)),
        num_path=len(result.path),
        num_levels=0 if tree is None else tree.num_levels,
        num_nodes=0 if tree is None else tree.num_nodes - 1,
        num_target_layers=0 if draft is None else draft.num_target_layers,
        rejected=result.rejected,
        finish_reason=sequence.stop_checker.finish_reason,
        logprobs=logprobs,
        paced=paced,
    )


def tree_of(sequence: EngineSequence) -> TokenTree | None:
    """The draft of this cycle, from the engine's source or from the sequence's client; None if there is none."""
    if sequence.pace is not None:
        return sequence.pace.offers[0].tree
    return None if sequence.draft is None else sequence.draft.tree
