"""The activation cache on Ray Data: chats -> tokenised parts -> shards of activations.

Two streaming stages with the plan between them. Parts hold tokens only (4 bytes each), so the exact number
of tokens, shards and bytes is known before the target runs, batches can be cut by length, and a resumed
job knows what is missing.
"""

import json
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import ray
import ray.data

from moray.activations.extract import ShardPlan, ShardWriter, bytes_per_token, plan_shards, tap_columns
from moray.activations.manifest import Manifest, read_manifest, write_manifest
from moray.activations.schema import FORMAT, TOKENS_SCHEMA, CacheConfig
from moray.activations.store import CacheStore
from moray.activations.ultrachat import BadRow, ChatChunk, ChatsConfig, plan_chunks, read_chunk
from moray.cluster.configs import CaptureConfig
from moray.cluster.errors import own_errors
from moray.cluster.progress import progress_bar
from moray.errors import DataError
from moray.targets.spec import TargetConfig, read_spec
from moray.text import ChatTokenizer

_KEPT_BAD_ROWS = 20


def cache_activations(
    output: str, target: TargetConfig, chats: ChatsConfig, cache: CacheConfig, capture: CaptureConfig
) -> Manifest:
    """Make or complete the activation cache at `output`. Needs a Ray session.

    Raises:
        MismatchError: something else is cached at `output`.
        DataError: too many bad rows, or activations that are not finite.
    """
    store = CacheStore(output)
    spec = read_spec(target.model)
    columns = tap_columns(spec, cache)
    tokenizer = ChatTokenizer.load(target.model, target.template)
    chunks = plan_chunks(chats, cache.chats_per_part)
    store.claim(
        {
            "format": FORMAT,
            "target": spec.model_dump(mode="json"),
            "text_fingerprint": tokenizer.fingerprint,
            "chats": chats.model_dump(mode="json", exclude={"max_bad_rows"}),
            "files": {chunk.label: chunk.file_bytes for chunk in chunks},
            "cache": cache.model_dump(mode="json"),
            "columns": columns,
        }
    )
    if store.exists("manifest.json"):
        manifest = read_manifest(store)
        if manifest.shards.keys() == store.committed().keys():  # else a damaged shard was removed
            return manifest
    with own_errors():
        # Beyond its context a target is no longer itself (Mistral's window), or fails.
        max_length = min(cache.max_length, spec.max_positions)
        counts = _tokenise(store, target, chunks, chats.max_bad_rows, max_length, capture)
        _run_target(store, target, cache, capture, bytes_per_token(columns))
    return write_manifest(store, counts)


class _PartWriter:
    """Tokenises one chunk of the input into one part."""

    def __init__(self, uri: str, target: dict[str, Any], max_length: int) -> None:
        config = TargetConfig.model_validate(target)
        self._store = CacheStore(uri)
        self._tokenizer = ChatTokenizer.load(config.model, config.template)
        self._max_length = max_length

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        summaries = [self._write(*pair) for pair in zip(batch["name"], batch["chunk"], strict=True)]
        return {"summary": [json.dumps(summary) for summary in summaries]}

    def _write(self, name: str, chunk: ChatChunk) -> dict[str, Any]:
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
        self._store.write_table(f"tokens/{name}.parquet", pa.table(columns, schema=TOKENS_SCHEMA))
        summary = {
            "chats": len(columns["uid"]),
            "dropped": num_dropped,
            "bad": len(bad),
            "bad_rows": bad[:_KEPT_BAD_ROWS],
            "lengths": [len(tokens) for tokens in columns["tokens"]],
        }
        self._store.write_json(f"tokens/{name}.json", summary)
        return summary


class _ShardActor:
    """Holds one target replica and writes shards with it."""

    def __init__(self, uri: str, target: dict[str, Any], cache: dict[str, Any], threads: int) -> None:
        import torch

        from moray.targets.model import Target

        torch.set_num_threads(threads)
        config = CacheConfig.model_validate(cache)
        self._writer = ShardWriter(Target.load(TargetConfig.model_validate(target)), CacheStore(uri), config)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        infos = [self._writer.write(ShardPlan(**json.loads(plan))) for plan in batch["plan"]]
        return {"tokens": [info.tokens for info in infos]}


