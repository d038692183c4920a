"""What each token adds to a text, in bytes.

A token may hold a part of a character, so its bytes cannot be had by decoding it alone: that writes U+FFFD, and
SentencePiece's decoders drop a first space. They are read from the tokenizer's own decoder, step by step; where it has
a step that this module does not know, the bytes are unknown, never guessed.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")

Step = Callable[[str], str | bytes]
"""What one step of a decoder makes of a token; bytes are final."""


class TokenBytes:
    """The bytes of a tokenizer's tokens, as they stand in the middle of a text without special tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """`tokenizer` is a fast one of transformers."""
        self._tokenizer: Any = tokenizer
        self._special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self._steps = _read_steps(_description(self._tokenizer.backend_tokenizer.decoder))
        self._known: dict[int, bytes | None] = {}

    def of(self, token: int) -> bytes | None:
        """The token's own bytes, with its leading space; None where the tokenizer's decoder is of an unknown kind.

        Special tokens, and ids that the tokenizer does not know, have none: they add nothing to a text.
        """
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def spelling(self, token: int) -> str | None:
        """How the vocabulary spells a special token; None for every other token."""
        return self._tokenizer.convert_ids_to_tokens(token) if token in self._special else None

    def _read(self, token: int) -> bytes | None:
        piece: str | bytes | None = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None or token in self._special:
            return b""
        if self._steps is None:
            return None
        for step in self._steps:
            if isinstance(piece, bytes):
                return piece if step is _joined else None
            piece = step(piece)
        return piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace")


def _description(decoder: Any) -> Any:
    """A decoder of `tokenizers` as tokenizer.json has it; None if there is none, or one that only Python knows."""
    if decoder is None:
        return None
    try:
        return json.loads(decoder.__getstate__())
    except Exception:  # noqa: BLE001 - tokenizers raises nothing narrower where a decoder is written in Python
        return None


def _read_steps(decoder: Any) -> list[Step] | None:
    """The steps that change single tokens; None if one of them is unknown.

    Once a step has joined all tokens to one text, `Strip` takes characters off the ends of the text, not of tokens.
    """
    if decoder is None:
        return None
    steps: list[Step] = []
    is_joined = False
    for part in _flat(decoder):
        if is_joined and part["type"] not in ("Fuse", "Strip"):
            return None
        step = _joined if is_joined else _read_step(part)
        if step is None:
            return None
        steps.append(step)
        is_joined = is_joined or part["type"] in ("Fuse", "ByteLevel")
    return steps


def _flat(decoder: Any) -> Iterator[Any]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for part in decoder["decoders"]:
        yield from _flat(part)


def _read_step(part: Any) -> Step | None:
    from tokenizers import Regex, decoders

    match part:
        case {"type": "ByteLevel"}:
            return _byte_level()
        case {"type": "ByteFallback"}:
            return _byte_fallback
        case {"type": "Fuse"}:
            return _joined
        case {"type": "Metaspace", "replacement": str(sign)}:
            return lambda piece: piece.replace(sign, " ")
        case {"type": "Replace", "pattern": {"String": str(text)}, "content": str(content)}:
            return lambda piece: piece.replace(text, content)
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(content)}:
            replacing = decoders.Replace(Regex(pattern), content)
            return lambda piece: replacing.decode([piece])
        case {"type": "Strip", "content": str(content), "start": int(start), "stop": int(stop)}:
            stripping = decoders.Strip(content=content, left=start, right=stop)
            return lambda piece: stripping.decode([piece])
    return None


def _joined(piece: str) -> str:
    return piece


def _byte_fallback(piece: str) -> str | bytes:
    found = _BYTE_TOKEN.fullmatch(piece)
    return piece if found is None else bytes.fromhex(found[1])


def _byte_level() -> Step:
    """Each character stands for one byte. Added tokens that contain any other character are plain text."""
    # GPT-2's table: printable bytes stand for themselves, the others, in order, for the characters from U+0100 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def read(piece: str) -> bytes:
        if all(character in table for character in piece):
            return bytes(table[character] for character in piece)
        return piece.encode("utf-8", "replace")

    return read
