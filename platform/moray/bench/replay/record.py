"""Records a log with the target: its continuations, then the taps of all their tokens."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from moray.activations.capture.extract import TapEncoder
from moray.activations.format.schema import CacheConfig, shard_schema
from moray.bench.loading import nothing_fits
from moray.bench.replay.configs import ImportConfig, RecordConfig
from moray.bench.replay.log import (
    HEAD_FILE,
    LOG_FILE,
    TAPS_FILE,
    Continuation,
    LogHeader,
    as_line,
    count_tokens,
    read_log,
    whole_lines,
    write_target,
)
from moray.bench.specbench import read_questions
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.engine import Engine
from moray.decoding.generation import Generation
from moray.decoding.request import Request
from moray.errors import MismatchError
from moray.progress import Progress
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import TargetConfig, resolve_folder
from moray.targets.stored import read_model_config
from moray.text import ChatTokenizer
from moray.trees.shapes import ChainShape


def record(config: RecordConfig) -> dict[str, Any]:
    """Write a log, or go on with one that was interrupted.

    Raises:
        ConfigError: the target or the questions cannot be read.
        MismatchError: the folder holds a log of another target, text or sampling.
        DataError: no question fits.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    with Progress(f"load target {config.target.model}"):
        target = Target.load(config.target)
    header = LogHeader(
        target=target.spec.fingerprint,
        text_fingerprint=tokenizer.fingerprint,
        params=config.sampling,
        eos_ids=tuple(sorted({*target.eos_ids, *tokenizer.eos_ids})),
    )
    _write_continuations(config, folder, header, target, tokenizer)
    _, entries = read_log(config.output)
    write_taps(config, folder, target, entries)
    write_head(config, config.target, folder, target, config.target.template)
    return {"continuations": len(entries), "tokens": count_tokens(entries), "output": config.output}


def _write_continuations(
    config: RecordConfig, folder: Path, header: LogHeader, target: Target, tokenizer: ChatTokenizer
) -> None:
    path = folder / LOG_FILE
    lines = whole_lines(path)
    if lines and LogHeader.model_validate_json(lines[0]) != header:
        raise MismatchError(f"'{path}' is a log of another target, text or sampling: give another output")
    room = target.spec.max_positions - config.max_new_tokens
    asked = [
        (question.question_id, tokenizer.encode_prompt([{"role": "user", "content": question.turns[0]}]))
        for question in read_questions(config.questions, config.num_questions)
    ]
    asked = [(uid, prompt) for uid, prompt in asked if len(prompt) <= room]
    if not asked:
        raise nothing_fits(config.questions, room)
    for line, (uid, prompt) in zip(lines[1:], asked, strict=False):
        written = Continuation.model_validate_json(line)
        if (written.uid, written.prompt) != (uid, tuple(prompt)):
            raise MismatchError(f"'{path}' holds '{written.uid}' where questions has '{uid}': give another output")
    done = max(0, len(lines) - 1)
    with path.open("a", encoding="utf-8") as file, Progress("record", len(asked), unit="continuations") as progress:
        if not lines:
            file.write(as_line(header))
        progress.advance(done)
        for entry in _continuations(config, header, target, asked, done):
            file.write(as_line(entry))
            file.flush()
            progress.advance()


def _continuations(
    config: RecordConfig, header: LogHeader, target: Target, asked: Sequence[tuple[str, list[int]]], done: int
) -> Iterator[Continuation]:
    """Decode several at a time, and give them in the order asked, each as soon as those before it are complete."""
    left = range(done, len(asked))
    if not left:
        return
    longest = max(len(asked[number][1]) for number in left) + config.max_new_tokens
    rows = min(config.max_num_seqs, len(left))
    limits = EngineConfig(
        max_num_seqs=rows,
        kv_cache_tokens=rows * (longest + 66),
        max_model_len=longest,
        tree=ChainShape(type="chain", depth=1),
    )
    engine = Engine(target, limits, header.eos_ids)
    number_of = {}
    for number in left:
        request = Request(
            prompt=tuple(asked[number][1]),
            params=config.sampling,
            max_new_tokens=config.max_new_tokens,
            sequence=number,
        )
        number_of[engine.submit(request)] = number
    made = {number: Generation([]) for number in left}
    complete, following = set[int](), done
    while engine.is_busy:
        for update in engine.step():
            number = number_of[update.number]
            made[number].add(update)
            if update.finish_reason is not None:
                complete.add(number)
        while following in complete:
            uid, prompt = asked[following]
            generation = made.pop(following)
            yield Continuation(
                uid=uid,
                sequence=following,
                prompt=tuple(prompt),
                tokens=tuple(generation.tokens),
                finish_reason=generation.finish_reason,
            )
            following += 1


def write_taps(
    config: RecordConfig | ImportConfig, folder: Path, target: Target, entries: Sequence[Continuation]
) -> None:
    """Write what drafters read of every token."""
    cache = CacheConfig(
        kv_layers=config.kv_layers,
        hidden_depths=config.hidden_depths,
        kv_codec=config.codec,
        hidden_codec=config.codec,
    )
    encoder = TapEncoder(target, cache, {})
    schema = pa.schema(
        [pa.field("uid", pa.string()), *(pa.field(name, pa.binary()) for name in encoder.columns)],
        metadata=shard_schema(encoder.columns, None).metadata,
    )
    partial = folder / f".{TAPS_FILE}.tmp"
    with pq.ParquetWriter(partial, schema, compression="none") as writer, Progress("taps", len(entries)) as progress:
        for entry in entries:
            tokens = np.asarray([*entry.prompt, *entry.tokens], dtype=np.int64)
            columns, _ = encoder.columns_of([tokens], [entry.uid])
            writer.write_table(pa.Table.from_arrays([pa.array([entry.uid]), *columns.values()], schema=schema))
            progress.advance()
    partial.replace(folder / TAPS_FILE)


def write_head(
    config: RecordConfig | ImportConfig, source: TargetConfig, folder: Path, target: Target, template: str | None
) -> None:
    """Write the target's head, tokenizer, configuration and sizes.

    Args:
        config: says how many layers are kept.
        source: where the target was loaded from.
        folder: folder of the log.
        target: the loaded target.
        template: chat template, as in the target's settings.
    """
    head = TargetHead.of(target, config.head_layers)
    tensors = {name: tensor.contiguous() for name, tensor in head.tensors().items()}
    save_file(tensors, folder / HEAD_FILE)
    model_config: Any = read_model_config(resolve_folder(source.model), source.model)
    ChatTokenizer.load(source.model, template).tokenizer.save_pretrained(folder)
    write_target(folder, json.loads(model_config.to_json_string()), target.spec, config.head_layers, source.dtype)
