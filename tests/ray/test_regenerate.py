"""Regenerated chats: the user's turns as they were, every answer the target's own greedy one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moray.activations.ultrachat import ChatsConfig
from moray.cluster.configs import RegenerateConfig
from moray.targets.spec import TargetConfig

MAX_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def chats(write_chats: Callable[[Path, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("asked") / "chats.jsonl", 7)


def _regenerate(target: Path, chats: Path, output: Path) -> None:
    from moray.cluster.regenerate import regenerate

    config = RegenerateConfig(
        target=TargetConfig(model=str(target)),
        chats=ChatsConfig(path=str(chats)),
        output=str(output),
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=3,
        chats_per_part=3,
    )
    assert regenerate(config) == 7


def _messages(output: Path) -> list[list[dict[str, str]]]:
    """The messages of every chat, in order."""
    parts = sorted(output.glob("part-*.jsonl"))
    assert len(parts) == 3
    return [json.loads(line)["messages"] for part in parts for line in part.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def answered(ray_session: None, tiny_target: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all answers. Not to be written to."""
    output = tmp_path_factory.mktemp("regenerated") / "answered"
    _regenerate(tiny_target, chats, output)
    return output


def test_every_answer_is_the_target_s_own(tiny_target: Path, chats: Path, answered: Path) -> None:
    from moray.decoding.params import SamplingParams
    from moray.decoding.speculate import PlainDecoder
    from moray.targets.model import Target
    from moray.text import ChatTokenizer

    target, text = Target.load(TargetConfig(model=str(tiny_target))), ChatTokenizer.load(str(tiny_target))
    decoder = PlainDecoder(target, 512)
    eos = {*target.eos_ids, *text.eos_ids}
    for line, messages in zip(chats.read_text(encoding="utf-8").splitlines(), _messages(answered), strict=True):
        asked = json.loads(line)["messages"]
        assert [m["role"] for m in messages] == [m["role"] for m in asked]
        assert [m["content"] for m in messages[::2]] == [m["content"] for m in asked[::2]]
        for turn in range(1, len(messages), 2):
            prompt = text.encode_prompt(messages[:turn])
            tokens = decoder.generate(prompt, SamplingParams(), MAX_NEW_TOKENS, eos).tokens
            assert messages[turn]["content"] == text.decode(tokens)


def test_only_missing_parts_are_made_again(tiny_target: Path, chats: Path, answered: Path, tmp_path: Path) -> None:
    output = shutil.copytree(answered, tmp_path / "answered")
    (output / "part-00001.jsonl").unlink()
    kept = output / "part-00000.jsonl"
    before = kept.stat().st_mtime_ns
    _regenerate(tiny_target, chats, output)
    assert _messages(output) == _messages(answered)
    assert kept.stat().st_mtime_ns == before
