"""Speculation gives the target's own text: every family, every drafter, every tree, greedy and sampled.

In fp32 the comparison is exact. Two drafters stand in for all degrees of acceptance: those of the union, overfitted
on one answer, and the target itself as a drafter, exact or with noise.
"""

import pytest
import torch
from support import (
    ADAPTIVE,
    MAX_POSITIONS,
    SHAPES,
    TARGETS,
    VARIANTS,
    Rehearsed,
    build,
    is_lossless,
    plainly,
    speculate,
)

from moray.decoding.params import SamplingParams
from moray.decoding.session import PREFILL_CHUNK, TargetSession
from moray.decoding.speculate import PlainDecoder, SpeculativeDecoder
from moray.decoding.stop import StopStrings
from moray.errors import ConfigError, DataError
from moray.trees.shapes import FixedShape, SparseShape

GREEDY = SamplingParams()
COUPLED = SamplingParams(temperature=0.8, seed=7)
FILTERED = SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=3)
CHAIN, FIXED, DYNAMIC = SHAPES["chain"], SHAPES["fixed"], SHAPES["dynamic"]


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


# --- The same text ---


def test_plain_decoding_is_what_transformers_generates(tiny, greedy, target_name):
    target = tiny(target_name)
    for seed, length in ((0, 9), (1, 1), (2, 30)):
        assert plainly(target, target.prompt(seed, length), GREEDY, 40) == greedy(target_name, seed, length)
    assert len(set(greedy(target_name))) > 10, "a text that repeats one token proves nothing"


def test_greedy_equals_transformers(tiny, greedy, learnt, target_name, variant, shape):
    target, drafter = tiny(target_name), learnt(target_name, variant)
    decoder = SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS)
    known = decoder.generate(target.prompt(), GREEDY, 40, ())
    assert known.tokens == greedy(target_name)
    if not variant.startswith("ngram"):  # a text without repetition
        assert max(known.accepted) >= 2, "no long path was accepted: the drafter has not learnt its text"
    if not variant.startswith("independent"):  # which may know the text perfectly
        assert min(known.accepted) < shape.depth, "nothing was refused"
    assert decoder.generate(target.prompt(1, 1), GREEDY, 10, ()).tokens == greedy(target_name, 1, 1)[:10]


def test_coupled_sampling_equals_plain_sampling(tiny, learnt, target_name, variant, shape):
    target, drafter = tiny(target_name), learnt(target_name, variant)
    assert is_lossless(target, drafter, shape, COUPLED, [target.prompt()], 20)


def test_untrained_drafters_cost_nothing_but_time(tiny, variant, shape):
    target = tiny("llama")
    drafter = build(target, VARIANTS[variant], seed=5)
    assert is_lossless(target, drafter, shape, GREEDY, [target.prompt(3)], 20)
    assert is_lossless(target, drafter, shape, FILTERED, [target.prompt(3)], 20)


def test_sparse_trees_give_the_same_text(tiny, learnt, variant):
    target, drafter = tiny("llama"), learnt("llama", variant)
    shape = SparseShape(type="sparse", paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))
    assert is_lossless(target, drafter, shape, GREEDY, [target.prompt(), target.prompt(1, 5)], 25)
    assert is_lossless(target, drafter, shape, COUPLED, [target.prompt()], 15)


@pytest.mark.parametrize("params", [GREEDY, COUPLED, FILTERED], ids=["greedy", "coupled", "filtered"])
@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_every_degree_of_acceptance_gives_the_same_text(tiny, shape, params, noise):
    target = tiny("qwen2")
    drafter = Rehearsed(target.target, noise)
    assert is_lossless(target, drafter, shape, params, [target.prompt(), target.prompt(4, 20)])


def test_sampled_text_depends_on_the_seed(tiny):
    target = tiny("llama")
    texts = [plainly(target, target.prompt(), SamplingParams(temperature=0.8, seed=seed), 20) for seed in range(4)]
    assert len(set(map(tuple, texts))) == 4


# --- Depths that change from cycle to cycle ---


@pytest.fixture(params=ADAPTIVE)
def adaptive(request):
    return ADAPTIVE[request.param]


