"""What the official client gets, over a real socket."""

import json

import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from served_api import MODEL, served

from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder

CHAT = [{"role": "user", "content": "one two three"}]
LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def plain(running):
    """Plain decoding's text of a prompt's tokens."""
    replica = running.replica
    eos_ids = {*replica._target.eos_ids, *replica._tokenizer.eos_ids}

    def decode(prompt, max_new_tokens, params=None):
        decoder = PlainDecoder(replica._target, 512)
        answer = decoder.generate(prompt, params or SamplingParams(), max_new_tokens, eos_ids)
        return replica._tokenizer.decode(answer.tokens)

    return decode


@pytest.fixture(scope="module")
def chat(client):
    """One chat, whole."""

    def ask(**options):
        options = {"temperature": 0, "max_tokens": 24, **options}
        return client.chat.completions.create(model=MODEL, messages=CHAT, **options)

    return ask


@pytest.fixture(scope="module")
def complete(client):
    """One completion, whole."""

    def ask(prompt="one two", **options):
        return client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 24, **options})

    return ask


def token_of(running, letter):
    return running.replica._tokenizer.encode_text(letter)[-1]


@pytest.fixture(scope="module")
def letters(running):
    """A bias that leaves nothing but a few letters."""
    return {str(token_of(running, letter)): 60 for letter in LETTERS}


def streamed(chunks):
    """Texts by choice, finish reasons by choice, and usages."""
    texts, reasons, usages = {}, {}, []
    for chunk in chunks:
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usages


def test_greedy_chat_is_the_text_of_plain_decoding(running, chat, plain):
    answer = chat(max_completion_tokens=40)
    expected = plain(running.replica._tokenizer.encode_prompt(CHAT), 40)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL


def test_greedy_completion_is_the_text_of_plain_decoding(running, complete, plain):
    tokens = running.replica._tokenizer.encode_text("one two")
    assert complete(max_tokens=40).choices[0].text == plain(tokens, 40)


def test_streams_hold_the_same_text(chat, complete):
    texts, reasons, usages = streamed(chat(stream=True))
    whole = chat().choices[0]
    assert (texts, reasons, usages) == ({0: whole.message.content}, {0: whole.finish_reason}, [])
    texts, reasons, _ = streamed(complete(stream=True))
    whole = complete().choices[0]
    assert (texts, reasons) == ({0: whole.text}, {0: whole.finish_reason})


def test_first_chunk_names_the_role(chat):
    first = next(iter(chat(stream=True)))
    assert first.object == "chat.completion.chunk"
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")


def test_usage_counts_tokens(running, chat):
    usage = chat(max_tokens=7, extra_body={"ignore_eos": True}).usage
    num_prompt = len(running.replica._tokenizer.encode_prompt(CHAT))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (num_prompt, 7, num_prompt + 7)
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_streamed_usage_comes_last_and_alone(chat):
    chunks = list(chat(stream=True, max_tokens=7, stream_options={"include_usage": True}))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == chat(max_tokens=7).usage


def test_finish_reasons(running, chat, complete):
    ignore = {"ignore_eos": True}
    assert chat(max_tokens=3, extra_body=ignore).choices[0].finish_reason == "length"
    eos = str(running.replica._tokenizer.eos_ids[0])
    ended = complete(logit_bias={eos: 100})
    assert (ended.choices[0].finish_reason, ended.choices[0].text, ended.usage.completion_tokens) == ("stop", "", 1)


def test_stop_strings_cut_the_text(complete, letters):
    text = complete(max_tokens=40, logit_bias=letters).choices[0].text
    stop = text[10:13]
    answer = complete(max_tokens=40, logit_bias=letters, stop=[stop, "nothing of the kind"]).choices[0]
    assert (answer.text, answer.finish_reason) == (text[: text.find(stop)], "stop")
    texts, reasons, _ = streamed(complete(max_tokens=40, logit_bias=letters, stop=stop, stream=True))
    assert (texts[0], reasons[0]) == (text[: text.find(stop)], "stop")


def test_a_stop_string_across_chunks_is_never_shown(running, complete):
    bias = {str(token_of(running, "a")): 100}
    for length in (2, 3, 5):
        chunks = list(complete(logit_bias=bias, stop="a" * length, stream=True))
        assert len(chunks) >= length, "each token has a chunk of its own"
        assert "".join(chunk.choices[0].text for chunk in chunks) == ""
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_text_that_only_begins_a_stop_string_is_shown_in_the_end(running, complete):
    bias = {str(token_of(running, "a")): 100}
    texts, reasons, _ = streamed(complete(logit_bias=bias, stop="aaaab", stream=True, max_tokens=6))
    assert (texts, reasons) == ({0: "a" * 6}, {0: "length"})


