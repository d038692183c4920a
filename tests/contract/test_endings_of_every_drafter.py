"""Two end tokens and a stop string end the answers of every drafter where they end plain decoding's."""

import pytest
from side_by_side import GREEDY, SHAPES
from spelling import length_until, spell
from tiny_drafters import UNTRAINED
from tiny_targets import MAX_POSITIONS

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.generation import Generation
from moray.decoding.plain import PlainDecoder
from moray.decoding.sampling.stop import StopStrings

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def places_inside_drafts(whole: Generation) -> list[int]:
    """The places of accepted tokens behind which others were accepted."""
    begins = [1 + sum(whole.emitted[:cycle]) for cycle in range(whole.num_cycles)]
    return [begin + i for begin, accepted in zip(begins, whole.accepted, strict=True) for i in range(accepted - 1)]


def string_until(place: int, text: list[int]) -> str:
    """The last letter before the token at that place, and the token's first."""
    return spell(text[place - 1 : place])[-1] + spell(text[place : place + 1])[0]


@pytest.mark.parametrize("name", ["chain", "dynamic"])
def test_an_answer_ends_where_plain_decoding_s_does(tiny, learnt, variant, name):
    target = tiny("llama")
    plain = PlainDecoder(target.target, MAX_POSITIONS)
    decoder = SpeculativeDecoder(target.target, learnt("llama", variant), SHAPES[name], MAX_POSITIONS)
    whole = decoder.generate(target.prompt(), GREEDY, 40, ())
    text = whole.tokens
    new = [place for place in range(1, 40) if text[place] not in text[:place]]
    inside = [place for place in places_inside_drafts(whole) if place in new[:-1]]
    inside = [place for place in inside if length_until(string_until(place, text), text) == place + 1]
    assert inside or variant.startswith(UNTRAINED), "nothing of two tokens was accepted"
    place = inside[-1] if inside else new[5]
    later = new[new.index(place) + 1]
    ends = (text[place], text[later])
    stop = StopStrings([string_until(place, text), "never"], spell)
    for eos_ids, stops in ((ends, None), ((), stop), (ends, stop), ((text[later], 96), stop)):
        wanted = plain.generate(target.prompt(), GREEDY, 40, eos_ids, stop=stops)
        ended = decoder.generate(target.prompt(), GREEDY, 40, eos_ids, stop=stops)
        assert ended.tokens == wanted.tokens == text[: len(wanted.tokens)]
        assert ended.finish_reason == wanted.finish_reason == "stop"
        if inside:
            assert len(ended.tokens) == place + 1
            assert ended.emitted[-1] < ended.accepted[-1], "it did not end in the middle of an accepted draft"
