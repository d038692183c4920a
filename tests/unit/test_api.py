"""Moray in Python: the README's lines run, answers are the target's own, and what is wrong is said."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented_code import python_blocks, run_block
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, save_chat_target

import moray
from moray.api import Target
from moray.drafters.checkpoint import save_drafter
from moray.errors import ConfigError, DataError
from moray.trees.shapes import DynamicShape

CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target with a tokenizer, and a drafter for it."""
    folder = save_chat_target(tmp_path_factory.mktemp("api"))
    target = moray.Target.load(folder, device="cpu")
    tiny = TinyTarget("chat", folder, target.model)
    save_drafter(folder / "drafter", build(tiny, VARIANTS["moa-0"]), target.tokenizer.fingerprint)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return moray.Target.load(folder, device="cpu")


def test_the_readme_s_lines_run(folder, capsys):
    (code,) = python_blocks("README.md")
    assert code.count("\n") <= 12
    code = code.replace("runs/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", str(folder))
    run_block(code.replace("runs/smollm2/eagle", str(folder / "drafter")), "README.md")
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"\d+ tokens; tau \d\.\d\d, which does not count the pass over the prompt", last)


def test_importing_moray_loads_neither_torch_nor_ray():
    code = "import moray, sys; assert not {'torch', 'ray', 'transformers'} & set(sys.modules); print(moray.generate)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "generate" in made.stdout
    with pytest.raises(AttributeError, match="no attribute 'decode'"):
        _ = moray.decode  # type: ignore[attr-defined]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_every_drafter_gives_the_target_s_own_answer(folder, target, sampling):
    plain = moray.generate(target, None, CHAT, max_new_tokens=40, **sampling)
    assert (plain.tau, plain.num_passes) == (1.0, plain.num_tokens)
    for entry in (folder / "drafter", {"type": "ngram"}):
        drafter = moray.load_drafter(entry, target)
        pieces: list[str] = []
        answer = moray.generate(
            target, drafter, "Why is the sky blue?", max_new_tokens=40, on_text=pieces.append, **sampling
        )
        assert answer.generation.tokens == plain.generation.tokens
        assert answer.text == plain.text == "".join(pieces)


def test_a_stop_string_ends_an_answer_and_is_left_out(target):
    text = moray.generate(target, None, CHAT, max_new_tokens=40).text
    stop = re.findall(r"[ -~]+", text)[-1]
    pieces: list[str] = []
    answer = moray.generate(target, None, CHAT, max_new_tokens=40, stop=[stop], on_text=pieces.append)
    assert answer.text == text[: text.index(stop)] == "".join(pieces)


def test_what_is_wrong_is_said(folder, target, tmp_path):
    with pytest.raises(ConfigError, match="heat"):
        moray.generate(target, None, CHAT, heat=1.0)
    with pytest.raises(ConfigError, match="precision"):
        moray.Target.load(folder, precision="float32")
    with pytest.raises(ConfigError, match="ngrams"):
        moray.load_drafter({"type": "ngrams"}, target)
    with pytest.raises(DataError, match=str(tmp_path)):
        moray.load_drafter(tmp_path, target)
    with pytest.raises(DataError, match="the prompt has"):
        moray.generate(target, None, "a b c d " * 4000)


def test_answers_take_turns_in_one_memory_of_the_asked_size(folder):
    target = moray.Target.load(folder, device="cpu", max_model_len=64)
    assert target.max_model_len == 64
    drafter = moray.load_drafter(folder / "drafter", target)
    answers = [moray.generate(target, one, CHAT, max_new_tokens=500) for one in (None, drafter, None, drafter)]
    assert len({tuple(answer.generation.tokens) for answer in answers}) == 1
    used = answers[0].num_tokens + len(target.tokenizer.encode_prompt(CHAT))
    assert used == 64 or answers[0].generation.finish_reason == "stop"
    wide = DynamicShape(type="dynamic", depth=5, breadth=8, nodes=200)
    assert moray.generate(target, drafter, CHAT, max_new_tokens=500, tree=wide).text == answers[0].text
