"""A request whose text spells a token that the served model lacks is refused with one line."""

from pathlib import Path

import pytest
from tiny_targets import save_chat_target

from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer
from serve.api.answers import choices_for
from serve.api.errors import ApiError
from serve.api.schemas import ChatRequest, CompletionRequest
from serve.config import ApiConfig, ServeConfig


def test_a_token_beyond_lm_head_is_a_bad_request(tmp_path: Path) -> None:
    folder = save_chat_target(tmp_path)
    bigger = ChatTokenizer.load(str(folder)).tokenizer
    size = len(bigger)
    bigger.add_tokens(["<extra>"])
    bigger.save_pretrained(folder)
    tokenizer = ChatTokenizer.load(str(folder))
    config = ServeConfig(target=TargetConfig(model=str(folder)), api=ApiConfig(model_name="tiny"))
    content = [{"role": "user", "content": "a <extra>"}]
    for body, param in (
        (ChatRequest.model_validate({"model": "tiny", "messages": content}), "messages"),
        (CompletionRequest(model="tiny", prompt="a <extra>"), "prompt"),
    ):
        with pytest.raises(ApiError) as caught:
            choices_for(body, tokenizer, config, 100, size)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert f"token {size} (" in str(caught.value)
        assert "\n" not in str(caught.value)
