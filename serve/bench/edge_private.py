"""Measures what it costs an answer that marked text stays on the device, and that it does stay there.

Each question is asked twice: with placeholders for its private text, and with the text itself. The second answer is the
one that a user would have got without privacy.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.specbench import read_questions
from moray.config import validate
from moray.edge.config import EdgeConfig
from moray.edge.device.client import EdgeClient
from moray.edge.device.events import VerifiedTokens
from moray.edge.device.private import CLOSE, OPEN, Redactor
from moray.edge.device.transport import Link, WebSocketLink
from moray.errors import DataError
from moray.progress import Progress
from serve.bench.applications import running
from serve.bench.configs import EdgePrivateConfig, PoolConfig
from serve.bench.edge_device import Device

NAME = "edge"
_PLACEHOLDER = re.compile(r"\[P\d+\]")


class PrivateRow(TypedDict):
    """One question, asked with placeholders and with its private text."""

    question_id: str
    agreement: float
    """Share of the words of the answer to the whole text that the restored answer has at the same place."""
    num_placeholders: int
    """Placeholders in the answer, all of which were replaced by their texts."""
    num_expected: int
    """How often the answer to the whole text has one of the private texts."""
    num_leaks: int
    """Messages to the server that hold a private text or its tokens; 0, or privacy is broken."""


class _RecordingLink(WebSocketLink):
    """A connection that keeps what is sent."""

    def __init__(self, url: str, sent: list[str]) -> None:
        super().__init__(url)
        self._sent = sent

    def send(self, text: str) -> None:
        self._sent.append(text)
        super().send(text)


def benchmark_private(config: EdgePrivateConfig, console: Console) -> dict[str, Any]:
    """Ask every question twice.

    Raises:
        ConfigError: Ray or Serve is not the benchmark's own.
        DeployError: the application does not run in time.
        DataError: a question has no private text, or a mark is wrong.
    """
    questions = read_questions(config.questions, config.num_questions)
    for question in questions:
        if OPEN not in question.turns[0]:
            raise DataError(f"question '{question.question_id}' has no {OPEN}...{CLOSE}: mark what is private in it")
    assert config.application.edge is not None
    drafter = config.application.edge.drafters[0]
    rows: list[PrivateRow] = []
    with running(config.ray, config.wait_seconds) as applications:
        applications.deploy({NAME: config.application.model_dump(mode="json")}, PoolConfig(targets=1, drafters=1))
        device = Device(applications.url(NAME), config.application, config.max_tokens)
        sent: list[str] = []
        client = EdgeClient(
            device.drafters[drafter],
            device.hellos[drafter],
            lambda: _link(device.edge_url, sent),
            validate(EdgeConfig, {"codec": config.codec}),
            device.eos_ids,
        )
        with Progress("ask about private text", 2 * len(questions)) as progress:
            for question in questions:
                redactor = Redactor()
                marked = question.turns[0]
                (redacted,) = redactor.redact([{"role": "user", "content": marked}])
                sent.clear()
                answer = _answer(device, client, redacted["content"])
                private = re.findall(f"{OPEN}(.*?){CLOSE}", marked, re.DOTALL)
                leaks = count_leaks(sent, private, device.encode)
                progress.advance()
                open_answer = _answer(device, client, marked.replace(OPEN, "").replace(CLOSE, ""))
                progress.advance()
                rows.append(row_of(question.question_id, answer, open_answer, redactor, private, leaks))
        client.close()
    _print(rows, console)
    return {"rows": rows, "settings": config.model_dump(mode="json")}


def _link(url: str, sent: list[str]) -> Link:
    return _RecordingLink(url, sent)


def _answer(device: Device, client: EdgeClient, prompt: str) -> str:
    tokens: list[int] = []
    for event in client.answer(device.request(prompt, ignore_eos=True)):
        if isinstance(event, VerifiedTokens):
            tokens += event.tokens
    return device.decode(tokens)


def count_leaks(sent: Sequence[str], private: Sequence[str], encode: Callable[[str], list[int]]) -> int:
    """Messages that hold one of the texts, or its tokens, after a space or not."""
    texts = [text for text in private if not text.isdigit()]  # digits stand in token ids
    ids = [",".join(map(str, encode(before + text))) for text in private for before in ("", " ")]
    parts = [re.compile(rf"(?<!\d){re.escape(part)}(?!\d)") for part in (*texts, *ids)]
    return sum(any(part.search(message) for part in parts) for message in sent)


def row_of(
    question_id: str, answer: str, open_answer: str, redactor: Redactor, private: Sequence[str], num_leaks: int
) -> PrivateRow:
    """The figures of one question."""
    restored, wanted = redactor.restore(answer).split(), open_answer.split()
    return {
        "question_id": question_id,
        "agreement": sum(one == other for one, other in zip(restored, wanted, strict=False)) / max(1, len(wanted)),
        "num_placeholders": sum(
            redactor.restore(placeholder) != placeholder for placeholder in _PLACEHOLDER.findall(answer)
        ),
        "num_expected": sum(open_answer.count(text) for text in private),
        "num_leaks": num_leaks,
    }


def _print(rows: Sequence[PrivateRow], console: Console) -> None:
    table = Table(title="answers with placeholders for private text", box=box.SIMPLE_HEAD)
    for heading in ("question", "agreement", "placeholders restored", "private texts in the open answer", "leaks"):
        table.add_column(heading, justify="left" if heading == "question" else "right")
    for row in rows:
        table.add_row(
            row["question_id"],
            f"{row['agreement']:.2f}",
            str(row["num_placeholders"]),
            str(row["num_expected"]),
            str(row["num_leaks"]),
        )
    console.print(table)
    mean = sum(row["agreement"] for row in rows) / len(rows)
    console.print(f"mean agreement {mean:.2f}; lossless: redacted (the target's own text for the redacted prompt)")
