"""Prompts and answers at the limits of the context, and the refusals beyond them."""

import pytest
from rehearsed import Rehearsed
from side_by_side import GREEDY, SHAPES, plainly, speculate
from tiny_drafters import VARIANTS, build
from tiny_targets import MAX_POSITIONS

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.plain import CHUNK, PlainDecoder
from moray.errors import ConfigError, DataError
from moray.trees.shapes import FixedShape

CHAIN, DYNAMIC = SHAPES["chain"], SHAPES["dynamic"]


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_answer_ends_with_the_context(tiny, greedy, learnt, variant, shape):
    target = tiny("llama")
    prompt = target.prompt()
    for room in (1, 2, 7):
        capacity = len(prompt) + room
        plain = PlainDecoder(target.target, capacity).generate(prompt, GREEDY, 40, ())
        decoder = SpeculativeDecoder(target.target, learnt("llama", variant), shape, capacity)
        generation = decoder.generate(prompt, GREEDY, 40, ())
        assert generation.tokens == plain.tokens == greedy("llama")[:room]
        assert generation.finish_reason == "length"


@pytest.mark.parametrize("variant", [*VARIANTS, "rehearsed"])
def test_drafts_may_look_past_the_target_s_last_position(tiny, variant, shape):
    target = tiny("llama")
    prompt = target.prompt(5, MAX_POSITIONS - 8)
    plain = plainly(target, prompt, GREEDY, 40)
    assert len(plain) == 8
    drafter = Rehearsed(target.target) if variant == "rehearsed" else build(target, VARIANTS[variant])
    assert speculate(target, drafter, shape, prompt, GREEDY, 40).tokens == plain


@pytest.mark.parametrize("length", [0, 40, 41, 700])
def test_a_prompt_that_does_not_fit_is_refused_with_both_sizes(tiny, length):
    target = tiny("llama")
    drafter = build(target, VARIANTS["moa-0"])
    decoders = (PlainDecoder(target.target, 40), SpeculativeDecoder(target.target, drafter, CHAIN, 40))
    for decoder in decoders:
        with pytest.raises(DataError, match=rf"has {length} tokens; .* of 40 takes 1 to 39"):
            decoder.generate([1] * length, GREEDY, 5, ())
        assert len(decoder.generate([1] * 5, GREEDY, 5, ()).tokens) == 5, "usable afterwards"


def test_a_context_longer_than_the_target_s_is_refused_with_both_sizes(tiny):
    target = tiny("llama").target
    for make in (lambda: PlainDecoder(target, 513), lambda: SpeculativeDecoder(target, Rehearsed(target), CHAIN, 513)):
        with pytest.raises(DataError, match=r"513 .*512"):
            make()


LENGTHS = [CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 150]


@pytest.mark.parametrize("length", LENGTHS)
def test_long_prompts_are_read_in_chunks(tiny, greedy, length):
    target = tiny("qwen3")
    prompt = target.prompt(6, length)
    text = greedy("qwen3", 6, length)[:12]
    assert plainly(target, prompt, GREEDY, 12) == text
    rehearsed = speculate(target, Rehearsed(target.target), CHAIN, prompt, GREEDY, 11)
    assert rehearsed.tokens == text[:11]
    assert rehearsed.accepted == [4, 4]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("length", LENGTHS)
def test_every_drafter_follows_in_chunks(tiny, greedy, variant, length):
    """A random drafter accepts nothing, so that its memory is checked apart: against one built at once."""
    target = tiny("qwen3")
    drafter = build(target, VARIANTS[variant])
    text = greedy("qwen3", 6, length)[:8]
    assert speculate(target, drafter, DYNAMIC, target.prompt(6, length), GREEDY, 8).tokens == text


def test_a_tree_wider_than_the_vocabulary_is_refused(tiny):
    target = tiny("llama")
    with pytest.raises(ConfigError, match="gives a node 98 children; the target's vocabulary has 97 tokens"):
        SpeculativeDecoder(target.target, Rehearsed(target.target), FixedShape(type="fixed", branching=(98,)), 64)
