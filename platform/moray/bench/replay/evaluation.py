"""Replays drafters over a log: their acceptance, cycle by cycle, as if the target had verified them."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from moray.activations.format.decode import TapDecoder
from moray.activations.format.schema import Column, hidden_column, kv_column, read_description
from moray.bench.replay.chains import ChainMatches, MatchCounter, as_row
from moray.bench.replay.configs import ReplayConfig
from moray.bench.replay.log import HEAD_FILE, TAPS_FILE, TARGET_FILE, Continuation, LogHeader, read_log
from moray.bench.replay.ranks import CHAIN, StaticShape, TokenRanks, num_children, ranks_of
from moray.bench.replay.recorded import HeadOfText, RecordedRunner, RecordedTarget, RecordedText
from moray.bench.reports.wording import number
from moray.config import validate
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.generation import Generation, acceptance_by_position, tau
from moray.decoding.planning.fitting import fit_shape, is_too_deep
from moray.decoding.sampling.accept import Accept, is_by_choice
from moray.decoding.sampling.sampler import Sampler
from moray.drafters.base import Drafter
from moray.drafters.configs import TrainedConfig
from moray.drafters.loading import build_drafters
from moray.errors import ConfigError, DataError, MismatchError
from moray.progress import Progress
from moray.provenance import read_json
from moray.targets.head import TargetHead
from moray.targets.spec import TargetSpec
from moray.text import ChatTokenizer
from moray.trees.shapes import AdaptiveShape, AnyShape, ChainShape, DynamicShape


def replay(config: ReplayConfig, console: Console) -> dict[str, Any]:
    """Replay all drafters with all trees, and print their tau.

    Raises:
        ConfigError: the log lacks what a drafter reads, or a tree cannot be replayed.
        MismatchError: a drafter belongs to another target, tokenizer or template.
        DataError: the log is damaged.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    for index, shape in enumerate(config.trees):
        if isinstance(shape, AdaptiveShape):
            raise ConfigError(
                f"trees[{index}] is adaptive, which follows measured costs and cannot be replayed: give chain, fixed, "
                "sparse or dynamic"
            )
    header, entries = read_log(config.log)
    if not is_by_choice(header.params):
        raise ConfigError(
            f"the log's acceptance_method is '{header.params.acceptance_method}', whose drafts cannot be replayed: "
            "record with gumbel_coupled, or greedily"
        )
    log = _Log(config.log, header)
    if not log.has_taps:
        _check_need_no_target(config)
    drafters = build_drafters(config.drafters, log.head, log.tokenizer)
    for name, drafter in drafters.items():
        log.check(name, drafter)
        for index, shape in enumerate(config.trees):
            if is_too_deep(shape, drafter.max_depth):
                raise ConfigError(
                    f"trees[{index}] is {shape.depth} levels deep; drafter '{name}' drafts at most "
                    f"{drafter.max_depth}: give shallower trees, or replay this drafter by itself"
                )
            fit_shape(shape, name, drafter.max_depth, log.spec.vocab_size)
    chosen = entries[: config.num_continuations]
    rows: list[dict[str, Any]] = []
    chains: list[dict[str, Any]] = []
    passes = len(config.trees) + (config.max_depth is not None)
    with Progress("replay", len(drafters) * passes * len(chosen)) as progress:
        for name, drafter in drafters.items():
            own = _DrafterReplay(name, drafter, log, chosen, progress)
            depth = config.max_depth and min(config.max_depth, drafter.max_depth or config.max_depth)
            own.rank([shape for shape in config.trees if isinstance(shape, StaticShape)], depth)
            rows += [own.row(shape) for shape in config.trees]
            if depth is not None:
                chains.append(own.chains(depth))
    _print(rows, console)
    _print_chains(chains, console)
    settings = config.model_dump(mode="json")
    about = {"target": header.target, "params": header.params.model_dump(mode="json")}
    return {"rows": rows, "chains": chains, "log": about, "settings": settings}


def _check_need_no_target(config: ReplayConfig) -> None:
    """Refuse drafters that were trained for a target, over a log of which only the text is known."""
    for index, entry in enumerate(config.drafters):
        if isinstance(entry, str | TrainedConfig):
            raise ConfigError(
                f"drafters[{index}] was trained for a target, of which log '{config.log}' has only the texts: import "
                "it with target.model, or replay {type: ngram} and {type: pretrained, model: FOLDER}"
            )


