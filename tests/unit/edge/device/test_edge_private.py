"""Private text stays on the device: it is replaced wherever it stands, and put back in the answer."""

import random

import pytest

from moray.edge.device.private import Redactor
from moray.errors import DataError


def user(text: str):
    return {"role": "user", "content": text}


def test_marked_text_is_replaced_wherever_it_stands():
    redactor = Redactor()
    chat = [user("alpha 7 and <private>alpha 7</private>"), {"role": "assistant", "content": "so alpha 7?"}]
    assert [turn["content"] for turn in redactor.redact(chat)] == ["[P1] and [P1]", "so [P1]?"]
    later = [*chat, user("and <private>beta</private>, alpha 7, <private>alpha 7</private>")]
    assert redactor.redact(later)[-1]["content"] == "and [P2], [P1], [P1]"
    assert redactor.restore("[P1] [P2] [P3]") == "alpha 7 beta [P3]"
    assert chat[0]["content"].startswith("alpha"), "the chat itself is not changed"


def test_a_text_that_holds_another_one_is_replaced_first():
    redacted = Redactor().redact([user("<private>Ann</private> <private>Ann Lee</private>: Ann Lee")])
    assert redacted[0]["content"] == "[P1] [P2]: [P2]"


def test_a_placeholder_that_the_chat_holds_is_not_used():
    assert Redactor().redact([user("[P1] is <private>red</private>")])[0]["content"] == "[P1] is [P2]"


def test_a_text_that_the_drafter_wrote_keeps_its_placeholder_in_later_turns():
    redactor = Redactor()
    first = [user("[P1] or <private>Ann Lee</private>?")]
    assert redactor.redact(first)[0]["content"] == "[P1] or [P2]?"
    assert redactor.add("x") == "[P3]", "neither in the chat nor given to another text; texts may be short"
    assert redactor.is_used
    assert redactor.restore("[P2] is [P3].") == "Ann Lee is x."
    later = [*first, {"role": "assistant", "content": "It is <private>[P3]</private>."}, user("Who is x?")]
    assert [turn["content"] for turn in redactor.redact(later)] == [
        "[P1] or [P2]?",
        "It is <private>[P3]</private>.",
        "Who is x?",
    ]
    unfinished = [*later, {"role": "assistant", "content": "He is <private>"}]
    assert redactor.redact(unfinished)[-1]["content"] == "He is <private>", "an answer that was cut in a mark"
    assert redactor.add("with [P2]") == "[P4]"
    assert redactor.restore("[P4]") == "with Ann Lee", "a text that holds a placeholder of the prompt"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<private>ab</private>", "2 characters"),
        ("<private>  a </private>", "1 characters"),
        ("<private>abc", "without its other half"),
        ("abc</private>", "without its other half"),
    ],
)
def test_a_wrong_mark_is_refused(text, problem):
    with pytest.raises(DataError, match=problem):
        Redactor().redact([user(text)])


def test_a_restored_stream_is_the_restored_text_however_it_is_cut():
    redactor = Redactor()
    redactor.redact([user("<private>one two</private> <private>three</private>")])
    text = "so [P1], [ P2], [P2][P1] and [P"
    for seed in range(50):
        chance, stream, shown, rest = random.Random(seed), redactor.stream(), "", text
        while rest:
            count = chance.randint(1, 5)
            piece, rest = rest[:count], rest[count:]
            shown += stream.push(piece)
            assert redactor.restore(text).startswith(shown)
        assert shown + stream.finish() == redactor.restore(text)
