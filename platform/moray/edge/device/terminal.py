"""Shows an answer on a terminal: verified text plainly, unverified text dim and replaced when the server disagrees."""

import shutil
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.cells import cell_len

from moray.decoding.sampling.detokenizer import IncrementalDetokenizer
from moray.decoding.sampling.stop import Decode, StopStrings
from moray.edge.device.events import (
    DraftedTokens,
    EdgeEvent,
    Finished,
    LinkChanged,
    LinkState,
    LocalText,
    Retracted,
    VerifiedTokens,
)
from moray.edge.device.private import Redactor

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class AnswerView:
    """The text of one answer: what is verified, and what follows it unverified."""

    def __init__(self, decode: Decode, redactor: Redactor) -> None:
        """
        Args:
            decode: the tokenizer's.
            redactor: puts private text back.
        """
        self._decode = decode
        self._redactor, self._restorer = redactor, redactor.stream()
        self._detokenizer = IncrementalDetokenizer(StopStrings((), decode))
        self._verified: list[int] = []
        self._drafted: list[int] = []
        self.text = ""
        """Verified text, with private text put back."""

    def take(self, event: EdgeEvent) -> str:
        """Take in an event; return the text that it verifies."""
        new = ""
        if isinstance(event, VerifiedTokens):
            self._verified += event.tokens
            self._drafted = self._drafted[len(event.tokens) :]
            raw = "".join(piece.text for piece in self._detokenizer.push(event.tokens))
            new = self._restorer.push(raw)
        elif isinstance(event, DraftedTokens):
            self._drafted += event.tokens
        elif isinstance(event, Retracted):
            self._drafted = self._drafted[: event.index - len(self._verified)]
        elif isinstance(event, LocalText):
            self._verified, self._drafted = [*self._verified[: event.index], *event.tokens], []
            new = self._restorer.finish() + self._redactor.restore(event.text)
        elif isinstance(event, Finished):
            new = self._restorer.push("".join(piece.text for piece in self._detokenizer.finish()))
            new += self._restorer.finish()
        self.text += new
        return new

    @property
    def redacted(self) -> str:
        """The answer as the server has it, with placeholders."""
        return self._decode(self._verified)

    @property
    def unverified(self) -> str:
        """The text after the verified one."""
        if not self._drafted:
            return ""
        verified = self._decode(self._verified)
        whole = self._decode([*self._verified, *self._drafted])
        return self._redactor.restore(whole[len(verified) :]) if whole.startswith(verified) else ""


class Terminal:
    """Writes answers to a stream; unverified text only if it is a terminal."""

    def __init__(self, stream: TextIO, log: TextIO, columns: Callable[[], int] | None = None) -> None:
        """
        Args:
            stream: receives the answer.
            log: receives a line when the connection is lost.
            columns: width of the terminal; None to ask the system.
        """
        self._stream, self._log = stream, log
        self._columns = columns or (lambda: shutil.get_terminal_size().columns)
        self._logged = ""
        self._is_terminal = stream.isatty()
        self.begin()

    def begin(self) -> None:
        """Begin an answer, at the left edge."""
        self._has_begun = False
        """Whether something of this answer is shown."""
        self._line = ""
        """Verified text in the last line."""
        self._has_unverified = False
        self._is_past_row = False
        """Whether the cursor is below verified text that ends with a full row."""
        self._num_below = 0
        """Rows between the end of the verified text and the cursor."""

    def show(self, events: Sequence[EdgeEvent], view: AnswerView) -> None:
        """Show what has happened."""
        for event in events:
            new = view.take(event)
            if isinstance(event, LinkChanged):
                self._log_change(event)
                continue
            if self._is_terminal:
                self._erase()
            self._write(new)
            self._line = (self._line + new).rpartition("\n")[2]
            if self._is_terminal:
                self._write_unverified(view.unverified)
        self._stream.flush()

    def _log_change(self, event: LinkChanged) -> None:
        """Say once why there is no server; on a terminal only before the answer begins, for it would stand in its
        middle."""
        line = event.reason if event.state is LinkState.OFFLINE else ""
        is_amidst = self._is_terminal and self._has_begun
        if line and line != self._logged and not is_amidst:
            self._log.write(f"offline: {line}\n")
        if event.state is not LinkState.CONNECTING:
            self._logged = line

    def _write_unverified(self, text: str) -> None:
        if text:
            self._stream.write(_DIM)
            self._write(text)
            self._stream.write(_PLAIN)
            self._num_below = max(0, self._row(self._line + text) - cell_len(self._line) // self._columns())
            self._has_unverified = True

    def _erase(self) -> None:
        """Remove unverified text: back to the end of the verified text, and clear what follows."""
        if not self._has_unverified:
            return
        self._has_unverified = False
        up = f"\x1b[{self._num_below}A" if self._num_below else ""
        column = cell_len(self._line) % self._columns()
        right = f"\x1b[{column}C" if column else ""
        self._stream.write(f"{up}\r{right}\x1b[J")
        self._num_below = 0
        self._is_past_row = bool(self._line) and not column

    def _write(self, text: str) -> None:
        """Write text; a line break that has been made already, by going past a full row, is left out."""
        if text:
            self._has_begun = True
            self._stream.write(text[1:] if self._is_past_row and text.startswith("\n") else text)
            self._is_past_row = False

    def _row(self, text: str) -> int:
        """Row of the cursor after a text that begins in row 0; at the end of a full row it is still in that row."""
        columns = self._columns()
        return sum(max(1, -(-cell_len(line) // columns)) for line in text.split("\n")) - 1
