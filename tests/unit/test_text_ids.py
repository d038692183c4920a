"""A tokenizer that knows more tokens than its model has embeddings for."""

import json
import logging
from pathlib import Path

import pytest
from tiny_targets import save_chat_target

from moray.errors import DataError
from moray.text import ChatTokenizer


@pytest.fixture
def small_head(tmp_path: Path) -> Path:
    """A chat target with embeddings for all tokens but the tokenizer's last ones; its weights are not read here."""
    folder = save_chat_target(tmp_path / "target")
    size = len(ChatTokenizer.load(str(folder)).tokenizer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size - 1}))
    return folder


def test_ids_out_of_range_are_named_and_refused_where_they_occur(
    small_head: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = ChatTokenizer.load(str(small_head))
    last = tokenizer.vocab_size - 1
    assert f"1 tokens that the model has no embedding for (ids {last}; the model has {last})" in caplog.text
    text = "\u00ed"  # in UTF-8 it ends with the byte AD, the last token of the alphabet
    assert tokenizer.encode_text("b a"), "what has embeddings is accepted"
    refused = rf"token {last} \(.*\) of tokenizer .* has no embedding"
    with pytest.raises(DataError, match=refused):
        tokenizer.encode_text(text)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b {text}"}]
    with pytest.raises(DataError, match=refused):
        tokenizer.encode_chat(chat, 512)
    with pytest.raises(DataError, match=refused):
        tokenizer.encode_prompt(chat)
    assert len(tokenizer.encode_chat(chat, 3).tokens) == 3, "what is cut away does not occur"


def test_a_tokenizer_by_itself_has_no_bound(small_head: Path) -> None:
    (small_head / "config.json").unlink()
    tokenizer = ChatTokenizer.load(str(small_head))
    last = tokenizer.vocab_size - 1
    assert last in tokenizer.encode_text("\u00ed")
