"""A token's bytes are its own: joined they are the text, whatever characters they are parts of."""

import pytest
from tiny_targets import save_chat_target
from tokenizers import Tokenizer, decoders, models
from transformers import AddedToken, PreTrainedTokenizerFast

from moray.decoding.sampling.detokenizer import IncrementalDetokenizer
from moray.decoding.sampling.stop import StopStrings
from moray.text import ChatTokenizer
from moray.token_bytes import TokenBytes

REAL = ("llama2-vicuna", "llama3-instruct", "qwen-chatml")
TEXTS = [
    "Hello, world: it's 10 o'clock.\n\n\tyes",
    " a space in front, two  within, and behind ",
    "🙂🙃👨‍👩‍👧‍👦 and 🏳️‍🌈\ufe0f",
    "e\u0301 o\u0302\u0323 n\u0303 \u0928\u093f",
    "漢字とかな、한국어 𠮷",
    "مرحبا بالعالم \u202bab\u202c",
    "\u2581 is a sign, <0x41> and <s> are text\x00\x7f",
]
SENTENCEPIECE = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


@pytest.fixture(scope="module", params=["byte_level", *REAL])
def tokenizer(request, tmp_path_factory) -> ChatTokenizer:
    """One token per byte always, real ones where they are."""
    if request.param == "byte_level":
        return ChatTokenizer.load(str(save_chat_target(tmp_path_factory.mktemp("bytes"))))
    return ChatTokenizer.load(str(request.getfixturevalue("shared_data") / "tokenizers" / request.param), "plain")


def encode(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Without the tokens that a tokenizer adds, and with none of its special ones."""
    return tokenizer.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def with_decoder(decoder, words, added=()) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if decoder is not None:
        fast.backend_tokenizer.decoder = decoder
    fast.add_tokens(list(added))
    return fast


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_joined_bytes_are_the_text(tokenizer, text):
    tokens = encode(tokenizer, "x" + text)
    joined = b"".join(tokenizer.token_bytes.of(token) for token in tokens)
    assert joined.decode().removeprefix(" ") == tokenizer.decode(tokens)


def test_every_token_behind_others_adds_its_own_bytes(tokenizer):
    """Of a whole vocabulary, each token that is text by itself; a part of a character is none."""
    first = encode(tokenizer, "x")
    text = tokenizer.decode(first)
    num_parts = 0
    for token in range(0, tokenizer.vocab_size, 1 + tokenizer.vocab_size // 4000):
        added = tokenizer.decode([*first, token])[len(text) :]
        own = tokenizer.token_bytes.of(token)
        num_parts += "\ufffd" in added
        assert "\ufffd" in added or own == added.encode(), token
    assert num_parts


def test_special_tokens_and_unknown_ids_add_nothing(tokenizer):
    for token in tokenizer.tokenizer.all_special_ids:
        assert tokenizer.token_bytes.of(token) == b""
        assert tokenizer.token_bytes.spelling(token) in tokenizer.tokenizer.all_special_tokens
    assert tokenizer.token_bytes.of(tokenizer.vocab_size + 5) == b""
    assert tokenizer.token_bytes.spelling(tokenizer.vocab_size + 5) is None


def test_known_decoders():
    words = ["▁a", "<0xE6>", "é", "Ġb"]
    added = ["<think>", "漢", AddedToken("<end>", special=True)]
    sentencepiece = TokenBytes(with_decoder(decoders.Sequence(SENTENCEPIECE), words, added))
    expected = [b" a", b"\xe6", "é".encode(), "Ġb".encode(), b"<think>", "漢".encode(), b""]
    assert [sentencepiece.of(token) for token in range(7)] == expected
    byte_level = TokenBytes(with_decoder(decoders.ByteLevel(), words, added))
    assert [byte_level.of(token) for token in (2, 3, 4, 5, 6)] == [b"\xe9", b" b", b"<think>", "漢".encode(), b""]
    assert [TokenBytes(with_decoder(decoders.Metaspace(), words)).of(token) for token in (0, 1)] == [b" a", b"<0xE6>"]
    stripping = decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Fuse()])
    assert TokenBytes(with_decoder(stripping, words)).of(0) == b"a", "a step before the tokens are joined is a token's"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Decoder.custom(object()),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.BPEDecoder()]),
    ],
    ids=["none", "WordPiece", "CTC", "of Python", "behind Fuse", "within a sequence"],
)
def test_bytes_that_are_not_known_are_none(decoder):
    assert TokenBytes(with_decoder(decoder, ["▁a", "b"])).of(0) is None


@pytest.mark.parametrize("prompt", ["Once upon", "x ", "🙂", "漢字", ""])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_an_answer_goes_on_with_its_prompt(tokenizer, prompt, text):
    context = tokenizer.encode_text(prompt)
    answer = encode(tokenizer, text)
    stream = IncrementalDetokenizer(StopStrings([], tokenizer.decode), context, tokenizer.token_bytes.of)
    pieces, offsets = [], []
    for token in answer:
        pieces += stream.push([token])
        offsets += stream.offsets
    whole = "".join(piece.text for piece in pieces + stream.finish())
    assert tokenizer.decode(context) + whole == tokenizer.decode(context + answer)
    joined = b"".join(tokenizer.token_bytes.of(token) for token in answer)
    dropped = len(joined.decode()) - len(whole)
    assert dropped == (1 if joined.decode() == " " + whole else 0), "the first space, where nothing stands before it"
    read = b""
    for token, offset in zip(answer, offsets, strict=True):
        assert offset == max(0, len(read.decode(errors="ignore")) - dropped)
        read += tokenizer.token_bytes.of(token)


def test_long_prompts_are_not_decoded_for_their_answers(tokenizer):
    lengths = []

    def decode(tokens):
        lengths.append(len(tokens))
        return tokenizer.decode(tokens)

    IncrementalDetokenizer(StopStrings([], decode), encode(tokenizer, "word " * 300))
    assert max(lengths) <= 8
    IncrementalDetokenizer(StopStrings([], decode), encode(tokenizer, "🙂" * 300))
    assert max(lengths) <= 16


def test_a_character_that_the_prompt_has_begun_is_the_answers(tokenizer):
    tokens = encode(tokenizer, "x𐎀!")
    parts = [t for t in tokens if "\ufffd" in tokenizer.decode([t])]
    assert len(parts) > 1
    begun = tokens.index(parts[0]) + 1
    stream = IncrementalDetokenizer(StopStrings([], tokenizer.decode), tokens[:begun], tokenizer.token_bytes.of)
    assert "".join(p.text for p in stream.push(tokens[begun:]) + stream.finish()) == "𐎀!"


def test_offsets_of_bytes_that_are_no_text(tmp_path):
    tokenizer = ChatTokenizer.load(str(save_chat_target(tmp_path)))
    emoji, (a,) = encode(tokenizer, "🙂"), encode(tokenizer, "a")
    tokens = [a, *emoji[:2], tokenizer.eos_ids[0], a, emoji[1], emoji[1], a, *emoji, a]
    stream = IncrementalDetokenizer(StopStrings([], tokenizer.decode), (), tokenizer.token_bytes.of)
    text = "".join(piece.text for piece in stream.push(tokens))
    assert text == tokenizer.decode(tokens) == "a\ufffda\ufffd\ufffda🙂a"
    assert stream.offsets == [0, 1, 1, 1, 2, 3, 4, 5, 6, 6, 6, 6, 7]
