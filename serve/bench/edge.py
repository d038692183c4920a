"""Measures edge decoding over emulated networks, beside the streaming API over the same ones.

Every question is asked in every way, in turn, over each network: rows of one table come from the same minutes. The
streaming API needs no round trip per token, so it is the honest baseline: with the drafter beside the target it is
faster wherever the server drafts faster. The edge buys going on without a connection, and private text on the device.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import mean
from typing import Any, TypedDict

from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.reports.wording import number, times
from moray.bench.specbench import Question, read_questions
from moray.edge.link.energy import EnergyMeter
from moray.edge.link.namespaces import EmulatedLink, emulated_link, why_not
from moray.edge.link.throttle import throttled
from moray.errors import ConfigError, DataError
from moray.progress import Progress
from serve.bench.applications import Applications, running
from serve.bench.configs import EdgeBenchmarkConfig, PoolConfig

NAME = "edge"
_PUBLISHED = (1.84, 1.53)
"""Speed and acceptance length of MoA over EAGLE-2's, client-server, as its authors give them (arXiv 2410.03804)."""


class ConnectionMode(TypedDict):
    """One way to get answers."""

    name: str
    drafter: str | None
    edge: dict[str, Any] | None
    """Settings of the client; null for the streaming API."""


class EdgeRow(TypedDict):
    """The figures of one way over one network; per token where it says so."""

    way: str
    drafter: str | None
    tokens_per_second: float
    speedup: float
    """Times as fast as the streaming API without drafts, over the same network."""
    p95_seconds: float
    """95th percentile of an answer's time."""
    ttft_ms: float
    tau: float | None
    depth: float | None
    """Mean depth of the drafts that the planner chose (see `EdgeStats.num_planned`)."""
    layers: float | None
    """Mean N of the same drafts."""
    calls: float
    bytes_up: float
    """IP packets included; so is the prompt."""
    bytes_down: float
    server_cpu_ms: float
    """Processor time of Serve's proxy and replicas."""
    device_cpu_ms: float
    energy_mj: float | None
    """Millijoules of the whole machine, both sides; None if it has no counter that can be read."""
    wake_ups: float
    equal_texts: int
    """Answers that are those of the first way."""
    num_answers: int


class Comparison(TypedDict):
    """Two rows, or a row and the best of several."""

    what: str
    speed: float
    """Tokens per second of the first over those of the second."""
    tau: float
    published_speed: float | None
    published_tau: float | None


class EdgeNetwork(TypedDict):
    """One network's table."""

    network: dict[str, Any]
    rows: list[EdgeRow]
    comparisons: list[Comparison]
    num_questions: int


def ways_of(config: EdgeBenchmarkConfig) -> list[ConnectionMode]:
    """All ways to measure: the API without and with drafts, and the edge with each drafter."""
    assert config.application.edge is not None
    drafters = config.application.edge.drafters
    client = {"tree": config.tree.model_dump(mode="json"), "codec": config.codec}
    ways: list[ConnectionMode] = [{"name": "API, plain", "drafter": None, "edge": None}]
    ways += [ConnectionMode(name=f"API, {name}", drafter=name, edge=None) for name in drafters]
    for in_flight in config.in_flight:
        after = ", run ahead" if in_flight > 1 else ""
        settings = {**client, "in_flight": in_flight}
        ways += [ConnectionMode(name=f"edge, {name}{after}", drafter=name, edge=settings) for name in drafters]
    for depth in config.depths:
        settings = {**client, "tree": {"type": "chain", "depth": depth}}
        ways += [ConnectionMode(name=f"edge, {name}, depth {depth}", drafter=name, edge=settings) for name in drafters]
    return ways


def compare(rows: Sequence[EdgeRow], types: Mapping[str, str]) -> list[Comparison]:
    """MoA against EAGLE-2, and each drafter's `tree` against the best fixed depth."""
    found: list[Comparison] = []
    edge = {row["way"]: row for row in rows if row["tau"] is not None}
    moas = [name for name, kind in types.items() if "moa" in kind]
    eagles = [name for name, kind in types.items() if kind == "eagle"]
    for after in ("", ", run ahead"):
        for moa in moas:
            for eagle in eagles:
                pair = [edge.get(f"edge, {name}{after}") for name in (moa, eagle)]
                if pair[0] is not None and pair[1] is not None:
                    found.append(_comparison(pair[0], pair[1], _PUBLISHED))
    for name in types:
        fixed = [row for way, row in edge.items() if way.startswith(f"edge, {name}, depth ")]
        if fixed and f"edge, {name}" in edge:
            found.append(_comparison(edge[f"edge, {name}"], max(fixed, key=lambda row: row["tokens_per_second"])))
    return found


