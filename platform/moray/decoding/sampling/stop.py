"""Where an answer ends: at an end-of-sequence token, with a stop string, or at its maximum length.

Tokens are not text. A token may hold several characters or a part of one, decoding a part of an answer may drop its
first space, and a token without text of its own (a special one) may stand inside a stop string. So the check follows
the answer's text, which is settled piece by piece as characters become complete, at the same cost per token however
long the answer is. All that this module knows of a tokenizer is how it decodes.
"""

from collections.abc import Callable, Collection, Sequence

from moray.errors import DataError

Decode = Callable[[Sequence[int]], str]
"""decode(tokens) -> their text; an incomplete character is written as U+FFFD, as all tokenizers do."""

MAX_STRINGS = 16
MAX_LENGTH = 256
_MIN_CONTEXT = 4
"""Prompt tokens that are decoded with the answer; more if these have no text, or begin within a character."""
_MAX_UNSETTLED = 16
"""Tokens that may wait for the rest of a character; four would do, but for bytes that never become text."""


class StopStrings:
    """Strings that end an answer; one object serves any number of answers.

    The answer ends with the token that completes the first of them: the smallest n for which the text of its first n
    tokens contains a stop string.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        """
        Args:
            strings: at most `MAX_STRINGS` of 1 to `MAX_LENGTH` characters; none means that no string ends an answer.
            decode: the tokenizer's own, with or without special tokens, as the answer will be shown.

        Raises:
            DataError: names the field `stop`; there are too many strings, or one is empty, too long, or holds U+FFFD,
                which no text can be known to contain.
        """
        _check(strings)
        self.strings = tuple(strings)
        self.decode = decode

    def text_before(self, tokens: Sequence[int]) -> str:
        """The text of an answer up to its first stop string (see `shown_length`)."""
        text = self.decode(tokens)
        return text[: shown_length(text, self.strings)]


class StopChecker:
    """Follows one answer and says where it ends."""

    def __init__(
        self, limit: int, eos_ids: Collection[int], stop: StopStrings | None, context: Sequence[int] = ()
    ) -> None:
        """`limit` is the maximum number of tokens of the answer; `context` the tokens whose text it continues (see
        `SettledText`)."""
        self.finish_reason: str | None = None
        """None while the answer goes on; then "stop" or "length" (see `stats.Generation`)."""
        self._room = limit
        self._eos_ids = eos_ids
        self._scan = _Scan(stop, context) if stop is not None and stop.strings else None

    def cut(self, tokens: list[int]) -> list[int]:
        """Drop the newly chosen tokens after the end of the answer; may set `finish_reason`."""
        for count, token in enumerate(tokens, start=1):
            if token in self._eos_ids or (self._scan is not None and self._scan.completes(token)):
                self.finish_reason = "stop"
            elif count == self._room:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return tokens[:count]
        self._room -= len(tokens)
        return tokens


def shown_length(text: str, strings: Sequence[str]) -> int:
    """Number of characters before the first stop string, or all of them if there is none.

    Among several, the string that ends first counts; among those that end together, the longest.
    """
    found = [(text.find(string) + len(string), text.find(string)) for string in strings if string in text]
    return min(found)[1] if found else len(text)


def longest_answer(max_new_tokens: int, room: int) -> int:
    """Maximum number of tokens to generate. If there is no room, the prefill reports it.

    Raises:
        DataError: `max_new_tokens` is below 1.
    """
    if max_new_tokens < 1:
        raise DataError(f"max_new_tokens is {max_new_tokens}; at least 1 is generated")
    return min(max_new_tokens, room)


class SettledText:
    """The text of one answer as it becomes certain, token by token, at the same cost however long the answer is.

        tokens          ...  | ▁wor  ld | <0xE6> <0xBC>
        held               | settled    | unsettled: the rest of the character is to come
        text       " hello"  |  " world"|

    It holds the unsettled tokens and, because the text of a token depends on the one before it, the tokens of the last
    settled piece.

    The text of an answer that continues a prompt is what `decode(prompt + answer)` adds to `decode(prompt)`: some
    tokenizers drop the first space of what they decode, but the answer keeps it. A character that starts in the prompt
    belongs to the answer that completes it.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        """`context` holds the tokens before the answer; only the last few are used."""
        self._decode = decode
        self._tokens = _needed(context, decode)
        self._num_settled = len(self._tokens)
        self._settled = decode(self._tokens) if self._tokens else ""
        """Text of the settled tokens among the held ones."""
        self.length = 0
        """Settled characters of the answer."""
        self.unsettled = ""
        """The text that would follow the settled text if the answer ended here."""

    def push(self, token: int) -> str:
        """Add one token; return the text that it settles."""
        decode = self._decode
        self._tokens.append(token)
        held = decode(self._tokens)
        self.unsettled = self._beyond_settled(held)
        if self.unsettled and not held.endswith("\ufffd"):
            return self._settle(self._tokens[self._num_settled :])
        if not self.unsettled and not decode([token, token]):
            self._tokens.pop()  # no text: decoded twice, because a lone token's leading space may be dropped
        elif len(self._tokens) - self._num_settled >= _MAX_UNSETTLED:
            return self._settle([])
        return ""

    def _beyond_settled(self, held: str) -> str:
        if held.startswith(self._settled):
            return held[len(self._settled) :]
        whole = self._settled.rstrip("\ufffd")  # its last character is complete only now
        return held[len(whole) :] if held.startswith(whole) else held[len(self._settled) :]

    def _settle(self, last_piece: list[int]) -> str:
        piece, self.unsettled = self.unsettled, ""
        self._tokens = last_piece
        self._num_settled = len(last_piece)
        self._settled = self._decode(last_piece)
        self.length += len(piece)
        return piece


def _needed(context: Sequence[int], decode: Decode) -> list[int]:
    """The last tokens of a context that are enough to decode what follows: they have text, and begin with a whole
    character."""
    count = _MIN_CONTEXT
    while count < len(context):
        text = decode(context[-count:])
        if text and not text.startswith("\ufffd"):
            return list(context[-count:])
        count *= 2
    return list(context)


class _Scan:
    """Looks for stop strings in one answer, token by token; keeps as much text as a stop string may begin with."""

    def __init__(self, stop: StopStrings, context: Sequence[int]) -> None:
        self._strings = stop.strings
        self._longest = max(map(len, stop.strings))
        self._settled = SettledText(stop.decode, context)
        self._tail = ""

    def completes(self, token: int) -> bool:
        """Whether the answer's text contains a stop string once `token` is added."""
        piece = self._settled.push(token)
        text = self._tail + piece + self._settled.unsettled
        if any(string in text for string in self._strings):
            return True
        if piece:
            settled = self._tail + piece
            self._tail = settled[max(0, len(settled) - self._longest + 1) :]
        return False


def _check(strings: Sequence[str]) -> None:
    if isinstance(strings, str):
        raise DataError(f"stop is the text {strings!r:.80}; a list of strings is needed, such as [{strings!r:.80}]")
    if len(strings) > MAX_STRINGS:
        raise DataError(f"stop has {len(strings)} strings; at most {MAX_STRINGS} are accepted: leave some out")
    for index, string in enumerate(strings):
        if not 0 < len(string) <= MAX_LENGTH:
            raise DataError(
                f"stop[{index}] has {len(string)} characters; 1 to {MAX_LENGTH} are accepted: "
                + ("shorten it" if string else "leave it out")
            )
        if "\ufffd" in string:
            raise DataError(
                f"stop[{index}] is {string!r:.80}, which holds U+FFFD, the sign for bytes that are no text yet; "
                "leave that character out"
            )
