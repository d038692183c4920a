"""An answer ends at the first end token or at its limit, also inside an accepted path."""

import pytest
from rehearsed import Rehearsed
from side_by_side import GREEDY, SHAPES, speculate
from tiny_targets import MAX_POSITIONS

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.plain import PlainDecoder
from moray.errors import DataError

CHAIN = SHAPES["chain"]


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_an_answer_ends_at_whichever_end_token_comes_first(tiny, greedy, shape, noise):
    """Every place is tried, so that the end falls on roots, inside accepted paths and on bonus tokens."""
    target, text = tiny("llama"), greedy("llama")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, noise), shape, MAX_POSITIONS)
    plain = PlainDecoder(target.target, MAX_POSITIONS)
    inside = 0
    for place in range(9):
        eos_ids = {text[place], text[place + 3], 96}
        first = next(i for i, token in enumerate(text) if token in eos_ids)
        for decode in (plain, decoder):
            generation = decode.generate(target.prompt(), GREEDY, 40, eos_ids)
            assert generation.tokens == text[: first + 1]
            assert generation.finish_reason == "stop"
        inside += bool(generation.emitted) and generation.emitted[-1] <= generation.accepted[-1]
    assert inside >= 3, "no answer ended inside an accepted path"
    assert target.hugging_face(target.prompt(), 40, [text[5], text[8]])[-1] in (text[5], text[8])


def test_an_end_token_in_the_prompt_ends_nothing(tiny, greedy):
    target, text = tiny("llama"), greedy("llama")
    eos = next(token for token in target.prompt() if token not in text)
    assert speculate(target, Rehearsed(target.target), CHAIN, target.prompt(), GREEDY, 40, (eos,)).tokens == text


def test_max_new_tokens_holds_inside_an_accepted_path(tiny, greedy, shape):
    target, text = tiny("llama"), greedy("llama")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target), shape, MAX_POSITIONS)
    for count in range(1, 12):
        generation = decoder.generate(target.prompt(), GREEDY, count, ())
        assert generation.tokens == text[:count]
        assert generation.finish_reason == "length"
        assert sum(generation.emitted) == count - 1, "the first token comes from the prefill"
        assert min(generation.emitted, default=1) >= 1
        if text[count] not in text[:count]:  # an end token just behind the limit must not stretch it
            limited = decoder.generate(target.prompt(), GREEDY, count, (text[count],))
            assert (limited.tokens, limited.finish_reason) == (text[:count], "length")


def test_no_token_asked_for_is_refused(tiny):
    target = tiny("llama")
    for decoder in (
        PlainDecoder(target.target, 64),
        SpeculativeDecoder(target.target, Rehearsed(target.target), CHAIN, 64),
    ):
        with pytest.raises(DataError, match="max_new_tokens is 0; at least 1"):
            decoder.generate(target.prompt(), GREEDY, 0, ())


def test_tokens_are_handed_on_as_they_are_emitted(tiny, greedy, shape):
    target = tiny("llama")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, 0.5), shape, MAX_POSITIONS)
    pieces: list[tuple[list[int], int]] = []
    generation = decoder.generate(
        target.prompt(), GREEDY, 38, (), on_tokens=lambda tokens, accepted: pieces.append((tokens, accepted))
    )
    assert [token for tokens, _ in pieces for token in tokens] == generation.tokens == greedy("llama")[:38]
    assert [len(tokens) for tokens, _ in pieces] == [1, *generation.emitted]
    assert pieces[0][1] == 0
    for (tokens, drafted), accepted in zip(pieces[1:], generation.accepted, strict=True):
        assert drafted == min(accepted, len(tokens))
