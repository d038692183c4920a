"""Simulated against real tau, on answers where both are known."""

import json

import pytest
import torch
from tiny_drafters import DRAFTERS, VARIANTS, build, losses_for, overfit
from tiny_targets import TinyTarget, save_chat_target

from moray.bench.validation import Validator, read_prompts
from moray.bench.validation_config import ValidationConfig
from moray.errors import ConfigError, DataError
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

QUESTIONS = ("one two", "three", "four five six")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A target with a tokenizer, and a file of held-out chats."""
    folder = save_chat_target(tmp_path_factory.mktemp("target"))
    target = Target.load(TargetConfig(model=str(folder), device="cpu"))
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]} for text in QUESTIONS
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TinyTarget("chat", folder, target), ChatTokenizer.load(str(folder))


def config_for(tiny, **changes) -> ValidationConfig:
    return ValidationConfig(chats=str(tiny.folder / "chats.jsonl"), max_new_tokens=12, depth=3, **changes)


def test_the_prompts_are_the_first_questions(chat):
    assert read_prompts(config_for(chat[0], max_chats=2)) == [[{"role": "user", "content": q}] for q in QUESTIONS[:2]]


@pytest.mark.parametrize("name", [f"{kind}-0" for kind in DRAFTERS if kind not in ("pretrained", "ngram")])
def test_every_drafter_is_measured(chat, name):
    tiny, tokenizer = chat
    drafter = build(tiny, VARIANTS[name])
    figures = Validator(tiny.target, tokenizer, config_for(tiny)).validate(drafter, losses_for(drafter))
    assert figures["chats"] == 3
    assert figures["tau_gap"] == pytest.approx(figures["simulated_tau"] - figures["real_tau"])
    assert 1 <= figures["real_tau"] <= 4
    assert 1 <= figures["simulated_tau"] <= 4
    assert figures["loss"] > 0
    assert {"accuracy_step_1", "accuracy_step_3", "acceptance_step_1"} <= set(figures)


@pytest.mark.parametrize("name", ["moa-0", "eagle-0"])
def test_a_drafter_that_knows_the_answers_by_heart_has_both(chat, name):
    """Taught the very answer, both come close to depth + 1, which an untrained drafter is far from."""
    tiny, tokenizer = chat
    config = config_for(tiny, max_chats=1).model_copy(update={"max_new_tokens": 32})
    validator = Validator(tiny.target, tokenizer, config)
    drafter = build(tiny, VARIANTS[name])
    before = validator.validate(drafter, losses_for(drafter))
    prompt = tokenizer.encode_prompt([{"role": "user", "content": QUESTIONS[0]}])
    answer = tiny.hugging_face(prompt, 32)
    overfit(tiny, drafter, [*prompt, *answer], len(prompt), steps=40)
    after = validator.validate(drafter.eval(), losses_for(drafter))
    assert before["real_tau"] + 0.7 < after["real_tau"]
    assert before["simulated_tau"] + 0.7 < after["simulated_tau"]
    assert after["loss"] < before["loss"]


def test_every_position_counts_once_for_each_step(chat):
    """The steps' counts: what can be drafted at step k is every answer token but the first k."""
    from moray.batch import Taps, TrainBatch
    from moray.bench.validation import _every_step

    response = torch.arange(10)[None] >= 4  # four tokens of prompt, six of answer
    batch = TrainBatch(torch.zeros(1, 10, dtype=torch.long), response, torch.tensor([10]), Taps())
    _, view, counted = _every_step(batch, depth=3)
    ahead = (torch.arange(10) - view.start)[counted]
    assert [int((ahead == step).sum()) for step in (1, 2, 3, 4)] == [5, 4, 3, 0]


def test_chats_that_do_not_fit_are_refused(chat, tmp_path):
    tiny, tokenizer = chat
    row = {"messages": [{"role": "user", "content": "a" * 600}, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "long.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"no prompt of validation.chats '.*long.jsonl' fits into the context of 512"):
        Validator(tiny.target, tokenizer, ValidationConfig(chats=str(tmp_path / "long.jsonl")))
    (tmp_path / "empty.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "yes"}]}))
    with pytest.raises(DataError):
        read_prompts(ValidationConfig(chats=str(tmp_path / "empty.jsonl")))
    with pytest.raises(ConfigError, match=r"^validation.chats: chats.path '.*gone.jsonl' does not exist"):
        read_prompts(ValidationConfig(chats=str(tmp_path / "gone.jsonl")))