def test_of_several_stop_strings_the_first_to_end_counts(complete, letters):
    text = complete(max_tokens=40, logit_bias=letters).choices[0].text
    strings = [text[12:15], text[11:14], text[20:22]]
    before = min((text.find(string) + len(string), text.find(string)) for string in strings)[1]
    assert complete(max_tokens=40, logit_bias=letters, stop=strings).choices[0].text == text[:before]


def test_several_answers_differ_and_are_told_apart(chat):
    whole = chat(n=3, temperature=1, seed=5)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    streamed_texts, reasons, _ = streamed(chat(n=3, temperature=1, seed=5, stream=True))
    assert streamed_texts == dict(enumerate(texts))
    assert set(reasons) == {0, 1, 2}


def test_answers_to_equal_prompts_differ_as_those_to_one_do(complete):
    options = {"temperature": 1, "seed": 5}

    def texts(prompt, **more):
        return [choice.text for choice in complete(prompt, **options, **more).choices]

    apart = texts(["one two"] * 4)
    assert len(set(apart)) == 4
    assert texts("one two", n=4) == apart == texts(["one two"] * 2, n=2)
    assert texts("one two") == apart[:1]


def test_a_seed_gives_the_same_text_again(running, chat, plain):
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11)
    options = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 24}
    first, again, other = (chat(seed=seed, **options).choices[0].message.content for seed in (11, 11, 12))
    assert first == again == plain(running.replica._tokenizer.encode_prompt(CHAT), 24, params)
    assert first != other
    unseeded = {chat(**options).choices[0].message.content for _ in range(3)}
    assert len(unseeded) == 3


def test_filters_leave_the_likeliest_token_alone(chat):
    greedy = chat().choices[0].message.content
    assert chat(temperature=2, extra_body={"top_k": 1}).choices[0].message.content == greedy
    assert chat(temperature=2, extra_body={"min_p": 1}).choices[0].message.content == greedy
    assert chat(temperature=2, top_p=1e-6).choices[0].message.content == greedy