@pytest.mark.usefixtures("moody")
def test_adaptive_drafts_of_every_drafter_give_the_same_text(tiny, learnt, variant, adaptive):
    target, drafter = tiny("llama"), learnt("llama", variant)
    decoder = SpeculativeDecoder(target.target, drafter, adaptive, MAX_POSITIONS)
    for params, count in ((GREEDY, 40), (COUPLED, 20)):
        generation = decoder.generate(target.prompt(), params, count, ())
        assert generation.tokens == plainly(target, target.prompt(), params, count)
        if not variant.startswith("ngram"):  # it ends drafts itself
            assert len(set(generation.drafted)) >= 3, "the depths did not vary"


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize("params", [GREEDY, COUPLED, FILTERED], ids=["greedy", "coupled", "filtered"])
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_every_degree_of_acceptance_gives_the_same_text_at_every_depth(tiny, adaptive, params, noise):
    target = tiny("qwen2")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, noise), adaptive, MAX_POSITIONS)
    drafted, accepted = set(), set()
    for prompt in (target.prompt(), target.prompt(4, 20)):
        generation = decoder.generate(prompt, params, 40, ())
        assert generation.tokens == plainly(target, prompt, params, 40)
        assert all(a <= d for a, d in zip(generation.accepted, generation.drafted, strict=True))
        drafted |= set(generation.drafted)
        accepted |= set(generation.accepted)
    assert drafted == {0, 1, 2, 3, 4}, "no draft, and every depth"
    assert len(accepted) >= 3


@pytest.mark.usefixtures("moody")
def test_adaptive_drafts_sample_typically_too(tiny, adaptive):
    target = tiny("llama")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, 0.5), adaptive, MAX_POSITIONS)
    generation = decoder.generate(target.prompt(), TYPICAL, 40, ())
    assert len(generation.tokens) == 40
    assert 0 in generation.drafted


def test_measuring_costs_leaves_nothing_behind(tiny, greedy, learnt, adaptive):
    """With the real clock: passes and drafts behind the prompt are forgotten, and measured once."""
    target, drafter = tiny("llama"), learnt("llama", "moa-1")
    decoder = SpeculativeDecoder(target.target, drafter, adaptive, MAX_POSITIONS)
    measured = []
    measure = decoder._measure_costs
    decoder._measure_costs = lambda root, shape: measured.append(measure(root, shape)) or measured[-1]
    for _ in range(2):
        assert decoder.generate(target.prompt(), GREEDY, 40, ()).tokens == greedy("llama")
    (costs,) = measured
    assert [size for size, _ in costs.verify][-1] == adaptive.num_nodes + 1
    assert [size for size, _ in costs.draft] == [1, 2, 3, 4]
    assert min(seconds for _, seconds in [*costs.verify, *costs.draft]) > 0


def test_costs_are_measured_where_the_context_ends(tiny, adaptive):
    target = tiny("llama")
    for room in (1, 3):
        prompt = target.prompt(5, MAX_POSITIONS - room)
        plain = plainly(target, prompt, GREEDY, 40)
        assert speculate(target, Rehearsed(target.target), adaptive, prompt, GREEDY, 40).tokens == plain


REPETITIVE = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7]


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize("params", [GREEDY, FILTERED], ids=["greedy", "filtered"])
def test_a_drafter_that_stops_early_costs_no_token(tiny, params):
    """Prompt lookup ends its drafts wherever nothing matches, at other levels in every cycle."""
    target = tiny("llama")
    drafter = build(target, VARIANTS["ngram-0"])
    for shape in (*SHAPES.values(), *ADAPTIVE.values()):
        decoder = SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS)
        drafted = set()
        for prompt in (REPETITIVE, [*REPETITIVE, *target.prompt(), *target.prompt()[:4]]):
            generation = decoder.generate(prompt, params, 30, ())
            assert generation.tokens == plainly(target, prompt, params, 30)
            drafted |= set(generation.drafted)
        assert 0 in drafted
        assert len(drafted) >= 2, "no draft was cut short"


# --- The target as its own drafter ---


