"""What a user sees of an answer: the verified text at the end, whatever was shown and taken back before."""

import io
import random
import re

import pytest

from moray.edge.device.events import (
    DraftedTokens,
    Finished,
    LinkChanged,
    LinkState,
    LocalText,
    Retracted,
    VerifiedTokens,
)
from moray.edge.device.private import Redactor
from moray.edge.device.terminal import AnswerView, Terminal

COLUMNS = 20
WORDS = ["one ", "two ", "three ", "\n", "a longer word ", "[P1] "]


def decode(tokens, **_) -> str:
    return "".join(WORDS[token] for token in tokens)


class Screen(io.StringIO):
    """A terminal that understands what `Terminal` writes."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        rows, row, column = [[]], 0, 0
        for code, letter, character in re.findall(r"\x1b\[(\d*)([A-Za-z])|(.|\n)", self.getvalue()):
            if letter == "A":
                row -= int(code)
            elif letter == "C":
                column = int(code)
            elif letter == "J":
                rows = [*rows[:row], rows[row][:column]]
            elif character == "\r":
                column = 0
            elif character == "\n" or (character and column == COLUMNS):
                row, column = row + 1, 0
            if character and character not in "\r\n":
                while len(rows) <= row:
                    rows.append([])
                rows[row] = rows[row][:column] + [" "] * (column - len(rows[row])) + [character]
                column += 1
            while len(rows) <= row:
                rows.append([])
        return "\n".join("".join(line).rstrip() for line in rows)


def wrapped(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        lines += [line[i : i + COLUMNS].rstrip() for i in range(0, max(1, len(line)), COLUMNS)]
    return "\n".join(lines)


def events_of(seed: int):
    """Verified and drafted tokens in any order, with retractions, as a client yields them."""
    chance, verified, shown = random.Random(seed), 0, []
    text = [chance.randrange(len(WORDS) - 1) for _ in range(30)]
    while verified < len(text):
        if chance.random() < 0.5:
            drafted = [chance.choice([*text[verified + len(shown) :][:1], 0]) for _ in range(chance.randint(1, 4))]
            yield DraftedTokens(verified + len(shown), tuple(drafted))
            shown += drafted
        else:
            new = text[verified : verified + chance.randint(1, 5)]
            same = 0
            while same < min(len(new), len(shown)) and new[same] == shown[same]:
                same += 1
            if same < min(len(new), len(shown)):
                yield Retracted(verified + same)
                shown = []
            else:
                shown = shown[len(new) :]
            yield VerifiedTokens(verified, tuple(new))
            verified += len(new)
    if shown:
        yield Retracted(len(text))
    yield Finished("length")


@pytest.mark.parametrize("seed", range(20))
def test_a_terminal_ends_with_the_verified_text(seed):
    screen, view = Screen(), AnswerView(decode, Redactor())
    terminal = Terminal(screen, io.StringIO(), lambda: COLUMNS)
    for event in events_of(seed):
        terminal.show([event], view)
        assert wrapped(view.text + view.unverified).rstrip() == screen.shown().rstrip()
    assert not view.unverified
    assert screen.shown().rstrip() == wrapped(view.text).rstrip()


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_of_a_chat_begins_at_the_left_edge(seed):
    screen, whole = Screen(), ""
    terminal = Terminal(screen, io.StringIO(), lambda: COLUMNS)
    for number in range(3):
        view = AnswerView(decode, Redactor())
        terminal.begin()
        for event in events_of(seed + 20 * number):
            terminal.show([event], view)
            assert wrapped(whole + view.text + view.unverified).rstrip() == screen.shown().rstrip()
        screen.write("\n")
        whole += view.text + "\n"


def test_a_terminal_says_why_there_is_no_server_until_the_answer_begins():
    screen, log = Screen(), io.StringIO()
    terminal, view = Terminal(screen, log, lambda: COLUMNS), AnswerView(decode, Redactor())
    terminal.show([LinkChanged(LinkState.OFFLINE, "refused"), LinkChanged(LinkState.CONNECTING)], view)
    assert log.getvalue() == "offline: refused\n"
    terminal.show([VerifiedTokens(0, (0,)), LinkChanged(LinkState.OFFLINE, "no route")], view)
    assert log.getvalue() == "offline: refused\n"


def test_a_pipe_gets_verified_text_alone_and_the_reason_of_a_lost_connection_once():
    out, log = io.StringIO(), io.StringIO()
    terminal, view = Terminal(out, log), AnswerView(decode, Redactor())
    terminal.show([VerifiedTokens(0, (0,)), DraftedTokens(1, (1, 1))], view)
    for _ in range(3):
        terminal.show([LinkChanged(LinkState.OFFLINE, "no route"), LinkChanged(LinkState.CONNECTING)], view)
    terminal.show([Retracted(1), VerifiedTokens(1, (2,)), Finished("stop")], view)
    assert out.getvalue() == "one three "
    assert log.getvalue() == "offline: no route\n"


def test_private_text_is_put_back():
    redactor = Redactor()
    redactor.redact([{"role": "user", "content": "<private>secret</private>"}])
    view = AnswerView(decode, redactor)
    shown = [view.take(event) for event in (VerifiedTokens(0, (0, 5)), Finished("stop"))]
    assert "".join(shown) == view.text == "one secret "


def test_text_that_the_drafter_wrote_alone_stands_where_it_belongs():
    redactor = Redactor()
    placeholder = redactor.add("ours")
    assert placeholder == "[P1]"
    view = AnswerView(decode, redactor)
    events = (VerifiedTokens(0, (0, 1)), DraftedTokens(2, (2,)), LocalText(1, "ours</private>", (5, 5)))
    shown = [view.take(event) for event in (*events, VerifiedTokens(3, (2, 5)), Finished("stop"))]
    assert "".join(shown) == view.text == "one two ours</private>three ours "
    assert view.redacted == decode((0, 5, 5, 2, 5)), "as the server has it"
    assert not view.unverified