def test_logprobs_of_chats(chat):
    choice = chat(max_tokens=5, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert len(content) == 5
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.token == token.top_logprobs[0].token, "the greedy token is the likeliest"
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
    assert b"".join(bytes(token.bytes) for token in content).decode(errors="replace") == choice.message.content
    assert chat(max_tokens=5, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(max_tokens=5).choices[0].logprobs is None
    chunks = chat(max_tokens=5, logprobs=True, top_logprobs=3, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in parts if part is not None for token in part.content] == content


def test_logprobs_of_completions(complete):
    whole = complete(max_tokens=5, logprobs=2).choices[0].logprobs
    assert [len(whole.tokens), len(whole.token_logprobs), len(whole.text_offset)] == [5, 5, 5]
    assert all(token in top for token, top in zip(whole.tokens, whole.top_logprobs, strict=True))
    assert whole.text_offset[0] == 0
    offsets = [o for c in complete(max_tokens=5, logprobs=2, stream=True) for o in c.choices[0].logprobs.text_offset]
    assert offsets == whole.text_offset


def test_parts_of_a_character_have_their_own_bytes(client, running):
    """Each token of the tiny target is a byte; a bias writes the character that the answer is to begin with."""
    tokenizer = running.replica._tokenizer
    first, *rest = tokenizer.encode_text("é")
    prompts = [[*tokenizer.encode_text("one"), *given] for given in ([], [first])]

    def ask(prompt, token):
        options = {"max_tokens": 1, "temperature": 0, "logprobs": 20, "logit_bias": {str(token): 100}}
        return client.completions.create(model=MODEL, prompt=prompt, **options).choices[0]

    begun, ended = ask(prompts[0], first), ask(prompts[1], rest[0])
    assert (begun.text, ended.text) == ("\ufffd", "é")
    assert (begun.logprobs.tokens, ended.logprobs.tokens) == (["bytes:\\xc3"], ["bytes:\\xa9"])
    assert len(begun.logprobs.top_logprobs[0]) == 20


def test_logit_bias_forces_and_forbids(running, complete):
    token = token_of(running, "z")
    assert complete(logit_bias={str(token): 100}, max_tokens=6).choices[0].text == "zzzzzz"
    first = complete(max_tokens=1, logprobs=1).choices[0].logprobs.tokens[0]
    forbidden = token_of(running, first)
    assert complete(max_tokens=1, logprobs=1, logit_bias={str(forbidden): -100}).choices[0].logprobs.tokens != [first]


def test_penalties_keep_tokens_from_coming_again(complete, letters):
    plain = complete(logit_bias=letters, max_tokens=8).choices[0].text
    assert set(plain) <= set(LETTERS)
    assert len(set(plain)) < 8
    for penalty in ("frequency_penalty", "presence_penalty"):
        assert complete(logit_bias=letters, max_tokens=8, **{penalty: 2.0}).choices[0].text != plain
        assert complete(logit_bias=letters, max_tokens=8, **{penalty: 0.0}).choices[0].text == plain


def test_lists_of_prompts_and_tokens(running, complete):
    tokens = [running.replica._tokenizer.encode_text(text) for text in ("one two", "three")]
    texts = [complete(prompt).choices[0].text for prompt in ("one two", "three")]
    for prompts in (["one two", "three"], tokens):
        answer = complete(prompts)
        assert [choice.text for choice in answer.choices] == texts
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
    assert complete(tokens[0]).choices[0].text == texts[0]
    twice = complete(["one two", "three"], n=2).choices
    assert [(choice.index, choice.text) for choice in twice] == list(enumerate([texts[0]] * 2 + [texts[1]] * 2))


def test_chats_of_parts_and_with_answers_taken_over(client, chat):
    parts = [{"type": "text", "text": "one two"}, {"type": "text", "text": " three"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=24
    )
    expected = chat().choices[0].message
    assert answer.choices[0].message == expected
    history = [*CHAT, expected, {"role": "user", "content": "go on"}]
    assert client.chat.completions.create(model=MODEL, messages=history, max_tokens=2).choices


def test_an_answer_of_openais_is_taken_over_as_its_client_writes_it(client):
    texts = {"content": "four", "annotations": [], "tool_calls": [], "refusal": None, "audio": None}
    citation = {"type": "url_citation", "url_citation": {"start_index": 0, "end_index": 1, "title": "a", "url": "b"}}

    def answer(**fields):
        dumped = ChatCompletionMessage.model_validate({"role": "assistant", **fields}).model_dump()
        history = [*CHAT, dumped, {"role": "user", "content": "go on"}]
        return client.chat.completions.create(model=MODEL, messages=history, max_tokens=4, temperature=0).choices[0]

    expected = answer(content="four")
    assert answer(**texts) == answer(**texts | {"annotations": [citation]}) == expected
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for field, value in (
        ("tool_calls", [call]),
        ("function_call", call["function"]),
        ("refusal", "I will not"),
        ("audio", {"id": "a", "data": "", "expires_at": 1, "transcript": "four"}),
    ):
        with pytest.raises(openai.BadRequestError, match=rf"messages.1: {field} holds .*only text") as caught:
            answer(**{"content": None, field: value})
        assert (caught.value.param, caught.value.code) == ("messages", "unsupported_parameter")


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model


def test_names_with_a_slash_are_found(serve_target):
    with serve_target(model_name="moray/tiny") as running:
        assert running.client().models.retrieve("moray/tiny").id == "moray/tiny"


def test_fields_that_change_nothing_are_taken(chat):
    extra = {"user": "me", "store": False, "metadata": {"a": "b"}, "tools": [], "response_format": {"type": "text"}}
    assert chat(extra_body={**extra, "service_tier": "auto", "seed": None}).choices == chat().choices


def test_raw_answers_are_json(client):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=CHAT, max_tokens=1)
    assert raw.headers["content-type"] == "application/json"
    assert set(json.loads(raw.text)) == {"id", "created", "model", "object", "choices", "usage"}


@pytest.fixture(scope="module")
def stories(shared_data):
    """A small real target with SentencePiece's tokens."""
    with served(shared_data / "models" / "stories3M-hf", template="plain") as running:
        yield running.client()


def test_completions_keep_their_first_space(stories):
    options = {"model": MODEL, "prompt": "Once upon", "temperature": 0, "max_tokens": 6}
    text = stories.completions.create(**options).choices[0].text
    assert text.startswith(" a time,")
    assert streamed(stories.completions.create(stream=True, **options))[0][0] == text
    stopped = stories.completions.create(stop=" a", **options)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    assert stopped.usage.completion_tokens == 1
    chat = {"messages": [{"role": "user", "content": "Once upon"}]}
    answer = stories.chat.completions.create(
        **{"logprobs": True, **chat, **{k: options[k] for k in options if k != "prompt"}}
    )
    assert answer.choices[0].message.content == text
    assert b"".join(bytes(token.bytes) for token in answer.choices[0].logprobs.content) == text.encode()


def test_tokens_that_differ_in_a_space_have_entries_of_their_own(stories):
    options = {"model": MODEL, "prompt": "It was a sun", "temperature": 0, "max_tokens": 8, "logprobs": 20}
    logprobs = stories.completions.create(**options).choices[0].logprobs
    assert [len(top) for top in logprobs.top_logprobs] == [20] * 8
    assert logprobs.top_logprobs[0]["r"] > logprobs.top_logprobs[0][" r"] + 1
    assert all(
        top[token] == value
        for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )
    lengths = [len(token) for token in logprobs.tokens]
    assert logprobs.text_offset == [sum(lengths[:index]) for index in range(8)]
