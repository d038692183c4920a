"""Names of tokens in completions, whose likeliest tokens are a dictionary: none takes another's place."""

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from moray.decoding.params import SamplingParams
from moray.decoding.request import Request, RequestOutput, TokenLogprobs
from moray.decoding.sampling.detokenizer import IncrementalDetokenizer
from moray.decoding.sampling.stop import StopStrings
from moray.targets.demo.data import CHAT_TEMPLATE
from moray.text import ChatTokenizer
from serve.api.answers import Choice, LoggedToken, Usage
from serve.api.documents import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from serve.api.schemas import ChatRequest, CompletionRequest
from serve.api.wording import Wording, _text_behind_others, _top_by_key

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


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completion"])
def test_answers_and_chunks_are_as_documented(tokenizer, is_chat):
    prompt = {"messages": [{"role": "user", "content": "A"}], "logprobs": True, "top_logprobs": 2}
    fields = prompt if is_chat else {"prompt": "A", "logprobs": 2}
    request_class, chunk, whole = (
        (ChatRequest, ChatCompletionChunk, ChatCompletion)
        if is_chat
        else (CompletionRequest, CompletionChunk, Completion)
    )
    body = request_class.model_validate({"model": "m", "speculation": {"trace": True}, **fields})
    request = Request(prompt=(1,), params=SamplingParams(), max_new_tokens=4, logprobs=2)
    stream = IncrementalDetokenizer(StopStrings((), tokenizer.decode), (), tokenizer.token_bytes.of)
    choice, wording = Choice(0, request, stream, tokenizer, Usage(num_prompt=1)), Wording(body, "m")
    logged = [TokenLogprobs(-1.0, [(1, -1.0), (2, -2.0)]) for _ in range(2)]
    outputs = [
        RequestOutput(0, [1, 3], num_accepted=1, rejected=[4], logprobs=logged),
        RequestOutput(0, [], finish_reason="stop", logprobs=[]),
    ]
    chunks = [*wording.opening(choice), *(wording.chunk(choice, choice.add(one)) for one in outputs)]
    chunks.append(wording.usage(choice.usage))
    assert TypeAdapter(list[chunk]).validate_python(chunks, strict=True) == chunks
    assert chunks[-2]["speculation"]["num_rejected"] == 0
    answer = wording.whole([choice])
    assert TypeAdapter(whole).validate_python(answer, strict=True) == answer