@pytest.mark.parametrize(
    "params",
    [GREEDY, COUPLED, FILTERED, SamplingParams(temperature=0.8, top_p=0.9, rule="rejection")],
    ids=["greedy", "coupled", "filtered", "rejection"],
)
def test_the_target_accepts_all_of_its_own_chain(tiny, target_name, params):
    target = tiny(target_name)
    generation = speculate(target, Rehearsed(target.target), CHAIN, target.prompt(), params, 31)
    assert generation.accepted == [CHAIN.depth] * 6
    assert generation.emitted == [CHAIN.depth + 1] * 6


def test_the_target_accepts_all_levels_of_its_own_fixed_tree(tiny, target_name):
    target = tiny(target_name)
    for params in (GREEDY, COUPLED):
        generation = speculate(target, Rehearsed(target.target), FIXED, target.prompt(), params, 29)
        assert generation.accepted == [FIXED.depth] * 7


# --- Where an answer ends ---


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


# --- Stop strings ---


def spell(tokens):
    """A made-up tokenizer: every token is a word of one, two or three letters."""
    return "".join("abcdefghijklmnopqrstuvwxyz"[token % 26] + "ABCD"[token // 26] * (token % 3) for token in tokens)


def length_until(string: str, tokens: list[int]) -> int:
    """How many tokens it takes until their text contains the string."""
    return next(count for count in range(1, len(tokens) + 1) if string in spell(tokens[:count]))


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(tiny, shape, noise, params):
    """Completed at every place in turn: on roots, inside accepted paths, on bonus tokens, and over two cycles."""
    target = tiny("llama")
    text = plainly(target, target.prompt(), params, 40)
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, noise), shape, MAX_POSITIONS)
    plain = PlainDecoder(target.target, MAX_POSITIONS)
    whole = decoder.generate(target.prompt(), params, 40, ())
    starts = [1 + sum(whole.emitted[:cycle]) for cycle in range(whole.num_cycles)]
    pieces: list[int] = []
    kinds = set()
    for place in range(12):
        word = spell(text[place : place + 1])
        strings = [word, spell(text[max(0, place - 1) : place]) + word[0], spell(text[max(0, place - 3) : place + 1])]
        for string in strings:
            count = length_until(string, text)
            stop = StopStrings([string, "never"], spell)
            pieces.clear()
            ended = decoder.generate(
                target.prompt(), params, 40, (), lambda tokens, _: pieces.extend(tokens), stop=stop
            )
            expected = plain.generate(target.prompt(), params, 40, (), stop=stop)
            assert ended.tokens == expected.tokens == text[:count] == pieces, "nothing behind the end is handed on"
            assert ended.finish_reason == expected.finish_reason == "stop"
            assert sum(ended.emitted) == count - 1, "nor counted"
            assert stop.text_before(ended.tokens) + string == spell(text)[: spell(text).index(string) + len(string)]
            kinds.add("root" if count == 1 else "path" if ended.emitted[-1] <= ended.accepted[-1] else "bonus")
            if count - 1 in starts and len(string) > len(word):
                kinds.add("two cycles")
    assert kinds == {"root", "path", "bonus", "two cycles"}


def test_end_tokens_and_stop_strings_end_an_answer_together(tiny, greedy, shape):
    target, text = tiny("llama"), greedy("llama")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, 0.5), shape, MAX_POSITIONS)
    plain = PlainDecoder(target.target, MAX_POSITIONS)
    for place in range(8):
        for ahead in (-2, -1, 0, 1, 2):
            eos = text[max(0, place + ahead)]
            stop = StopStrings([spell(text[: place + 1])], spell)
            count = min(text.index(eos), place) + 1
            for one in (plain, decoder):
                generation = one.generate(target.prompt(), GREEDY, 40, (eos,), stop=stop)
                assert (generation.tokens, generation.finish_reason) == (text[:count], "stop")


def test_a_stop_string_just_behind_the_limit_does_not_stretch_it(tiny, greedy, shape):
    target, text = tiny("llama"), greedy("llama")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target), shape, MAX_POSITIONS)
    for count in range(1, 9):
        for behind, reason in ((0, "stop"), (1, "length")):
            stop = StopStrings([spell(text[: count + behind])], spell)
            generation = decoder.generate(target.prompt(), GREEDY, count, (), stop=stop)
            assert (generation.tokens, generation.finish_reason) == (text[:count], reason)


