"""Stale memory: without lag, the drafts of ordinary decoding; with lag, those of drafting by hand."""

import json

import pytest
import torch
from rich.console import Console
from shape_checks import unchecked
from tiny_drafters import VARIANTS, build, overfit
from tiny_targets import load_target, save_chat_target

from moray.bench.configs import StalenessConfig
from moray.config import validate
from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.decoding.observed import taps_of_text
from moray.decoding.params import SamplingParams
from moray.errors import ConfigError, DataError
from moray.trees.shapes import ChainShape
from pipelines.benchmarks.staleness import StaleDrafts, benchmark_staleness, print_staleness, stale_decoder

DEPTH, CAPACITY, COUNT = 3, 64, 24


@pytest.fixture(scope="module", autouse=True)
def _unchecked():
    with unchecked():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_target(tmp_path_factory.mktemp("staleness"))


@pytest.fixture(scope="module")
def prompt(tiny):
    return tiny.prompt()


@pytest.fixture(scope="module")
def answer(tiny, prompt):
    return tiny.hugging_face(prompt, COUNT)


@pytest.fixture(scope="module", params=["moa-2", "eagle-0", "ngram-0"])
def drafter(request, tiny, prompt, answer):
    steps = 12  # it shall be right sometimes
    return overfit(tiny, build(tiny, VARIANTS[request.param]), prompt + answer, len(prompt), steps)


def test_without_lag_drafts_are_those_of_ordinary_decoding(tiny, drafter, prompt, answer):
    chain = ChainShape(type="chain", depth=DEPTH)
    made = [
        decoder.generate(prompt, SamplingParams(), COUNT, ())
        for decoder in (
            stale_decoder(tiny.target, drafter, DEPTH, 0, CAPACITY),
            SpeculativeDecoder(tiny.target, drafter, chain, CAPACITY),
        )
    ]
    assert made[0].tokens == made[1].tokens == answer
    assert made[0].accepted == made[1].accepted
    assert len(made[0].accepted) >= (COUNT - DEPTH) // (DEPTH + 1)


@pytest.mark.parametrize("lag", [1, 4])
def test_with_a_lag_the_last_tokens_have_no_memory(tiny, drafter, prompt, answer, lag):
    """The same by states that are made anew for every root, and led level by level to it."""
    decoder = stale_decoder(tiny.target, drafter, DEPTH, lag, CAPACITY)
    decoder.generate(prompt[: lag + 1], SamplingParams(), COUNT, ())  # an earlier answer leaves nothing behind
    made = decoder.generate(prompt, SamplingParams(), COUNT, ())
    assert made.tokens == answer
    text, wanted, root, memory = torch.tensor(prompt + answer), [], len(prompt), {}
    for _, taps in taps_of_text(runner_for(tiny.target, CAPACITY, 0), text[:-1].tolist(), drafter.observed):
        memory.update(drafter.observe(taps))
    with torch.inference_mode():
        while root + DEPTH < len(text):
            state = drafter.new_state(CAPACITY, DEPTH + lag)
            drafter.extend(state, text[: root - lag], {name: rows[:, : root - lag] for name, rows in memory.items()})
            path = text[root - lag : root + 1].tolist()
            for level in range(lag + DEPTH):
                logits = drafter.step(state, torch.tensor(path[level : level + 1]), None, level)
                if logits is None:
                    break
                if level >= lag:
                    path.append(int(logits[0].argmax()))
            drafted, true = path[lag + 1 :], text[root + 1 : root + 1 + DEPTH].tolist()
            wanted.append(next((k for k in range(len(drafted)) if drafted[k] != true[k]), len(drafted)))
            root += 1 + wanted[-1]
    assert made.accepted[: len(wanted)] == wanted
    assert len(made.accepted) <= len(wanted) + DEPTH


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staleness-benchmark")
    target = save_chat_target(folder / "target")
    questions = folder / "questions.jsonl"
    rows = [{"question_id": n, "category": "demo", "turns": [f"number {n} " * (1 + n)]} for n in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "target": {"model": str(target), "device": "cpu"},
        "drafters": [{"type": "pretrained", "model": str(target)}, {"type": "ngram"}],
        "questions": str(questions),
        "depth": 2,
        "lags": [0, 3],
        "max_new_tokens": 13,
    }


def test_a_drafter_without_memory_loses_nothing(settings, capsys):
    result = benchmark_staleness(validate(StalenessConfig, settings), Console(quiet=True))
    assert [(row["drafter"], row["lag"]) for row in result["rows"]] == [
        (name, lag) for name in ("pretrained", "ngram") for lag in (0, 3)
    ]
    for row in result["rows"][:2]:
        assert (row["tau"], row["relative"]) == (3.0, 1.0), "the target itself, which reads nothing but tokens"
        assert tuple(row["tau_interval"]) == (3.0, 3.0)
    print_staleness(result, Console(width=120))
    assert "pretrained" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(settings):
    for wrong, message in (
        ({"lags": [1, 2]}, "name 0"),
        ({"lags": [0, 63]}, "at most 64"),
        ({"depth": 13}, "less than max_new_tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(StalenessConfig, settings | wrong)
    config = validate(StalenessConfig, settings | {"max_new_tokens": 100_000})
    with pytest.raises(DataError, match="no prompt"):
        benchmark_staleness(config, Console(quiet=True))


def test_heads_that_are_too_few_are_named(tiny):
    drafter = build(tiny, VARIANTS["medusa-0"])
    with pytest.raises(ConfigError, match="a medusa, which drafts 6 levels; depth 3 and a lag of 4 need 7"):
        StaleDrafts(drafter, CAPACITY, DEPTH, 4)
