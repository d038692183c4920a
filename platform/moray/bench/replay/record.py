"""Records a log with the target: its continuations, then the taps of all their tokens."""

import json
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
from moray.bench.replay.configs import RecordConfig
from moray.bench.replay.log import (
    HEAD_FILE,
    LOG_FILE,
    TAPS_FILE,
    TARGET_FILE,
    Continuation,
    LogHeader,
    as_line,
    count_tokens,
    read_log,
    whole_lines,
)
from moray.bench.specbench import read_questions
from moray.decoding.generate import SpeculativeDecoder
from moray.errors import MismatchError
from moray.progress import Progress
from moray.provenance import write_json_atomically
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import resolve_folder
from moray.targets.stored import read_model_config
from moray.text import ChatTokenizer


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
    _write_taps(config, folder, target, entries)
    _write_head(config, folder, target)
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
    decoder = SpeculativeDecoder(target, None)
    with path.open("a", encoding="utf-8") as file, Progress("record", len(asked), unit="continuations") as progress:
        if not lines:
            file.write(as_line(header))
        progress.advance(max(0, len(lines) - 1))
        for number in range(max(0, len(lines) - 1), len(asked)):
            uid, prompt = asked[number]
            made = decoder.generate(prompt, config.sampling, config.max_new_tokens, header.eos_ids, sequence=number)
            entry = Continuation(
                uid=uid,
                sequence=number,
                prompt=tuple(prompt),
                tokens=tuple(made.tokens),
                finish_reason=made.finish_reason,
            )
            file.write(as_line(entry))
            file.flush()
            progress.advance()


def _write_taps(config: RecordConfig, folder: Path, target: Target, entries: list[Continuation]) -> None:
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


def _write_head(config: RecordConfig, folder: Path, target: Target) -> None:
    head = TargetHead.of(target, config.head_layers)
    source = resolve_folder(config.target.model)
    tensors = {name: tensor.contiguous() for name, tensor in head.tensors().items()}
    save_file(tensors, folder / HEAD_FILE)
    model_config: Any = read_model_config(source, config.target.model)
    ChatTokenizer.load(config.target.model, config.target.template).tokenizer.save_pretrained(folder)
    write_json_atomically(
        folder / TARGET_FILE,
        {
            "config": json.loads(model_config.to_json_string()),
            "spec": target.spec.model_dump(mode="json"),
            "head_layers": config.head_layers,
            "dtype": config.target.dtype,
        },
    )