# --- Typical acceptance, which is lossy ---

TYPICAL = SamplingParams(temperature=0.8, seed=7, rule="typical")


def test_typical_acceptance_runs_on_every_tree(tiny, variant, shape):
    target = tiny("llama")
    for drafter in (build(target, VARIANTS[variant]), Rehearsed(target.target, 0.5)):
        decoder = SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS)
        first = decoder.generate(target.prompt(), TYPICAL, 20, ())
        again = decoder.generate(target.prompt(), TYPICAL, 20, ())
        assert len(first.tokens) == 20
        assert (again.tokens, again.accepted) == (first.tokens, first.accepted), "a function of the seed"
        stop = StopStrings([spell(first.tokens[7:9])], spell)
        ended = decoder.generate(target.prompt(), TYPICAL, 20, (), stop=stop)
        assert ended.tokens == first.tokens[: length_until(stop.strings[0], first.tokens)]


def test_typical_acceptance_takes_all_or_nothing_at_its_extremes(tiny, shape):
    target = tiny("llama")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, 0.5), shape, MAX_POSITIONS)
    nothing = TYPICAL.model_copy(update={"typical_epsilon": 1.0, "typical_delta": 1e9})
    sampled = decoder.generate(target.prompt(), nothing, 20, ())
    assert sampled.tokens == plainly(target, target.prompt(), COUPLED, 20)
    assert not any(sampled.accepted)
    everything = TYPICAL.model_copy(update={"typical_epsilon": 0.0})
    drafted = decoder.generate(target.prompt(), everything, 20, ())
    deepest = shape.depth if shape is not DYNAMIC else 3  # whose nodes need not reach its last level
    assert min(drafted.accepted) >= deepest
    assert drafted.tokens != sampled.tokens


# --- The context ---


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


def test_drafts_may_look_past_the_target_s_last_position(tiny, variant, shape):
    target = tiny("llama")
    prompt = target.prompt(5, MAX_POSITIONS - 8)
    plain = plainly(target, prompt, GREEDY, 40)
    assert len(plain) == 8
    for drafter in (build(target, VARIANTS[variant]), Rehearsed(target.target)):
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


@pytest.mark.parametrize("length", [PREFILL_CHUNK - 1, PREFILL_CHUNK, PREFILL_CHUNK + 1, PREFILL_CHUNK + 150])
def test_long_prompts_are_read_in_chunks(tiny, greedy, variant, length):
    """A random drafter accepts nothing, so that its memory is checked apart: against one built at once."""
    target = tiny("qwen3")
    prompt = target.prompt(6, length)
    text = greedy("qwen3", 6, length)[:12]
    assert plainly(target, prompt, GREEDY, 12) == text
    drafter = build(target, VARIANTS[variant])
    assert speculate(target, drafter, DYNAMIC, prompt, GREEDY, 12).tokens == text
    rehearsed = speculate(target, Rehearsed(target.target), CHAIN, prompt, GREEDY, 11)
    assert rehearsed.tokens == text[:11]
    assert rehearsed.accepted == [4, 4]


# --- One decoder, many answers ---


def test_a_decoder_keeps_nothing_from_one_answer_to_the_next(tiny, learnt, variant, shape):
    target, drafter = tiny("llama"), learnt("llama", variant)
    used = SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS)
    used.generate(target.prompt(2, 3), GREEDY, 10, ())
    for prompt in (target.prompt(), target.prompt(1, 60), target.prompt()):
        fresh = speculate(target, drafter, shape, prompt, GREEDY, 10)
        again = used.generate(prompt, GREEDY, 10, ())
        assert again.tokens == fresh.tokens
        assert again.accepted == fresh.accepted, "the drafts changed, so the drafter has not forgotten"


