"""Continuous batching gives every prompt the very text that it gets alone, whoever its neighbours are."""

import random

import pytest
import torch
from side_by_side import COUPLED, FILTERED, GREEDY
from tiny_targets import MAX_POSITIONS

from moray.decoding.continuous import ContinuousDecoder, Finished
from moray.decoding.params import SamplingParams
from moray.decoding.speculate import PlainDecoder
from moray.errors import DataError
from moray.targets.model import Target

NEW_TOKENS = 24
EOS = (5, 17, 40)  # of 97: answers end after very different numbers of tokens
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def prompts_of(count: int, longest: int = 90, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def alone(target: Target, prompts: list[list[int]], params: SamplingParams) -> list[tuple[list[int], str]]:
    decoder = PlainDecoder(target, MAX_POSITIONS)
    generations = [decoder.generate(p, params, NEW_TOKENS, EOS, sequence=7 * i) for i, p in enumerate(prompts)]
    return [(g.tokens, {"stop": "eos", "length": "length"}[g.finish_reason or ""]) for g in generations]


def together(
    target: Target, prompts: list[list[int]], params: SamplingParams, batch_tokens: int
) -> list[tuple[list[int], str]]:
    decoder = ContinuousDecoder(target, params, NEW_TOKENS, EOS, batch_tokens=batch_tokens)
    for number, prompt in enumerate(prompts):
        assert decoder.submit(prompt, 7 * number) == number
    answers: dict[int, Finished] = {}
    while decoder.is_busy:
        answers |= {finished.number: finished for finished in decoder.step()}
    return [(answers[number].tokens, answers[number].finish_reason) for number in range(len(prompts))]


def test_greedy_text_is_the_target_s_own(tiny, target_name):
    target, prompts = tiny(target_name).target, prompts_of(10)
    expected = alone(target, prompts, GREEDY)
    assert {reason for _, reason in expected} == {"eos", "length"}
    for batch_tokens in (128, 768, 8192):  # one at a time, some, all
        assert together(target, prompts, GREEDY, batch_tokens) == expected


@pytest.mark.parametrize("params", [COUPLED, FILTERED], ids=["coupled", "filtered"])
def test_sampled_text_depends_on_seed_sequence_and_position_alone(tiny, params):
    target, prompts = tiny("llama").target, prompts_of(12, seed=1)
    prompts[3] = prompts[4]
    expected = alone(target, prompts, params)
    assert expected[3] != expected[4], "each sequence has noise of its own"
    for batch_tokens in (192, 1024, 8192):
        assert together(target, prompts, params, batch_tokens) == expected


def test_long_prompts_are_read_in_pieces(tiny):
    target = tiny("llama").target
    prompts = [*prompts_of(3, 60), *(prompts_of(1, 1, seed)[0] * length for seed, length in ((1, 256), (2, 257)))]
    prompts += [[i % 97 for i in range(length)] for length in (300, 470)]
    assert together(target, prompts, GREEDY, 2048) == alone(target, prompts, GREEDY)


def test_prompts_may_come_while_others_are_answered(tiny):
    """As the later turns of a conversation do: longer ones among shorter ones, so that rows are cut anew."""
    target, prompts = tiny("llama").target, prompts_of(16, 200, seed=2)
    expected = alone(target, prompts, GREEDY)
    decoder = ContinuousDecoder(target, GREEDY, NEW_TOKENS, EOS, batch_tokens=1024)
    waiting = list(enumerate(sorted(range(len(prompts)), key=lambda i: len(prompts[i]))))
    submitted: dict[int, int] = {}
    answers: dict[int, list[int]] = {}
    while waiting or decoder.is_busy:
        for _, index in waiting[:2]:
            submitted[decoder.submit(prompts[index])] = index
        waiting = waiting[2:]
        answers |= {submitted[f.number]: f.tokens for f in decoder.step()}
    assert [answers[i] for i in range(len(prompts))] == [tokens for tokens, _ in expected]


def test_a_slot_that_is_free_is_taken_at_once_and_memory_is_bounded(tiny):
    target, prompts = tiny("llama").target, prompts_of(30, 20, seed=3)
    decoder = ContinuousDecoder(target, GREEDY, NEW_TOKENS, EOS, batch_tokens=512)
    for prompt in prompts:
        decoder.submit(prompt)
    running: list[int] = []
    num_left = len(prompts)
    while decoder.is_busy:
        finished = decoder.step()
        num_left -= len(finished)
        running.append(decoder.num_running + len(finished))
        if num_left >= 8:
            assert running[-1] == 8, "512 slots are eight sequences of up to 64"
    assert max(running) == 8


def test_every_step_waits_for_the_device_once(tiny, monkeypatch):
    target, prompts = tiny("llama").target, prompts_of(12, seed=4)
    reads: list[int] = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or plain(self))
    for name in ("item", "__int__", "__bool__", "__index__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the device is waited for"))
    decoder = ContinuousDecoder(target, GREEDY, NEW_TOKENS, EOS, batch_tokens=512)
    for prompt in prompts:
        decoder.submit(prompt)
    steps = 0
    while decoder.is_busy:
        decoder.step()
        steps += 1
    assert len(reads) == steps


def test_a_prompt_that_leaves_no_room_is_refused(tiny):
    target = tiny("llama").target
    decoder = ContinuousDecoder(target, GREEDY, NEW_TOKENS, EOS, batch_tokens=256)
    decoder.submit([1] * 232)
    for prompt in ([], [1] * 233):
        with pytest.raises(DataError, match="take 1 to 232"):
            decoder.submit(prompt)
    assert len(decoder.step() or [0]) == 1
