"""Answers in which the drafter writes what stands between marks: alone, unverified, and only on the device.

    target        My name is <private>                         what it has written up to the mark
    drafter                            Ada Byron</private>      written alone; crosses nothing
    target        My name is <private>[P1]</private> and ...   what it goes on from

The target sees a placeholder in place of the text, and so does everything that crosses the network. The drafter writes
from its memory of what is verified, so how good the text is depends on the drafter.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from moray.decoding.request import Request
from moray.decoding.sampling.stop import Decode
from moray.edge.device.client import EdgeClient
from moray.edge.device.drafting import DeviceDrafter
from moray.edge.device.events import EdgeEvent, Finished, LocalText, VerifiedTokens
from moray.edge.device.private import CLOSE, OPEN, Redactor
from moray.edge.device.stats import EdgeStats


class LocalSpans:
    """Answers with a client, and stops it at every mark."""

    def __init__(
        self,
        client: EdgeClient,
        drafter: DeviceDrafter,
        encode: Callable[[str], Sequence[int]],
        decode: Decode,
        redactor: Redactor,
        max_tokens: int,
        eos_ids: Sequence[int] = (),
    ) -> None:
        """
        Args:
            client: of the drafter.
            drafter: of this device.
            encode: the tokenizer's, without special tokens.
            decode: the tokenizer's.
            redactor: gets the texts, and gives placeholders for them.
            max_tokens: maximum number of tokens that the drafter writes between two marks.
            eos_ids: tokens that end a text too.
        """
        self._client = client
        self._drafter = drafter
        self._encode = encode
        self._decode = decode
        self._redactor = redactor
        self._max_tokens = max_tokens
        self._eos_ids = frozenset(eos_ids)

    def answer(self, request: Request) -> Iterator[EdgeEvent]:
        """Answer a request (see `EdgeClient.answer`)."""
        stats, began = EdgeStats(), time.monotonic()
        self._client.ends_draft = self._is_open
        answered = [*request.generated]
        while True:
            rest = request.model_copy(update={"generated": tuple(answered)})
            mark: int | None = None
            with closing(self._client.answer(rest)) as events:
                for event in events:
                    if isinstance(event, VerifiedTokens):
                        answered += event.tokens
                    elif isinstance(event, Finished):
                        stats.add(self._client.stats)
                        stats.seconds = time.monotonic() - began
                        self._client.stats = stats
                    yield event
                    if isinstance(event, Finished):
                        return
                    if isinstance(event, VerifiedTokens):
                        mark = self._open_mark(answered)
                    if mark is not None and self._drafter.num_known == len(request.prompt) + len(answered) - 1:
                        break
            stats.add(self._client.stats)
            assert mark is not None
            text, tokens = self._write(answered, mark)
            yield LocalText(mark, text, tokens)
            answered = [*answered[:mark], *tokens]
            if len(answered) >= request.max_new_tokens:
                stats.seconds = time.monotonic() - began
                self._client.stats = stats
                yield Finished("length")
                return

    def _is_open(self, answered: Sequence[int]) -> bool:
        """Whether the text ends between two marks."""
        text = self._decode(list(answered))
        return text.rfind(OPEN) > text.rfind(CLOSE)  # -1 without one

    def _open_mark(self, answered: list[int]) -> int | None:
        """Index of the token after a mark that is not closed; None if there is none. Tokens behind it are the
        target's."""
        if not self._is_open(answered):
            return None
        text = self._decode(answered)
        end = len(answered)
        while end and self._decode(answered[: end - 1]).rfind(OPEN) == text.rfind(OPEN):
            end -= 1
        return end

    def _write(self, answered: list[int], mark: int) -> tuple[str, tuple[int, ...]]:
        """What the drafter writes up to the closing mark, with it, and the tokens that stand for it."""
        before = self._decode(answered)
        known = self._decode(answered[mark:])  # the target's own, behind the mark
        ahead = self._drafter.ahead_of([answered[-1]], self._max_tokens)
        written: list[int] = []
        while ahead is not None and not self._is_over(written, answered):
            is_going = self._drafter.grow(ahead)
            written = ahead.first_chain[1:] or written  # empty once the drafter finds nothing more
            if not is_going:
                break
        ends = [place for place, token in enumerate(written) if token in self._eos_ids]
        text = self._decode([*answered, *written[: min([len(written), *ends])]])[len(before) :].partition(CLOSE)[0]
        placeholder = self._redactor.add(known + text)
        return text + CLOSE, tuple(self._encode(placeholder + CLOSE))

    def _is_over(self, written: list[int], answered: list[int]) -> bool:
        if not written:
            return False
        if written[-1] in self._eos_ids or len(written) >= self._max_tokens:
            return True
        return CLOSE in self._decode([*answered[-1:], *written])