class _DrafterReplay:
    """One drafter over some continuations: static trees by ranks from one pass, other trees walked cycle by cycle."""

    def __init__(
        self, name: str, drafter: Drafter, log: "_Log", entries: list[Continuation], progress: Progress
    ) -> None:
        self._name, self._drafter, self._log = name, drafter, log
        self._entries, self._progress = entries, progress
        self._ranks: list[TokenRanks] | None = None
        self._seconds = 0.0

    def rank(self, shapes: Sequence[StaticShape], chain_depth: int | None) -> None:
        """Find the ranks that static trees and chains of every depth need, so that `row` need not walk them.

        Nothing is done where walking is needed anyway or is faster: for a drafter that may end its drafts early, and
        for a single tree of one that takes a step for each level.
        """
        num_passes = len(shapes) + (chain_depth is not None)
        levels = max([*(shape.depth for shape in shapes), chain_depth or 0])
        longest = max(len(entry.prompt) + len(entry.tokens) for entry in self._entries)
        is_one = len(shapes) == 1 and chain_depth is None and not self._drafter.reads_text_alone
        if not levels or is_one or self._drafter.may_end_early(longest + levels):
            return
        begin = time.perf_counter()
        counts = {count for shape in shapes for count in num_children(shape)}
        if chain_depth is not None:
            counts.add(CHAIN)
        self._ranks = []
        for index, entry in enumerate(self._entries):
            vocab_size, device = self._log.spec.vocab_size, self._log.target.device
            sampler = Sampler(self._log.header.params, vocab_size, device, entry.sequence)
            text = self._log.text(index, entry, self._drafter)
            below = ranks_of(self._drafter, text, len(entry.prompt), levels, sorted(counts), sampler)
            self._ranks.append(TokenRanks(entry.uid, below))
            self._progress.advance(num_passes)
        self._seconds = time.perf_counter() - begin

    def row(self, shape: AnyShape) -> dict[str, Any]:
        """One tree."""
        begin = time.perf_counter()
        made = self._by_ranks(shape)
        is_walked = made is None
        if made is None:
            made = []
            for generation in replayed(self._log, self._drafter, shape, self._entries):
                made.append(generation)
                self._progress.advance()
        return {
            "drafter": self._name,
            "tree": shape.name,
            "by": "walk" if is_walked else "ranks",
            "tau": tau(made),
            "acceptance": acceptance_by_position(made),
            "cycles": [
                {"uid": e.uid, "accepted": g.accepted, "emitted": g.emitted, "nodes": g.nodes}
                for e, g in zip(self._entries, made, strict=True)
            ],
            "num_tokens": sum(len(entry.tokens) for entry in self._entries),
            "seconds": time.perf_counter() - begin if is_walked else self._seconds,
        }

    def _by_ranks(self, shape: AnyShape) -> list[Generation] | None:
        if self._ranks is None or isinstance(shape, DynamicShape | AdaptiveShape):
            return None
        return [ranks.generation(shape) for ranks in self._ranks]

    def chains(self, depth: int) -> dict[str, Any]:
        """Chains of every depth up to `depth`."""
        if self._ranks is not None:
            return as_row(self._name, depth, [ranks.matches(depth) for ranks in self._ranks], self._seconds)
        begin = time.perf_counter()
        counter, found = MatchCounter(), list[ChainMatches]()
        shape = ChainShape(type="chain", depth=depth)
        replays = _replays(self._log, self._drafter, shape, self._entries, counter)
        for entry, _ in zip(self._entries, replays, strict=True):
            found.append(counter.take(entry.uid))
            self._progress.advance()
        return as_row(self._name, depth, found, time.perf_counter() - begin)


def replayed(log: "_Log", drafter: Drafter, shape: AnyShape, entries: list[Continuation]) -> Iterator[Generation]:
    """The generation of every continuation.

    Raises:
        DataError: replaying gives another text than the log has, which is a defect of the log or of this code.
    """
    for made in _replays(log, drafter, shape, entries):
        made.accepted = within_text(made)
        yield made


def _replays(
    log: "_Log", drafter: Drafter, shape: AnyShape, entries: list[Continuation], accept: Accept | None = None
) -> Iterator[Generation]:
    """As `replayed`, with an acceptance method in place of the log's."""
    max_model_len = max(len(entry.prompt) + len(entry.tokens) for entry in entries)
    runner = RecordedRunner(log.target, max_model_len + shape.num_nodes + 65)
    decoder = SpeculativeDecoder(log.target, drafter, shape, max_model_len, runner, accept)  # type: ignore[arg-type]
    for index, entry in enumerate(entries):
        runner.open(log.text(index, entry, drafter))
        prompt, most = list(entry.prompt), len(entry.tokens)
        made = decoder.generate(prompt, log.header.params, most, log.header.eos_ids, sequence=entry.sequence)
        if tuple(made.tokens) != entry.tokens:
            raise DataError(f"continuation '{entry.uid}' came out as another text than in the log: record it again")
        yield made


def within_text(made: Generation) -> list[int]:
    """Draft tokens accepted in each cycle, without those past the end of the text, of which a log knows nothing."""
    return [min(accepted, emitted) for accepted, emitted in zip(made.accepted, made.emitted, strict=True)]