def _comparison(
    one: EdgeRow, other: EdgeRow, published: tuple[float | None, float | None] = (None, None)
) -> Comparison:
    assert one["tau"] is not None
    assert other["tau"] is not None
    return {
        "what": f"{one['way']} over {other['way']}",
        "speed": one["tokens_per_second"] / other["tokens_per_second"],
        "tau": one["tau"] / other["tau"],
        "published_speed": published[0],
        "published_tau": published[1],
    }


def benchmark_edge(config: EdgeBenchmarkConfig, console: Console) -> dict[str, Any]:
    """Measure every way over every network.

    Raises:
        ConfigError: networks cannot be emulated here, or Ray or Serve is not the benchmark's own.
        DeployError: the application does not run in time.
        DataError: an answer failed.
    """
    reason = why_not()
    if reason is not None:
        raise ConfigError(f"networks cannot be emulated here: {reason}")
    questions = read_questions(config.questions, config.num_questions)
    tables: list[EdgeNetwork] = []
    with (
        emulated_link(config.networks[0]) as link,
        running(config.ray, config.wait_seconds, link.host) as applications,
    ):
        applications.deploy({NAME: config.application.model_dump(mode="json")}, PoolConfig(targets=1, drafters=1))
        with _device(config, link, applications) as device:
            ways = ways_of(config)
            for way in ways:  # not measured: connections, caches, the planners' first guesses
                device.ask(way, questions[0])
            for network in config.networks:
                link.change(network)
                with Progress(f"network {network.name}", len(ways) * len(questions) * config.rounds) as progress:
                    rows = _measure(config, ways, questions, device, link, applications, progress)
                tables.append(
                    {
                        "network": network.model_dump(mode="json"),
                        "rows": rows,
                        "comparisons": compare(rows, device.types),
                        "num_questions": len(questions),
                    }
                )
                _print_network(tables[-1], console)
        counts = link.counts
    return {
        "networks": tables,
        "relay": counts,
        "energy_missing": EnergyMeter().missing,
        "settings": config.model_dump(mode="json"),
    }


