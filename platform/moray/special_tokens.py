"""Tokenises as plain text the special tokens that messages spell out.

Tokenizers treat `<|im_end|>` as the end of a turn wherever it occurs, so a user who writes it into a message could
forge the turns of others. Templates join and cut contents, so their renderings are compared: one of the contents as
they are, and one in which no special token can begin in a content. If both contain the same special tokens, nothing is
done; otherwise the second is tokenised. A token that the tokenizer does not mark as special, often `<think>`, is left
alone unless the template writes it around a user's turn. Plain words of a template, such as Vicuna's `USER:`, and
tokens of one character are left alone, too."""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from moray.chat_template import ChatTemplate, Message
from moray.errors import DataError

CONTENT_RULE = 2
"""Version of the rule for reading contents, recorded in a cache of tokens: raise it whenever a chat's tokens may
change. 1: special tokens that one content spells are text. 2: so are those that a template assembles from contents, and
tokens around a user's turn that the tokenizer does not mark as special."""

_SPACE = re.compile(r"\s*")
_NO_WORD = re.compile(r"[^\w\s]")
_MARKS = range(0xE100, 0xF8FF)
"""Private-use characters, which no template trims, tests or produces."""


class SpecialTokens:
    """Special tokens of a tokenizer; reads chats that spell them."""

    def __init__(self, tokenizer: Any, template: ChatTemplate) -> None:
        """`tokenizer` is a fast tokenizer of transformers; `template` renders its chats."""
        added = {t.content: (number, t) for number, t in tokenizer.added_tokens_decoder.items() if len(t.content) > 1}
        controls = _control_tokens(template, [text for text, (_, token) in added.items() if not token.special])
        self._special = {text: found for text, found in added.items() if found[1].special or text in controls}
        self._spelt = _any_of(self._special)
        self._beginning = _any_of({text[0] for text in self._special})
        # Templates search for tokens such as `</think>`: these stay whole if no special token can begin inside them.
        begun = {text[:length] for text in self._special for length in range(1, len(text) + 1)}
        others = [text for text in added.keys() - begun if self._beginning.match(text) and not self._spelt.match(text)]
        whole = trie_pattern(text for text in others if not self._beginning.search(text, 1)) or r"(?!)"
        self._whole = re.compile(f"({whole})")
        self._tokenizer, self._template = tokenizer, template
        self._splitting: tuple[Any, Any] | None = None

    def marked(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> tuple[Sequence[Message], str]:
        """Insert a marker character into contents that could spell a special token, so that they are read as text.

        Returns the messages and the marker; the marker is empty if none was needed. It is a character that no content
        holds, inserted after every character with which a special token could begin.

        Raises:
            DataError: the template rejects the chat, or its contents use all characters that could be markers.
        """
        if not any(self._beginning.search(message["content"]) for message in messages):
            return messages, ""
        used = {character for message in messages for character in message["content"]}
        mark = next((chr(code) for code in _MARKS if chr(code) not in used), None)
        if mark is None:
            raise DataError(
                "a chat may spell special tokens and uses all private-use characters; leave some of them out"
            )
        guarded = [Message(role=m["role"], content=self._mark(m["content"], mark)) for m in messages]
        as_is, safe = (self._template.render(chat, add_generation_prompt) for chat in (messages, guarded))
        return (messages, "") if self._spelt.findall(as_is) == self._spelt.findall(safe) else (guarded, mark)

    def _mark(self, content: str, mark: str) -> str:
        broken = {ord(text[0]): text[0] + mark for text in self._special}
        parts = self._whole.split(content)  # text, whole token, text, whole token, ..., text
        parts[::2] = [part.translate(broken) for part in parts[::2]]
        return "".join(parts)

    def tokenise(self, text: str, mark: str) -> tuple[list[int], np.ndarray]:
        """Return the ids of a rendering of marked messages, and their offsets [seq, 2] in it without the markers.

        The text between the template's special tokens is tokenised piece by piece, as the tokenizer itself does.

        Raises:
            UnicodeError, TypeError: the text holds a lone surrogate.
        """
        pieces: list[tuple[str, int | None]] = []
        end = 0
        for found in self._spelt.finditer(text):
            number, token = self._special[found.group()]
            start, stop = found.span()
            # Some tokens absorb the white space beside them.
            start = end + len(text[end:start].rstrip()) if token.lstrip else start
            stop = _SPACE.match(text, stop).end() if token.rstrip else stop  # type: ignore[union-attr]
            pieces += [(text[end:start], None), (text[start:stop], number)]
            end = stop
        pieces.append((text[end:], None))
        plain = [(piece.replace(mark, ""), number) for piece, number in pieces]
        between = [piece for piece, number in plain if number is None]
        at_start, further_on = self._backends()
        encoded = iter(
            at_start.encode_batch(between[:1], add_special_tokens=False)
            + further_on.encode_batch(between[1:], add_special_tokens=False)
        )
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        begin = 0
        for piece, number in plain:
            if number is not None:
                ids.append(number)
                offsets.append((begin, begin + len(piece)))
            else:
                encoding = next(encoded)
                ids += encoding.ids
                offsets += [(begin + start, begin + stop) for start, stop in encoding.offsets]
            begin += len(piece)
        return ids, np.asarray(offsets, dtype=np.int64).reshape(-1, 2)

    def _backends(self) -> tuple[Any, Any]:
        """Return two tokenizers that read special tokens as text: for the first piece of a text, and for later pieces.
        They are copies, so that threads may use them and the original tokenizer at the same time."""
        if self._splitting is None:
            from tokenizers import Tokenizer

            parts = json.loads(self._tokenizer.backend_tokenizer.to_str())
            for token in parts["added_tokens"]:
                token["special"] = token["content"] in self._special
            at_start = Tokenizer.from_str(json.dumps(parts))
            _forget_prefix(parts["pre_tokenizer"])
            further_on = Tokenizer.from_str(json.dumps(parts))
            for splitting in (at_start, further_on):
                splitting.encode_special_tokens = True
                splitting.no_padding()
                splitting.no_truncation()
            self._splitting = at_start, further_on
        return self._splitting


def _forget_prefix(pre_tokenizer: Any) -> None:
    """Change the JSON of a pre-tokenizer that prepends a space to the start of a text, so that it never does."""
    for part in (pre_tokenizer or {}).get("pretokenizers", []):
        _forget_prefix(part)
    if pre_tokenizer and pre_tokenizer.get("prepend_scheme") == "first":
        pre_tokenizer["prepend_scheme"] = "never"


def _control_tokens(template: ChatTemplate, added: Collection[str]) -> set[str]:
    """Return the added tokens that a template writes around a user's turn, except words and white space.

    Tokens in a default system turn before it, such as an explanation of `<think>`, do not count.
    """
    place = chr(_MARKS.start)
    before, _, behind = template.render([Message(role="user", content=place)]).partition(place)
    tokens = _any_of(text for text in added if _NO_WORD.search(text))
    ends = tokens.findall(behind)
    header = _any_of(ends).split(before)[-1]
    return {*ends, *tokens.findall(header)}


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of some words; it matches nothing if there are none."""
    return re.compile(trie_pattern(words) or r"(?!)")


def trie_pattern(words: Iterable[str]) -> str:
    """Return a pattern that matches the longest of some words, with one branch per possible next character.

    A plain alternation of the words, of which there may be hundreds, would try each of them wherever one could begin.
    {"<s>", "</s>", "<s>>"} gives `<(?:s>(?:>)?|/s>)`.
    """
    rests: dict[str, list[str]] = {}
    may_end = False
    for word in words:
        may_end = may_end or not word
        if word:
            rests.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(character) + trie_pattern(rest) for character, rest in rests.items()]
    if may_end and branches:
        return f"(?:{'|'.join(branches)})?"
    return f"(?:{'|'.join(branches)})" if len(branches) > 1 else "".join(branches)


def without_marks(text: str, mark: str, spans: Sequence[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
    """Return a rendering without its markers, and spans of its characters moved accordingly."""
    places = [found.start() for found in re.finditer(mark, text)]
    moved = [(start - bisect_left(places, start), end - bisect_left(places, end)) for start, end in spans]
    return text.replace(mark, ""), moved
