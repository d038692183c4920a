"""Stop strings end an answer with the token that completes the first of them, whatever the tokenizer does to text."""

import random
from collections.abc import Callable, Sequence

import pytest
from tiny_targets import save_chat_target

from moray.decoding.sampling.stop import MAX_LENGTH, MAX_STRINGS, StopChecker, StopStrings
from moray.errors import DataError
from moray.text import ChatTokenizer

REAL = ("llama2-vicuna", "llama3-instruct", "qwen-chatml")
TEXT = "Hello  world, one\n\ntwo: 漢字漢字 and 🙂🙃 é — «fin». User: no. <a> </a>\t\n" * 2


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> ChatTokenizer:
    """One token per byte, so that every character above ASCII is split."""
    return ChatTokenizer.load(str(save_chat_target(tmp_path_factory.mktemp("bytes"))))


@pytest.fixture(scope="module", params=["byte_level", *REAL])
def tokenizer(request) -> ChatTokenizer:
    """The byte-level one always, real ones where they are."""
    if request.param == "byte_level":
        return request.getfixturevalue("byte_level")
    return ChatTokenizer.load(str(request.getfixturevalue("shared_data") / "tokenizers" / request.param), "plain")


def encode(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]


def naive_length(tokens: Sequence[int], strings: Sequence[str], decode: Callable) -> int | None:
    """The definition: how many tokens it takes until their text contains a string."""
    for count in range(1, len(tokens) + 1):
        if any(string in decode(tokens[:count]) for string in strings):
            return count
    return None


def length(tokens: Sequence[int], strings: Sequence[str], decode: Callable, pieces: Sequence[int] = (1,)) -> int | None:
    """The same by `StopChecker`, given pieces of these lengths in turn, as cycles emit them."""
    ending = StopChecker(10**6, (), StopStrings(strings, decode))
    kept, begin, turn = 0, 0, 0
    while begin < len(tokens):
        size = pieces[turn % len(pieces)]
        kept += len(ending.cut(list(tokens[begin : begin + size])))
        if ending.finish_reason is not None:
            return kept
        begin, turn = begin + size, turn + 1
    return None


def letters(tokens: Sequence[int]) -> str:
    """A made-up tokenizer: token 0 is without text, the others are words of one or more letters."""
    return "".join(("", "a", "b", "c", "ab", "bca", "\n", " x")[token] for token in tokens)


# --- Where ---


@pytest.mark.parametrize(
    ("tokens", "strings", "expected"),
    [
        ([1, 2, 3], ["b"], 2),
        ([1, 2, 3], ["abc"], 3),  # over three tokens
        ([7, 5, 1], ["c"], 2),  # in the middle of a token
        ([4, 4, 3], ["ba"], 2),
        ([1, 2, 3], ["c", "b"], 2),  # the one completed first, not the one named first
        ([1, 0, 0, 2, 3], ["ab"], 4),  # tokens without text in between
        ([1, 1, 2], ["aab"], 3),  # found although a first try at "ab" began too early
        ([1, 3, 3], ["b"], None),
        ([2], ["b"], 1),
        ([0, 0, 2], ["b"], 3),
    ],
)
def test_the_answer_ends_with_the_completing_token(tokens, strings, expected):
    assert naive_length(tokens, strings, letters) == expected
    for pieces in ((1,), (2,), (3,), (1, 2)):
        assert length(tokens, strings, letters, pieces) == expected


