"""Measures what a drafter writes alone while its connection is lost, and that the text is the target's own afterwards.

Each answer is cut once, after a share of its tokens. The drafter then writes alone as far as it may, the device
reconnects, and what it has written is compared with the text that the target gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, TypedDict

from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.perplexity import perplexity, token_losses
from moray.bench.specbench import read_questions
from moray.config import validate
from moray.decoding.request import Request
from moray.edge.config import EdgeConfig
from moray.edge.device.client import EdgeClient
from moray.edge.device.events import DraftedTokens, VerifiedTokens
from moray.edge.device.transport import Link, WebSocketLink
from moray.errors import UnreachableError
from moray.progress import Progress
from moray.targets.model import Target
from serve.bench.applications import running
from serve.bench.configs import EdgeOfflineConfig, PoolConfig
from serve.bench.edge_device import Device

NAME = "edge"
_SPANS = (32, 64)


class OfflineRow(TypedDict):
    """One drafter at one place of the cut."""

    drafter: str
    cut: float
    num_cuts: int
    num_written: float
    """Mean number of tokens that it wrote alone."""
    first_mismatch: float
    """Median number of tokens before the first one that differs from the target's."""
    agreement: dict[str, float]
    """Share of the first 32 and 64 tokens after the cut that the drafter wrote as the target does. Tokens that it did
    not write count as wrong; beyond the end of the answer nothing counts."""
    perplexity: float | None
    """The target's, of what was written alone; None if nothing was."""
    own_perplexity: float | None
    """The target's, of its own text in the same place."""
    num_changed: int
    """Tokens of the verified text that differ from the text without a cut."""


@dataclass(frozen=True)
class CutAnswer:
    """One answer whose connection was cut."""

    written: list[int]
    """What the drafter wrote alone."""
    wanted: list[int]
    """The target's text from there on."""
    num_changed: int
    losses: list[float]
    """The target's, of the tokens that were written (see `moray.bench.perplexity`)."""
    own_losses: list[float]
    """The target's, of as many tokens of its own text."""


class _Cut:
    """Connections that break once, after so many verified tokens, until the drafter has written what it can."""

    def __init__(self, url: str, after: int) -> None:
        self._url, self._after = url, after
        self.num_verified = 0
        self.is_down = False
        self.is_over = False
        self.waits = 0

    def dial(self) -> Link:
        if self.is_down:
            self.waits += 1
            if self.waits > 1:  # one whole pause between two attempts without anything new
                self.is_down, self.is_over = False, True
            raise UnreachableError("cut by the benchmark")
        return _CutLink(self._url, self)

    @property
    def is_due(self) -> bool:
        return not self.is_over and self.num_verified >= self._after

    def written(self) -> None:
        """The drafter is still writing."""
        self.waits = 0


class _CutLink(WebSocketLink):
    """A connection that breaks when its cut is due."""

    def __init__(self, url: str, cut: _Cut) -> None:
        super().__init__(url)
        self._cut = cut

    def receive(self, seconds: float) -> bytes | None:
        if self._cut.is_due:
            self._cut.is_down = True
            raise UnreachableError("cut by the benchmark")
        return super().receive(seconds)