def test_two_sessions_on_one_target_and_one_drafter_do_not_meet(tiny, greedy, learnt):
    """Interleaved: the second answer is generated whole between two cycles of the first."""
    target, drafter = tiny("llama"), learnt("llama", "moa-1")
    outer = SpeculativeDecoder(target.target, drafter, DYNAMIC, MAX_POSITIONS)
    inner = SpeculativeDecoder(target.target, drafter, CHAIN, MAX_POSITIONS)
    texts: list[list[int]] = []

    def interrupt(tokens: list[int], accepted: int) -> None:
        if len(texts) < 3:
            texts.append(inner.generate(target.prompt(1), GREEDY, 10, ()).tokens)

    assert outer.generate(target.prompt(), GREEDY, 40, (), interrupt).tokens == greedy("llama")
    assert texts == [greedy("llama", 1)[:10]] * 3


def test_decoders_that_take_turns_may_share_a_session(tiny, learnt):
    """Each observes other taps of the same target; all do as they would with a session of their own."""
    target = tiny("llama")
    entries = [
        ("moa-0", CHAIN), ("eagle-0", DYNAMIC), ("moa-2", FIXED), ("glide-0", CHAIN), ("medusa-0", DYNAMIC),
        ("ngram-0", FIXED), ("eagle-1", CHAIN),
    ]  # fmt: skip
    session = TargetSession(target.target, MAX_POSITIONS, 1 + max(shape.num_nodes for _, shape in entries))
    drafters = [(learnt("llama", variant), shape) for variant, shape in entries]
    needs = {str(drafter.observed) for drafter, _ in drafters}
    assert len(needs) >= 4
    plain = PlainDecoder(target.target, MAX_POSITIONS, session)
    shared = [SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS, session) for drafter, shape in drafters]
    own = [SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS) for drafter, shape in drafters]
    for prompt, params in ((target.prompt(2, 30), GREEDY), (target.prompt(), GREEDY), (target.prompt(), COUPLED)):
        expected = plainly(target, prompt, params, 30)
        for ours, alone in zip(shared, own, strict=True):
            first, second = ours.generate(prompt, params, 30, ()), alone.generate(prompt, params, 30, ())
            assert first.tokens == second.tokens == expected
            assert first.accepted == second.accepted, "the drafter observed something else"
        assert plain.generate(prompt, params, 30, ()).tokens == expected


def test_a_shared_session_that_is_too_small_is_refused(tiny):
    target = tiny("llama").target
    drafter = Rehearsed(target)
    session = TargetSession(target, 64, CHAIN.num_nodes + 1)
    assert SpeculativeDecoder(target, drafter, CHAIN, 64, session)
    with pytest.raises(ConfigError, match=r"trees of 5 nodes, .* 15 nodes \('dynamic-4x3-14'\)"):
        SpeculativeDecoder(target, drafter, DYNAMIC, 64, session)
    with pytest.raises(ConfigError, match=r"made for 64 tokens .* this decoder for 63 tokens"):
        SpeculativeDecoder(target, drafter, CHAIN, 63, session)


def test_every_supported_family_is_tested():
    from moray.targets.spec import FAMILIES

    assert {options["family"] for options in TARGETS.values()} == set(FAMILIES)


def test_generation_leaves_no_gradients_behind(tiny, learnt):
    target, drafter = tiny("llama"), learnt("llama", "moa-2")
    speculate(target, drafter, DYNAMIC, target.prompt(), GREEDY, 5)
    assert all(parameter.grad is None for parameter in target.target.model.parameters())
    assert torch.is_grad_enabled()


# --- What cannot be ---


def test_no_token_asked_for_is_refused(tiny):
    target = tiny("llama")
    for decoder in (
        PlainDecoder(target.target, 64),
        SpeculativeDecoder(target.target, Rehearsed(target.target), CHAIN, 64),
    ):
        with pytest.raises(DataError, match="max_new_tokens is 0; at least 1"):
            decoder.generate(target.prompt(), GREEDY, 0, ())


def test_a_tree_wider_than_the_vocabulary_is_refused(tiny):
    target = tiny("llama")
    with pytest.raises(ConfigError, match="gives a node 98 children; the target's vocabulary has 97 tokens"):
        SpeculativeDecoder(target.target, Rehearsed(target.target), FixedShape(type="fixed", branching=(98,)), 64)
