"""Continuous batching gives every prompt the text that it gets alone, whatever else is in the batch."""

import random

import pytest
import torch
from side_by_side import COUPLED, FILTERED, GREEDY
from tiny_targets import MAX_POSITIONS

from moray.decoding.batch import answer_batch
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.engine import Engine
from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.decoding.request import Request
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
    return [(g.tokens, g.finish_reason) for g in generations]


def engine_of(target: Target, batch_tokens: int, **limits: int) -> Engine:
    return Engine(target, EngineConfig(kv_cache_tokens=batch_tokens, **limits), EOS)


def request(prompt: list[int], params: SamplingParams = GREEDY, sequence: int = 0) -> Request:
    return Request(prompt=tuple(prompt), params=params, max_new_tokens=NEW_TOKENS, sequence=sequence)


def together(
    target: Target, prompts: list[list[int]], params: SamplingParams, batch_tokens: int
) -> list[tuple[list[int], str]]:
    engine = engine_of(target, batch_tokens, max_num_batched_tokens=100)
    made = answer_batch(engine, [request(prompt, params, 7 * number) for number, prompt in enumerate(prompts)])
    return [(generation.tokens, generation.finish_reason) for generation in made]


def test_greedy_text_is_the_target_s_own(tiny, target_name):
    target, prompts = tiny(target_name).target, prompts_of(10)
    expected = alone(target, prompts, GREEDY)
    assert {reason for _, reason in expected} == {"stop", "length"}
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


def test_answers_go_on_however_many_requests_end_with_their_first_token(tiny):
    """Each step brings another first token, which must not put off the cycle of all others for ever."""
    target, (prompt,) = tiny("llama").target, prompts_of(1, 20)
    engine = engine_of(target, 1024)
    number = engine.submit(request(prompt))
    answer: list[int] = []
    for _ in range(3 * NEW_TOKENS):
        engine.submit(Request(prompt=(1, 2, 3), max_new_tokens=1))
        for update in engine.step():
            answer += update.tokens if update.number == number else []
    assert answer == alone(target, [prompt], GREEDY)[0][0]


def test_prompts_may_come_while_others_are_answered(tiny):
    """As the later turns of a conversation do: longer ones among shorter ones, so that rows are cut anew."""
    target, prompts = tiny("llama").target, prompts_of(16, 200, seed=2)
    expected = alone(target, prompts, GREEDY)
    engine = engine_of(target, 1024)
    waiting = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    submitted: dict[int, int] = {}
    answers: dict[int, list[int]] = {index: [] for index in waiting}
    while waiting or engine.is_busy:
        for index in waiting[:2]:
            submitted[engine.submit(request(prompts[index]))] = index
        waiting = waiting[2:]
        for update in engine.step():
            answers[submitted[update.number]] += update.tokens
    assert [answers[i] for i in range(len(prompts))] == [tokens for tokens, _ in expected]


def test_a_slot_that_is_free_is_taken_at_once_and_memory_is_bounded(tiny):
    target, prompts = tiny("llama").target, prompts_of(30, 20, seed=3)
    engine = engine_of(target, 512)
    for prompt in prompts:
        engine.submit(request(prompt))
    running: list[int] = []
    num_left = len(prompts)
    while engine.is_busy:
        ended = [update for update in engine.step() if update.finish_reason is not None]
        num_left -= len(ended)
        running.append(engine.num_running + len(ended))
        assert engine.kv_used == engine.num_running * 64 / 512
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
    engine = engine_of(target, 512)
    for prompt in prompts:
        engine.submit(request(prompt))
    begin = type(engine)._begin
    monkeypatch.setattr(type(engine), "_begin", lambda *rest: reads.append(0) or begin(*rest))
    while engine.is_busy:
        engine.step()
    choices = reads.count(0)
    assert choices > 0
    assert reads.count(1) == engine.stats.num_passes + choices


def test_a_prompt_that_leaves_no_room_is_refused(tiny):
    target = tiny("llama").target
    engine = engine_of(target, 256)
    engine.submit(request([1] * 231))
    with pytest.raises(DataError, match="both together may be 255"):
        engine.submit(request([1] * 232))
    with pytest.raises(DataError, match="token 97 is not in the vocabulary"):
        engine.submit(request([97]))
    with pytest.raises(DataError, match="drafter is 'moa'; there are none"):
        engine.submit(request([1]).model_copy(update={"drafter": "moa"}))
    assert engine.step()