class _Device:
    """The process inside the network."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.types: dict[str, str] = self.read()["types"]
        """Types of the drafters by name."""

    def ask(self, way: ConnectionMode, question: Question) -> dict[str, Any]:
        """One answer."""
        assert self._process.stdin is not None
        line = json.dumps(
            {"way": way["name"], "drafter": way["drafter"], "edge": way["edge"], "prompt": question.turns[0]}
        )
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next line of the process.

        Raises:
            DataError: it has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DataError("the device's process has ended; its error is above")
        return json.loads(line)


@contextmanager
def _device(config: EdgeBenchmarkConfig, link: EmulatedLink, applications: Applications) -> Iterator[_Device]:
    settings = {
        "url": applications.url(NAME),
        "application": config.application.model_dump(mode="json"),
        "max_tokens": config.max_tokens,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(settings, file)
        file.flush()
        process = subprocess.Popen(
            link.command([sys.executable, "-m", "serve.bench.edge_device", file.name]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        slow = throttled(process.pid, config.compute_ratio) if config.compute_ratio > 1 else nullcontext()
        try:
            device = _Device(process)
            if config.pin_cores:
                applications.pin_apart(NAME, process.pid)
            with slow:
                yield device
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)


def _measure(
    config: EdgeBenchmarkConfig,
    ways: Sequence[ConnectionMode],
    questions: Sequence[Question],
    device: _Device,
    link: EmulatedLink,
    applications: Applications,
    progress: Progress,
) -> list[EdgeRow]:
    """Ask all questions in all ways, in turn; every other round in reverse order."""
    meter = EnergyMeter()
    found: dict[str, list[dict[str, Any]]] = {way["name"]: [] for way in ways}
    texts: dict[str, str] = {}
    for turn in range(config.rounds):
        for question in questions:
            for way in ways[:: -1 if turn % 2 else 1]:
                cpu, sent, joules = applications.cpu_seconds(), link.num_bytes, meter.joules()
                answer = device.ask(way, question)
                answer["server_cpu"] = applications.cpu_seconds() - cpu
                answer["up"], answer["down"] = (
                    after - before for after, before in zip(link.num_bytes, sent, strict=True)
                )
                answer["is_equal"] = texts.setdefault(question.question_id, answer["text"]) == answer["text"]
                answer["joules"] = None if joules is None else (meter.joules() or 0.0) - joules
                found[way["name"]].append(answer)
                progress.advance()
    plain = _rate(found[ways[0]["name"]])
    return [_row(way, found[way["name"]], plain) for way in ways]


def _rate(answers: Sequence[dict[str, Any]]) -> float:
    return sum(answer["num_tokens"] for answer in answers) / sum(answer["seconds"] for answer in answers)


def _row(way: ConnectionMode, answers: Sequence[dict[str, Any]], plain: float) -> EdgeRow:
    tokens = sum(answer["num_tokens"] for answer in answers)
    cycles = sum(answer["num_cycles"] for answer in answers)
    planned = sum(answer["num_planned"] for answer in answers)

    def per_token(key: str) -> float:
        return sum(answer[key] for answer in answers) / tokens

    seconds = sorted(answer["seconds"] for answer in answers)
    return {
        "way": way["name"],
        "drafter": way["drafter"],
        "tokens_per_second": _rate(answers),
        "speedup": _rate(answers) / plain,
        "p95_seconds": seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))],
        "ttft_ms": 1e3 * mean(answer["ttft"] or 0.0 for answer in answers),
        "tau": sum(answer["tau"] * answer["num_cycles"] for answer in answers) / cycles if cycles else None,
        "depth": sum(answer["num_levels"] for answer in answers) / planned if planned else None,
        "layers": sum(answer["num_layers"] for answer in answers) / planned if planned else None,
        "calls": per_token("num_calls"),
        "bytes_up": per_token("up"),
        "bytes_down": per_token("down"),
        "server_cpu_ms": 1e3 * per_token("server_cpu"),
        "device_cpu_ms": 1e3 * per_token("cpu_seconds"),
        "energy_mj": None if answers[0]["joules"] is None else 1e3 * per_token("joules"),
        "wake_ups": per_token("wake_ups"),
        "equal_texts": sum(answer["is_equal"] for answer in answers),
        "num_answers": len(answers),
    }


def _print_network(table: EdgeNetwork, console: Console) -> None:
    network = table["network"]
    title = (
        f"{network['name']}: {network['delay_ms']:g} +- {network['jitter_ms']:g} ms {network['applies']}, "
        f"{network['rate_mbit']:g} Mbit/s, {network['loss']:.1%} lost"
    )
    shown = Table(title=title, box=box.SIMPLE_HEAD)
    headings = (
        "way",
        "tokens/s",
        "speed-up",
        "p95 s",
        "TTFT ms",
        "tau",
        "depth",
        "N",
        "calls",
        "up B",
        "down B",
        "server ms",
        "device ms",
    )
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "way" else "right")
    for row in table["rows"]:
        shown.add_row(
            row["way"],
            number(row["tokens_per_second"]),
            times(row["speedup"]),
            f"{row['p95_seconds']:.2f}",
            f"{row['ttft_ms']:.0f}",
            *("" if row[key] is None else f"{row[key]:.2f}" for key in ("tau", "depth", "layers")),
            f"{row['calls']:.2f}",
            f"{row['bytes_up']:.0f}",
            f"{row['bytes_down']:.0f}",
            f"{row['server_cpu_ms']:.1f}",
            f"{row['device_cpu_ms']:.1f}",
        )
    console.print(shown)
    equal = sum(row["equal_texts"] for row in table["rows"])
    compared = sum(row["num_answers"] for row in table["rows"])
    note = "calls, bytes and processor time are per token"
    console.print(f"equal texts: {equal} of {compared}; {note}", highlight=False)
    for pair in table["comparisons"]:
        line = f"{pair['what']}: {pair['speed']:.2f} in tokens/s, {pair['tau']:.2f} in tau"
        if pair["published_speed"] is not None and pair["published_tau"] is not None:
            line += f" (published: {pair['published_speed']:.2f} and {pair['published_tau']:.2f})"
        console.print(line, highlight=False)