def _tokenise(
    store: CacheStore,
    target: TargetConfig,
    planned: list[ChatChunk],
    max_bad_rows: int,
    max_length: int,
    capture: CaptureConfig,
) -> dict[str, int]:
    """Stage 1: write the parts that are missing; return counts over all parts."""
    chunks = {f"part-{i:05d}": chunk for i, chunk in enumerate(planned)}
    done = {name[:-5] for name in store.names("tokens", ".json")}
    missing = [{"name": name, "chunk": chunk} for name, chunk in chunks.items() if name not in done]
    if missing:
        dataset = ray.data.from_items(missing, override_num_blocks=len(missing)).map_batches(
            _PartWriter,
            fn_constructor_args=(store.uri, target.model_dump(), max_length),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(capture.num_tokenisers, len(missing))),
            num_cpus=1,
        )
        with progress_bar() as bar:
            task = bar.add_task("tokenise", total=len(chunks), completed=len(done), note="")
            chats_done = 0
            for row in dataset.iter_rows():
                chats_done += json.loads(row["summary"])["chats"]
                bar.update(task, advance=1, note=f"{chats_done:,} chats")
    summaries = [store.read_json(f"tokens/{name}.json") for name in chunks]
    counts = {key: sum(summary[key] for summary in summaries) for key in ("chats", "dropped", "bad")}
    _report_bad_rows(counts, [line for summary in summaries for line in summary["bad_rows"]], max_bad_rows)
    return counts


def _report_bad_rows(counts: dict[str, int], lines: list[str], most: int) -> None:
    for line in lines[:_KEPT_BAD_ROWS]:
        print(f"bad row: {line}")
    if counts["bad"] > most:
        raise DataError(
            f"{counts['bad']} bad rows, chats.max_bad_rows allows {most}; the first: {lines[0]}; "
            "mend them or allow more"
        )
    if not counts["chats"]:
        raise DataError(f"no chat with an assistant turn is left: {counts['dropped']} dropped, {counts['bad']} bad")
    if counts["bad"] or counts["dropped"]:
        print(f"{counts['chats']} chats kept, {counts['dropped']} without an assistant turn, {counts['bad']} bad")


def _run_target(
    store: CacheStore, target: TargetConfig, cache: CacheConfig, capture: CaptureConfig, token_bytes: int
) -> None:
    """Stage 2: write the shards that are missing."""
    plans: list[ShardPlan] = []
    tokens_of: dict[str, int] = {}
    for marker in store.names("tokens", ".json"):
        lengths = store.read_json(f"tokens/{marker}")["lengths"]
        part_plans = plan_shards(marker[:-5], lengths, cache, token_bytes)
        tokens_of |= {plan.name: sum(lengths[row] for rows in plan.batches for row in rows) for plan in part_plans}
        plans += part_plans
    done = set(store.committed())
    missing = [plan for plan in plans if plan.name not in done]
    total = sum(tokens_of.values())
    print(
        f"{total:,} tokens in {len(plans)} shards, {total * token_bytes / 2**20:,.0f} MiB; {len(missing)} shards to do"
    )
    if not missing:
        return
    items = [{"plan": json.dumps(asdict(plan))} for plan in missing]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _ShardActor,
        fn_constructor_args=(store.uri, target.model_dump(), cache.model_dump(), capture.threads_per_target),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(capture.num_targets, len(items))),
        num_cpus=capture.cpus_per_target,
        num_gpus=capture.gpus_per_target,
    )
    with progress_bar() as bar:
        finished = sum(tokens_of[name] for name in done if name in tokens_of)
        task = bar.add_task("cache", total=total, completed=finished, note="")
        for row in dataset.iter_rows():
            bar.update(task, advance=int(row["tokens"]), note=_rate(bar.tasks[0].speed))


def _rate(speed: float | None) -> str:
    return f"{speed:,.0f} tokens/s" if speed else ""