def benchmark_offline(config: EdgeOfflineConfig, console: Console) -> dict[str, Any]:
    """Cut every answer of every drafter at every place.

    Raises:
        ConfigError: Ray or Serve is not the benchmark's own.
        DeployError: the application does not run in time.
    """
    questions = read_questions(config.questions, config.num_questions)
    rows: list[OfflineRow] = []
    with running(config.ray, config.wait_seconds) as applications:
        applications.deploy({NAME: config.application.model_dump(mode="json")}, PoolConfig(targets=1, drafters=1))
        device = Device(applications.url(NAME), config.application, config.max_tokens)
        target = Target.load(config.application.target)
        drafters = list(device.drafters)
        total = len(drafters) * len(questions) * (1 + len(config.cuts))
        with Progress("cut answers", total) as progress:
            for name in drafters:
                found: dict[float, list[CutAnswer]] = {cut: [] for cut in config.cuts}
                for question in questions:
                    request = device.request(question.turns[0])
                    whole, _ = _answer(device, name, config, request, None)
                    progress.advance()
                    for cut in config.cuts:
                        after = max(1, round(cut * len(whole)))
                        text, alone = _answer(device, name, config, request, after)
                        changed = sum(one != other for one, other in zip(text, whole, strict=False))
                        changed += abs(len(text) - len(whole))
                        context, wanted = [*request.prompt, *whole[: alone[0]]], whole[alone[0] :]
                        losses = token_losses(target, context, alone[1])
                        own = token_losses(target, context, wanted[: len(alone[1])])
                        found[cut].append(CutAnswer(alone[1], wanted, changed, losses, own))
                        progress.advance()
                rows += [row_of(name, cut, results) for cut, results in found.items()]
    result = {"rows": rows, "settings": config.model_dump(mode="json")}
    _print(rows, console)
    return result


def _answer(
    device: Device, name: str, config: EdgeOfflineConfig, request: Request, after: int | None
) -> tuple[list[int], tuple[int, list[int]]]:
    """The verified text; and what was written alone, with its index in the answer."""
    cut = _Cut(device.edge_url, after if after is not None else request.max_new_tokens + 1)
    settings = validate(EdgeConfig, {"codec": config.codec, "retry_seconds": 0.2})
    client = EdgeClient(device.drafters[name], device.hellos[name], cut.dial, settings, device.eos_ids)
    text: list[int] = []
    alone: tuple[int, list[int]] = (after or 0, [])
    for event in client.answer(request):
        if isinstance(event, VerifiedTokens):
            text += event.tokens
            cut.num_verified = len(text)
        elif isinstance(event, DraftedTokens) and cut.is_down:
            cut.written()
            if not alone[1]:
                alone = event.index, []
            alone[1].extend(event.tokens)
    client.close()
    return text, alone


def row_of(name: str, cut: float, answers: Sequence[CutAnswer]) -> OfflineRow:
    """The figures of one drafter at one place of the cut."""
    return {
        "drafter": name,
        "cut": cut,
        "num_cuts": len(answers),
        "num_written": mean(len(answer.written) for answer in answers),
        "first_mismatch": median(_first_mismatch(answer.written, answer.wanted) for answer in answers),
        "agreement": {str(span): _agreement(answers, span) for span in _SPANS},
        "perplexity": perplexity([loss for answer in answers for loss in answer.losses]),
        "own_perplexity": perplexity([loss for answer in answers for loss in answer.own_losses]),
        "num_changed": sum(answer.num_changed for answer in answers),
    }


def _first_mismatch(written: Sequence[int], wanted: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(written, wanted, strict=False)):
        if one != other:
            return index
    return min(len(written), len(wanted))


def _agreement(answers: Sequence[CutAnswer], span: int) -> float:
    equal = total = 0
    for answer in answers:
        expected = answer.wanted[:span]
        total += len(expected)
        equal += sum(one == other for one, other in zip(answer.written, expected, strict=False))
    return equal / total if total else 0.0


def _print(rows: Sequence[OfflineRow], console: Console) -> None:
    table = Table(title="what drafters write without a connection", box=box.SIMPLE_HEAD)
    headings = ("drafter", "cut at", "cuts", "written", "first mismatch", "agreement 32", "64")
    for heading in (*headings, "perplexity", "target's own", "changed tokens"):
        table.add_column(heading, justify="left" if heading == "drafter" else "right")
    for row in rows:
        table.add_row(
            row["drafter"],
            f"{row['cut']:.0%}",
            str(row["num_cuts"]),
            f"{row['num_written']:.1f}",
            f"{row['first_mismatch']:.1f}",
            *(f"{row['agreement'][str(span)]:.2f}" for span in _SPANS),
            *("" if row[key] is None else f"{row[key]:.1f}" for key in ("perplexity", "own_perplexity")),
            str(row["num_changed"]),
        )
    console.print(table)