class _Log:
    """An open log."""

    def __init__(self, folder: str, header: LogHeader) -> None:
        self.folder, self.header = Path(folder), header
        self._need(TARGET_FILE)
        stored: dict[str, Any] = read_json(self.folder / TARGET_FILE)
        self._stored, self.spec = stored, validate(TargetSpec, stored["spec"])
        self.has_taps = stored["config"] is not None
        """Whether more than the text of the target is known."""
        if self.has_taps:
            self._need(TAPS_FILE)
            self._need(HEAD_FILE)
        self.tokenizer = ChatTokenizer.load(folder)
        if self.tokenizer.fingerprint != header.text_fingerprint:
            raise MismatchError(
                f"the tokenizer in '{folder}' has the fingerprint {self.tokenizer.fingerprint}, its log "
                f"{header.text_fingerprint}: record it again"
            )
        dtype = getattr(torch, stored["dtype"])
        self.target = RecordedTarget(self.spec, torch.device("cpu"), dtype)
        self._columns: dict[str, Column] = {}
        if self.has_taps:
            self._tensors = load_file(self.folder / HEAD_FILE)
            self._file = pq.ParquetFile(self.folder / TAPS_FILE)
            self._columns = read_description(self._file.schema_arrow).columns
            self._decoder = TapDecoder(self._columns, dtype=dtype)

    def _need(self, name: str) -> None:
        if not (self.folder / name).is_file():
            raise ConfigError(
                f"log '{self.folder}' has no {name}: it is not complete; run the command that made it again"
            )

    def head(self, num_layers: int) -> TargetHead:
        """The target's head.

        Raises:
            ConfigError: the log keeps too few of its last layers.
        """
        if not self.has_taps:
            return HeadOfText(self.spec, self.target.dtype)
        kept = self._stored["head_layers"]
        if num_layers > kept:
            raise ConfigError(
                f"log '{self.folder}' keeps {kept} of the target's last layers, and a drafter runs {num_layers}: "
                f"record it with head_layers={num_layers}"
            )
        return TargetHead.restore(self._stored["config"], self.spec, num_layers, self._tensors)

    def check(self, name: str, drafter: Drafter) -> None:
        """Refuse a drafter that reads what the log lacks.

        Raises:
            ConfigError: names the column.
        """
        missing = [column for column in _columns_of(drafter) if column not in self._columns]
        if missing:
            raise ConfigError(
                f"drafter '{name}' reads {', '.join(missing)}, which log '{self.folder}' does not have: record it with "
                "these kv_layers and hidden_depths"
            )

    def text(self, index: int, entry: Continuation, drafter: Drafter) -> RecordedText:
        """A continuation with the taps that a drafter reads."""
        wanted = _columns_of(drafter)
        if not wanted:
            return RecordedText((*entry.prompt, *entry.tokens), {}, {})
        table = self._file.read_row_group(index, columns=["uid", *wanted])
        if table.column("uid")[0].as_py() != entry.uid:
            raise DataError(f"row {index} of '{self.folder / TAPS_FILE}' is not that of '{entry.uid}': record it again")
        needs = drafter.observed
        return RecordedText(
            (*entry.prompt, *entry.tokens),
            {layer: self._decoder.decode(table, kv_column(layer)) for layer in needs.kv_layers},
            {depth: self._decoder.decode(table, hidden_column(depth)) for depth in needs.hidden_depths},
        )


def _columns_of(drafter: Drafter) -> list[str]:
    needs = drafter.observed
    return [*map(kv_column, needs.kv_layers), *map(hidden_column, needs.hidden_depths)]


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="replayed without the target", box=box.SIMPLE_HEAD)
    for heading in ("drafter", "tree", "by", "tau", "accepted at depth 1, 2, 3", "tokens", "seconds"):
        table.add_column(heading, justify="left" if heading in ("drafter", "tree", "by") else "right")
    for row in rows:
        first = ", ".join(f"{share:.2f}" for share in row["acceptance"][:3])
        table.add_row(
            row["drafter"],
            row["tree"],
            row["by"],
            number(row["tau"], 3),
            first,
            f"{row['num_tokens']:,}",
            f"{row['seconds']:.1f}",
        )
    if rows:
        console.print(table)


def _print_chains(chains: list[dict[str, Any]], console: Console) -> None:
    if not chains:
        return
    deepest = max(row["depth"] for row in chains)
    table = Table(title="tau of chains by their depth", box=box.SIMPLE_HEAD)
    table.add_column("drafter")
    for depth in range(1, deepest + 1):
        table.add_column(str(depth), justify="right")
    for row in chains:
        taus = [row["tau"].get(str(depth)) for depth in range(1, deepest + 1)]
        table.add_row(row["drafter"], *("" if each is None else number(each) for each in taus))
    console.print(table)
