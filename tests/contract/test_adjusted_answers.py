"""Penalties, biases, stop strings and log-probabilities beside drafts: what an unmodified model and plain sums give.

Also when the answer is taken up in the middle, as it is after a replica has died.
"""

import pytest
import torch
from shape_checks import unchecked
from side_by_side import COUPLED, GREEDY, SHAPES
from tiny_drafters import VARIANTS, build
from tiny_targets import load_target
from transformers import AutoModelForCausalLM

from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.request import Request
from moray.decoding.sampling.sampler import Sampler

CAPACITY = 96
COUNT = 40
NUM_TOP = 3
ADJUSTMENTS = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {3: 1.5, 11: -2.0, 42: 0.8}},
    "all of it": {"presence_penalty": -0.5, "frequency_penalty": 0.9, "logit_bias": {7: 1.0}},
}


def letters(tokens, *_):
    """A text in which every token is two letters."""
    return "".join(chr(97 + token % 26) + chr(97 + token // 26) for token in tokens)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_target(tmp_path_factory.mktemp("adjusted"))


@pytest.fixture(scope="module")
def stock(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny.folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module", params=["pretrained-0", pytest.param("ngram-0", marks=pytest.mark.soak)])
def drafter(tiny, request):
    return build(tiny, VARIANTS[request.param])


@torch.inference_mode()
def expected(tiny, stock, request):
    """Token by token, from the whole text each time; with each token's and the likeliest ones' log-probabilities."""
    answer, logprobs, vocab_size = [], [], tiny.target.spec.vocab_size
    sampler = Sampler(request.params, vocab_size, torch.device("cpu"), request.sequence)
    for _ in range(request.max_new_tokens):
        tokens = [*request.prompt, *answer]
        logits = stock(torch.tensor([tokens])).logits[0, -1]
        counts = torch.tensor(answer, dtype=torch.long).bincount(minlength=vocab_size)
        adjusted = logits - request.frequency_penalty * counts - request.presence_penalty * (counts > 0)
        for token, value in request.logit_bias.items():
            adjusted[token] += value
        answer.append(int(sampler.choose(adjusted[None], len(tokens))))
        own = logits.log_softmax(-1)
        logprobs.append((float(own[answer[-1]]), own.topk(NUM_TOP)))
        if any(string in letters(answer) for string in request.stop):
            break
    return answer, logprobs


def engine_of(tiny, drafter, shape):
    config = EngineConfig(max_num_seqs=2, kv_cache_tokens=512, max_model_len=CAPACITY, tree=shape)
    sources = {"drafter": LocalDrafts(drafter, CAPACITY, shape.num_expanded)}
    return Engine(tiny.target, config, (), drafts=sources, decode=letters)


def answered(engine, request):
    """The answer to one request, beside another that is not adjusted."""
    number = engine.submit(request)
    engine.submit(Request(prompt=request.prompt[:5], max_new_tokens=COUNT))
    updates = []
    while engine.is_busy:
        updates += [update for update in engine.step() if update.number == number]
    return updates


def check(updates, answer, logprobs):
    assert [token for update in updates for token in update.tokens] == answer
    told = [each for update in updates for each in update.logprobs]
    assert len(told) == len(answer)
    for each, (own, top) in zip(told, logprobs, strict=True):
        assert each.token == pytest.approx(own, abs=1e-3)
        assert [value for _, value in each.top] == pytest.approx(top.values.tolist(), abs=1e-3)
        assert [token for token, _ in each.top] == top.indices.tolist()


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_an_adjusted_answer_is_the_adjusted_target_s_own(tiny, stock, drafter, name, shape, params):
    request = Request(
        prompt=tuple(tiny.prompt(1, 12)), params=params, max_new_tokens=COUNT, logprobs=NUM_TOP, **ADJUSTMENTS[name]
    )
    answer, logprobs = expected(tiny, stock, request)
    plain = expected(tiny, stock, Request(prompt=request.prompt, params=params, max_new_tokens=COUNT))[0]
    assert answer != plain, "the adjustment matters"
    with unchecked():
        engine = engine_of(tiny, drafter, SHAPES[shape])
        check(answered(engine, request), answer, logprobs)
        assert engine.stats.num_drafts > 3
        for begun in (1, 17):  # elsewhere, so many tokens were generated before the replica died
            resumed = request.model_copy(update={"generated": tuple(answer[:begun])})
            check(answered(engine, resumed), answer[begun:], logprobs[begun:])


@pytest.mark.parametrize("begun", [0, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_told_of_what_lies_behind_a_stop_string(tiny, stock, drafter, shape, begun):
    base = Request(prompt=tuple(tiny.prompt(2, 12)), max_new_tokens=COUNT, logprobs=NUM_TOP, **ADJUSTMENTS["penalties"])
    text = letters(expected(tiny, stock, base)[0])
    stop = text[27:30]  # begins within a token
    request = base.model_copy(update={"stop": (stop,)})
    answer, logprobs = expected(tiny, stock, request)
    assert begun < len(answer) < COUNT
    with unchecked():
        resumed = request.model_copy(update={"generated": tuple(answer[:begun])})
        updates = answered(engine_of(tiny, drafter, SHAPES[shape]), resumed)
    check(updates, answer[begun:], logprobs[begun:])
    assert updates[-1].finish_reason == "stop"
