"""Drafting by hand, one step at a time, for comparison with training's forward pass and with whole decoders."""

import torch
from one_tree import propose

from moray.batch import Taps
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.sampler import Sampler
from moray.distill.masks import verified_start
from moray.drafters.base import Drafter
from moray.drafters.learner import DraftView
from moray.trees.shapes import ChainShape
from moray.trees.tree import TokenTree

PROMPT = 6


def view_of(batch, drafter: Drafter, period: int = 5, phase: int = 0) -> DraftView:
    """What counts as verified: every `period`-th response token, or each position's predecessor."""
    size, seq = batch.tokens.shape
    start = verified_start(batch.response_mask, torch.full((size,), period), torch.full((size,), phase))
    if drafter.config.verified_period is None:
        start = torch.arange(-1, seq - 1).clamp(min=0).expand(size, seq)
    return DraftView(start, torch.zeros(size, dtype=torch.bool))


def pieces_of(taps: Taps, begin: int, end: int) -> Taps:
    kv = None if taps.kv is None else taps.kv[:1, begin:end]
    return Taps(kv, {depth: hidden[:1, begin:end] for depth, hidden in taps.hidden.items()})


def state_at(drafter: Drafter, tokens: torch.Tensor, taps: Taps, length: int):
    """A state that knows the first `length` tokens of sequence 0."""
    state = drafter.new_state(64, 64)
    drafter.extend(state, tokens[0, :length], drafter.observe(pieces_of(taps, 0, length)))
    return state


def largest_difference(drafter: Drafter, batch, view: DraftView, spoil=lambda state: None) -> float:
    """Between training's forward pass and step-by-step drafting along the true text, over all drafted positions.

    `spoil` may damage a state before it drafts.
    """
    worst, compared = 0.0, 0
    length = int(batch.lengths[0])
    with torch.no_grad():
        by_start: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for prediction in drafter(batch, view).predictions:
            logits = drafter.vocabulary.expand(prediction.score(prediction.hidden[0]))
            for i, begin in enumerate(prediction.start[0, :length].tolist()):
                if 0 <= begin < i:
                    by_start.setdefault(begin, []).append((i, logits[i]))
        for begin, wanted in by_start.items():
            state = state_at(drafter, batch.tokens, batch.taps, begin + 1)
            spoil(state)
            for i, expected in sorted(wanted, key=lambda pair: pair[0]):
                drafted = drafter.step(state, batch.tokens[0, i : i + 1], None, i - begin - 1)
                assert torch.equal(drafted[0].isfinite(), expected.isfinite()), "another draft vocabulary"
                known = expected.isfinite()
                worst = max(worst, float((drafted[0] - expected)[known].abs().max()))
                compared += 1
    assert compared >= 8, "the view drafts too little to compare"
    return worst


def is_one_model(drafter: Drafter, batch, view: DraftView) -> bool:
    return largest_difference(drafter, batch, view) < 1e-5


def tree_of(drafter: Drafter, tokens: torch.Tensor, taps: Taps, shape, params: SamplingParams) -> TokenTree:
    """The tree drafted below token 10."""
    select = Sampler(params, drafter.spec.vocab_size, torch.device("cpu")).selector(
        10, shape.depth, isinstance(shape, ChainShape)
    )
    with torch.no_grad():
        return propose(drafter, state_at(drafter, tokens, taps, 10), tokens[0, 10:11], shape, select)
