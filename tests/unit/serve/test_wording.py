"""Names of tokens in completions, whose likeliest tokens are a dictionary: none takes another's place."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from moray.decoding.request import TokenLogprobs
from moray.targets.demo.data import CHAT_TEMPLATE
from moray.text import ChatTokenizer
from serve.api.answers import LoggedToken
from serve.api.wording import _text_behind_others, _top_by_key

WORDS = ["<s>", "A", "<0x41>", "▁A", "<0xE6>", "▁"]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    """Two of its tokens have the same text."""
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")
    fast.chat_template = CHAT_TEMPLATE
    return ChatTokenizer(fast, "two A")


@pytest.mark.parametrize(
    ("own", "first", "second"), [(1, "A", "token_id:2"), (2, "token_id:1", "A"), (3, "A", "token_id:2")]
)
def test_equal_texts_have_entries_of_their_own(tokenizer, own, first, second):
    top = [(token, -float(token)) for token in (1, 2, 3, 4, 0, 9)]
    found = _top_by_key(tokenizer, LoggedToken(own, TokenLogprobs(-float(own), top), 0))
    others = {" A": -3.0, "bytes:\\xe6": -4.0, "<s>": 0.0, "token_id:9": -9.0}
    assert found == {first: -1.0, second: -2.0, **others}


def test_refused_drafts_keep_their_first_space(tokenizer):
    assert _text_behind_others(tokenizer, [3, 1]) == " AA"
    assert _text_behind_others(tokenizer, [0, 4, 0]) == "\ufffd"
    assert _text_behind_others(tokenizer, []) == ""
