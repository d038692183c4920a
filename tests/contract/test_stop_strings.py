"""A stop string ends an answer with the token that completes it, wherever that falls."""

import pytest
from rehearsed import Rehearsed
from side_by_side import COUPLED, GREEDY, SHAPES, plainly
from spelling import length_until, spell
from tiny_targets import MAX_POSITIONS

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.plain import PlainDecoder
from moray.decoding.sampling.stop import StopStrings

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def strings_ending_at(place: int, text: list[int]) -> list[str]:
    """Of the token at that place: its text, its first letter behind the token before, and the last four tokens."""
    word = spell(text[place : place + 1])
    return [word, spell(text[max(0, place - 1) : place]) + word[0], spell(text[max(0, place - 3) : place + 1])]


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(tiny, shape, noise, params):
    """Completed at every place in turn: on roots, inside accepted paths, on bonus tokens, and over two cycles."""
    target = tiny("llama")
    text = plainly(target, target.prompt(), params, 40)
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, noise), shape, MAX_POSITIONS)
    whole = decoder.generate(target.prompt(), params, 40, ())
    starts = [1 + sum(whole.emitted[:cycle]) for cycle in range(whole.num_cycles)]
    pieces: list[int] = []
    kinds = set()
    for place in range(12):
        word = spell(text[place : place + 1])
        for string in strings_ending_at(place, text):
            count = length_until(string, text)
            stop = StopStrings([string, "never"], spell)
            pieces.clear()
            ended = decoder.generate(
                target.prompt(), params, 40, (), lambda tokens, _: pieces.extend(tokens), stop=stop
            )
            assert ended.tokens == text[:count] == pieces, "nothing behind the end is handed on"
            assert ended.finish_reason == "stop"
            assert sum(ended.emitted) == count - 1, "nor counted"
            assert stop.text_before(ended.tokens) + string == spell(text)[: spell(text).index(string) + len(string)]
            kinds.add("root" if count == 1 else "path" if ended.emitted[-1] <= ended.accepted[-1] else "bonus")
            if count - 1 in starts and len(string) > len(word):
                kinds.add("two cycles")
    assert kinds == {"root", "path", "bonus", "two cycles"}


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_a_stop_string_ends_a_plain_answer_there_too(tiny, params):
    target = tiny("llama")
    text = plainly(target, target.prompt(), params, 40)
    plain = PlainDecoder(target.target, MAX_POSITIONS)
    for place in range(12):
        for string in strings_ending_at(place, text):
            ended = plain.generate(target.prompt(), params, 40, (), stop=StopStrings([string, "never"], spell))
            assert ended.tokens == text[: length_until(string, text)]
            assert ended.finish_reason == "stop"


@pytest.mark.parametrize("shape", [None, *SHAPES.values()], ids=["plain", *SHAPES])
def test_end_tokens_and_stop_strings_end_an_answer_together(tiny, greedy, shape):
    target, text = tiny("llama"), greedy("llama")
    if shape is None:
        decoder = PlainDecoder(target.target, MAX_POSITIONS)
    else:
        decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, 0.5), shape, MAX_POSITIONS)
    for place in range(8):
        for ahead in (-2, -1, 0, 1, 2):
            eos = text[max(0, place + ahead)]
            stop = StopStrings([spell(text[: place + 1])], spell)
            count = min(text.index(eos), place) + 1
            generation = decoder.generate(target.prompt(), GREEDY, 40, (eos,), stop=stop)
            assert (generation.tokens, generation.finish_reason) == (text[:count], "stop")


def test_a_stop_string_just_behind_the_limit_does_not_stretch_it(tiny, greedy, shape):
    target, text = tiny("llama"), greedy("llama")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target), shape, MAX_POSITIONS)
    for count in range(1, 9):
        for behind, reason in ((0, "stop"), (1, "length")):
            stop = StopStrings([spell(text[: count + behind])], spell)
            generation = decoder.generate(target.prompt(), GREEDY, count, (), stop=stop)
            assert (generation.tokens, generation.finish_reason) == (text[:count], reason)
