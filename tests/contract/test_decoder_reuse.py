"""One decoder gives many answers, and several share a target, a drafter or a session, without traces."""

import pytest
import torch
from in_turn import in_turn
from rehearsed import Rehearsed
from side_by_side import COUPLED, GREEDY, SHAPES, plainly, speculate
from tiny_drafters import VARIANTS
from tiny_targets import MAX_POSITIONS

from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.errors import ConfigError

CHAIN, FIXED, DYNAMIC = SHAPES["chain"], SHAPES["fixed"], SHAPES["dynamic"]


@pytest.mark.usefixtures("unchecked_shapes")
@in_turn(("variant", "shape_name"), [*VARIANTS], [*SHAPES], whole=["moa-0"])
def test_a_decoder_keeps_nothing_from_one_answer_to_the_next(tiny, learnt, variant, shape_name):
    target, drafter, shape = tiny("llama"), learnt("llama", variant), SHAPES[shape_name]
    used = SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS)
    used.generate(target.prompt(2, 3), GREEDY, 10, ())
    short, long = (
        (prompt, speculate(target, drafter, shape, prompt, GREEDY, 10))
        for prompt in (target.prompt(), target.prompt(1, 60))
    )
    for prompt, fresh in (short, long, short):
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


@pytest.mark.usefixtures("unchecked_shapes")
def test_decoders_that_take_turns_may_share_a_runner(tiny, learnt):
    """Each observes other taps of the same target; all do as they would with a runner of their own."""
    target = tiny("llama")
    entries = [
        ("moa-0", CHAIN), ("eagle-0", DYNAMIC), ("moa-2", FIXED), ("glide-0", CHAIN), ("medusa-0", DYNAMIC),
        ("ngram-0", FIXED), ("eagle-1", CHAIN),
    ]  # fmt: skip
    runner = runner_for(target.target, MAX_POSITIONS, max(shape.num_nodes for _, shape in entries))
    drafters = [(learnt("llama", variant), shape) for variant, shape in entries]
    needs = {str(drafter.observed) for drafter, _ in drafters}
    assert len(needs) >= 4
    plain = SpeculativeDecoder(target.target, None, max_model_len=MAX_POSITIONS, runner=runner)
    shared = [SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS, runner) for drafter, shape in drafters]
    own = [SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS) for drafter, shape in drafters]
    for prompt, params in ((target.prompt(2, 30), GREEDY), (target.prompt(), GREEDY), (target.prompt(), COUPLED)):
        expected = plainly(target, prompt, params, 30)
        for ours, alone in zip(shared, own, strict=True):
            first, second = ours.generate(prompt, params, 30, ()), alone.generate(prompt, params, 30, ())
            assert first.tokens == second.tokens == expected
            assert first.accepted == second.accepted, "the drafter observed something else"
        assert plain.generate(prompt, params, 30, ()).tokens == expected


def test_a_shared_runner_that_is_too_small_is_refused(tiny):
    target = tiny("llama").target
    drafter = Rehearsed(target)
    runner = runner_for(target, 123, CHAIN.num_nodes)
    assert SpeculativeDecoder(target, drafter, CHAIN, 123, runner)
    with pytest.raises(ConfigError, match=r"holds 128 tokens; .* 123 for .* 15 for a tree \('dynamic-4x3-14'\)"):
        SpeculativeDecoder(target, drafter, DYNAMIC, 123, runner)
    with pytest.raises(ConfigError, match=r"holds 128 tokens; .* needs 124 for .* 5 for a tree"):
        SpeculativeDecoder(target, drafter, CHAIN, 124, runner)


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_an_answer_that_an_error_ended_leaves_nothing_to_the_next(tiny, greedy, at):
    """Wherever the drafter fails: what was chosen and not returned yet is not the next answer's beginning."""
    target = tiny("llama")
    drafter = Rehearsed(target.target, 0.5)
    decoder = SpeculativeDecoder(target.target, drafter, CHAIN, MAX_POSITIONS)
    extend, calls = drafter.extend, iter(range(1, 100))

    def failing(*args):
        if next(calls) == at:
            raise RuntimeError("no memory left")
        extend(*args)

    drafter.extend = failing
    with pytest.raises(RuntimeError, match="no memory left"):
        decoder.generate(target.prompt(1), GREEDY, 40, ())
    assert not decoder._engine.is_busy
    drafter.extend = extend
    assert decoder.generate(target.prompt(), GREEDY, 40, ()).tokens == greedy("llama")


def test_generation_leaves_no_gradients_behind(tiny, learnt):
    target, drafter = tiny("llama"), learnt("llama", "moa-2")
    speculate(target, drafter, DYNAMIC, target.prompt(), GREEDY, 5)
    assert all(parameter.grad is None for parameter in target.target.model.parameters())
    assert torch.is_grad_enabled()