def test_every_made_up_answer_ends_where_the_definition_says():
    rng = random.Random(0)
    ended = 0
    for _ in range(3000):
        tokens = rng.choices(range(8), k=rng.randint(1, 14))
        strings = ["".join(rng.choices("abc\n x", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        expected = naive_length(tokens, strings, letters)
        assert length(tokens, strings, letters, (1, 3)) == expected, (tokens, strings)
        ended += expected is not None
    assert 500 < ended < 2500


def test_real_text_ends_where_the_definition_says(tokenizer):
    tokens = encode(tokenizer, TEXT)
    text = tokenizer.decode(tokens)
    rng = random.Random(1)
    for _ in range(60):
        begin = rng.randrange(len(text) // 2)
        strings = [text[begin : begin + size] for size in (rng.randint(1, 3), rng.randint(1, 20))]
        for chosen in (strings[:1], strings[1:]):
            assert length(tokens, chosen, tokenizer.decode, (4,)) == naive_length(tokens, chosen, tokenizer.decode)


@pytest.mark.parametrize("show_special", [False, True])
def test_random_tokens_end_where_the_definition_says(tokenizer, show_special):
    """Halves of characters, single spaces, special tokens and bytes that are no text, in any order."""
    special = list(tokenizer.tokenizer.all_special_ids)
    common = encode(tokenizer, " a  b 漢🙂é\n\n world" * 2)

    def decode(tokens):
        return tokenizer.decode(tokens, skip_special_tokens=not show_special)

    rng = random.Random(2)
    ended = 0
    for _ in range(150):
        tokens = [rng.choice(special if rng.random() < 0.1 else common) for _ in range(14)]
        text = decode(tokens).replace("\ufffd", "")
        begin = rng.randrange(max(1, len(text)))
        string = text[begin : begin + rng.randint(1, 4)] or "x"
        expected = naive_length(tokens, [string], decode)
        assert length(tokens, [string], decode, (1, 5)) == expected, (tokens, string)
        ended += expected is not None
    assert ended > 50


def test_characters_split_over_tokens(byte_level):
    tokens = encode(byte_level, "é漢🙂")
    assert len(tokens) == 2 + 3 + 4
    for string, expected in (("é", 2), ("漢", 5), ("é漢", 5), ("🙂", 9), ("漢🙂", 9)):
        assert length(tokens, [string], byte_level.decode) == expected
    assert length(tokens[:-1], ["🙂"], byte_level.decode) is None


def test_runs_of_bytes_and_leading_spaces_of_sentencepiece(shared_data):
    """Llama-2 writes rare characters as bytes, one bad byte of which spoils the whole run's text, and drops the first
    space of whatever is decoded: a cut-out of the last few tokens would show another text."""
    tokenizer = ChatTokenizer.load(str(shared_data / "tokenizers/llama2-vicuna"), "plain")
    emoji = encode(tokenizer, "🙂" * 40 + "🙃 end")
    assert sum(tokenizer.decode([token]) == "\ufffd" for token in emoji) >= 160
    assert length(emoji, ["🙃"], tokenizer.decode) == naive_length(emoji, ["🙃"], tokenizer.decode)
    words = encode(tokenizer, "one two three")
    assert tokenizer.decode(words[-1:]) == "three"
    assert length(words, [" three"], tokenizer.decode) == len(words)
    assert length(words, [" one"], tokenizer.decode) is None


# --- What it costs ---


@pytest.mark.parametrize("kind", ["text", "without text", "bytes that are no text"])
def test_the_cost_per_token_does_not_grow(byte_level, kind):
    piece = {
        "text": encode(byte_level, "some 漢字 "),
        "without text": [byte_level.eos_ids[0]],
        "bytes that are no text": encode(byte_level, "漢")[1:2],
    }[kind]
    decoded = []

    def decode(tokens):
        decoded.append(len(tokens))
        return byte_level.decode(tokens)

    tokens = (piece * 400)[:400]
    assert length(tokens, ["x" * MAX_LENGTH, "stop"], decode) is None
    assert max(decoded) <= 40
    first, second = sum(decoded[: len(decoded) // 2]), sum(decoded[len(decoded) // 2 :])
    assert second < 1.2 * first


# --- Together with the other ends ---


def test_whatever_comes_first_ends_the_answer():
    def end(limit: int, eos_ids: tuple[int, ...], strings: list[str]) -> tuple[list[int], str | None]:
        ending = StopChecker(limit, eos_ids, StopStrings(strings, letters))
        kept = ending.cut([1, 2]) if limit != 1 else ending.cut([1])
        return kept + (ending.cut([3, 6, 1]) if ending.finish_reason is None else []), ending.finish_reason

    assert end(9, (6,), ["c"]) == ([1, 2, 3], "stop")
    assert end(9, (3,), ["\n"]) == ([1, 2, 3], "stop")
    assert end(9, (3,), ["c"]) == ([1, 2, 3], "stop")
    assert end(3, (), ["\n"]) == ([1, 2, 3], "length")
    assert end(4, (), ["\n"]) == ([1, 2, 3, 6], "stop"), "completed by the last token there was room for"
    assert end(1, (), ["b"]) == ([1], "length")
    assert end(9, (), ["no"]) == ([1, 2, 3, 6, 1], None)
    assert end(9, (), []) == ([1, 2, 3, 6, 1], None), "no strings at all"


def test_one_object_serves_many_answers():
    stop = StopStrings(["ab"], letters)
    first, second = StopChecker(9, (), stop), StopChecker(9, (), stop)
    assert first.cut([1]) == [1]
    assert second.cut([2]) == [2], "an answer does not go on where another stopped"
    assert second.finish_reason is None
    first.cut([2])
    assert first.finish_reason == "stop"


# --- The text to show ---


@pytest.mark.parametrize(
    ("tokens", "strings", "expected"),
    [
        ([7, 1, 2], ["b"], " xa"),
        ([7, 5], ["c"], " xb"),  # what the completing token says after the string goes too
        ([1, 2], ["x"], "ab"),
        ([1, 5], ["bca", "c"], "ab"),  # ends first
        ([1, 2, 3], ["bc", "abc", "c"], ""),  # all end together: the longest
        ([1, 2, 3], [], "abc"),
    ],
)
def test_the_text_before_the_stop_string(tokens, strings, expected):
    assert StopStrings(strings, letters).text_before(tokens) == expected


def test_the_text_before_is_cut_between_whole_characters(byte_level):
    tokens = encode(byte_level, "é漢🙂")
    assert StopStrings(["🙂"], byte_level.decode).text_before(tokens) == "é漢"


# --- What cannot be ---


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ([""], r"stop\[0\] has 0 characters; 1 to 256 are accepted: leave it out"),
        (["a", "b" * (MAX_LENGTH + 1)], r"stop\[1\] has 257 characters; 1 to 256 are accepted: shorten it"),
        (["a"] * (MAX_STRINGS + 1), "stop has 17 strings; at most 16 are accepted"),
        ("END", r"stop is the text 'END'; a list of strings is needed, such as \['END'\]"),
        (["a\ufffd"], r"stop\[0\] is 'a.', which holds U\+FFFD"),
    ],
)
def test_unusable_strings_are_refused(strings, message):
    with pytest.raises(DataError, match=message):
        StopStrings(strings, letters)


def test_the_largest_accepted_strings():
    stop = StopStrings([chr(97 + i) * MAX_LENGTH for i in range(MAX_STRINGS)], letters)
    assert len(stop.strings) == MAX_STRINGS
    assert length([1] * 300, stop.strings, letters) == MAX_LENGTH
