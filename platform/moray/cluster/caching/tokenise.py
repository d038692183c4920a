"""Tokenises chats into parts on Ray Data, the first stage of a cache. Parts hold only tokens (4 bytes each)."""

from typing import Any

import pyarrow as pa
import ray
import ray.data

from moray.activations.format.records import PartSummary
from moray.activations.format.scan import find_parts
from moray.activations.format.schema import TOKENS_SCHEMA
from moray.activations.format.store import CacheStore
from moray.cluster.caching.configs import CaptureConfig
from moray.cluster.caching.rows import Batch, ChunkRow, PartRow, batch_of, dataset_of, rows_from, rows_of
from moray.data.ultrachat import BadRow, ChatChunk, read_chunk
from moray.errors import DataError
from moray.progress import Progress
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

_KEPT_BAD_ROWS = 20


class PartWriter:
    """Tokenises each chunk of the input into one part."""

    def __init__(self, uri: str, target: TargetConfig, max_length: int) -> None:
        self._store = CacheStore(uri)
        self._tokenizer = ChatTokenizer.load(target.model, target.template)
        self._max_length = max_length

    def __call__(self, batch: Batch) -> Batch:
        return batch_of([PartRow(self.write(row.name, row.chunk)) for row in rows_of(batch, ChunkRow)])

    def write(self, name: str, chunk: ChatChunk) -> PartSummary:
        """Tokenise a chunk and write its part, then the summary, which makes the part count."""
        columns: dict[str, list[Any]] = {"uid": [], "tokens": [], "response_mask": []}
        bad: list[str] = []
        num_dropped = 0
        for row in read_chunk(chunk):
            if isinstance(row, BadRow):
                bad.append(str(row))
                continue
            try:
                chat = self._tokenizer.encode_chat(row.messages, self._max_length)
            except DataError as error:
                bad.append(f"chat '{row.uid}': {error}")
                continue
            if not chat.response_mask.any():
                num_dropped += 1
                continue
            columns["uid"].append(row.uid)
            columns["tokens"].append(chat.tokens)
            columns["response_mask"].append(chat.response_mask)
        file = self._store.write_table(f"tokens/{name}.parquet", pa.table(columns, schema=TOKENS_SCHEMA))
        summary = PartSummary(
            name=name,
            bytes=file.num_bytes,
            sha256=file.sha256,
            chats=len(columns["uid"]),
            dropped=num_dropped,
            bad=len(bad),
            bad_rows=bad[:_KEPT_BAD_ROWS],
            lengths=[len(tokens) for tokens in columns["tokens"]],
        )
        self._store.write_json(f"tokens/{name}.json", summary.values)
        return summary


def tokenise(
    store: CacheStore,
    target: TargetConfig,
    planned: list[ChatChunk],
    max_bad_rows: int,
    max_length: int,
    capture: CaptureConfig,
) -> dict[str, int]:
    """Stage 1: write the missing parts; return counts over all parts."""
    chunks = {f"part-{i:05d}": chunk for i, chunk in enumerate(planned)}
    found = find_parts(store)
    for name, reason in found.damaged.items():
        print(f"part 'tokens/{name}.parquet' is damaged: {reason}; it will be made again")
    summaries = found.whole
    done = len(summaries)
    missing = [ChunkRow(name, chunk) for name, chunk in chunks.items() if name not in summaries]
    if missing:
        dataset = dataset_of(missing).map_batches(
            PartWriter,
            fn_constructor_args=(store.uri, target, max_length),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(capture.num_tokenisers, len(missing))),
            num_cpus=1,
        )
        with Progress("tokenise", len(chunks), done=done, unit="parts") as progress:
            chats_done = 0
            for row in rows_from(dataset, PartRow):
                summaries[row.summary.name] = row.summary
                chats_done += row.summary.chats
                progress.advance()
                progress.update(note=f"{chats_done:,} chats")
    ordered = [summaries[name] for name in chunks]
    counts = {
        "chats": sum(summary.chats for summary in ordered),
        "dropped": sum(summary.dropped for summary in ordered),
        "bad": sum(summary.bad for summary in ordered),
    }
    _report_bad_rows(counts, [line for summary in ordered for line in summary.bad_rows], max_bad_rows)
    return counts


def _report_bad_rows(counts: dict[str, int], lines: list[str], max_bad_rows: int) -> None:
    for line in lines[:_KEPT_BAD_ROWS]:
        print(f"bad row: {line}")
    if counts["bad"] > max_bad_rows:
        raise DataError(
            f"{counts['bad']} bad rows, chats.max_bad_rows allows {max_bad_rows}; the first: {lines[0]}; "
            "fix them or raise chats.max_bad_rows"
        )
    if not counts["chats"]:
        raise DataError(f"no chat with an assistant turn is left: {counts['dropped']} dropped, {counts['bad']} bad")
    if counts["bad"] or counts["dropped"]:
        print(f"{counts['chats']} chats kept, {counts['dropped']} without an assistant turn, {counts['bad']} bad")
