"""Regenerates chats on-policy on Ray Data: the target answers every user turn itself.

A drafter is judged on the target's own text, so that is what it should learn from. Each chunk of the input becomes one
part, written atomically; a killed job resumes with the missing parts.

By default the engine decodes without a drafter: its batches hold many sequences, where drafting does not pay off on the
machines that were measured, and usually no drafter exists yet.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

import ray.data

from moray.activations.capture.attempts import MAX_ATTEMPTS, Attempts
from moray.cluster.caching.answer_store import AGAIN, AnswerStore, AnswerSummary
from moray.cluster.caching.dialogues import KEPT_BAD_ROWS, answer_chats, answering_engine
from moray.cluster.caching.regenerate_config import RegenerateConfig
from moray.cluster.caching.rows import AnsweredRow, Batch, ChunkRow, batch_of, dataset_of, rows_from, rows_of
from moray.cluster.errors import own_errors
from moray.cluster.lost_ranks import exit_on_lost_rank
from moray.data.ultrachat import ChatChunk, plan_chunks, read_chunk
from moray.errors import ConfigError, DataError
from moray.progress import Progress
from moray.provenance import run_yaml
from moray.targets.spec import read_spec
from moray.text import ChatTokenizer


class AnswerTotal(TypedDict):
    """summary.yaml: counts over all parts, each as in `AnswerSummary`."""

    rows: int
    chats: int
    bad: int
    tokens: int
    dropped: dict[str, int]
    shortened: dict[str, int]
    finish_reasons: dict[str, int]


def regenerate(config: RegenerateConfig) -> AnswerTotal:
    """Answer all chats of `config.chats` with the target; return counts over all parts. Needs a Ray session.

    Raises:
        ConfigError: `max_new_tokens` leaves no room for a question.
        MismatchError: the folder holds answers of another target or configuration.
        DataError: there are more bad rows than `config.chats.max_bad_rows`, target replicas die over a part, or a file
            cannot be written.
    """
    store = AnswerStore(config.output if "://" in config.output else str(Path(config.output).absolute()))
    context = min(config.max_length, read_spec(config.target.model).max_positions)
    if config.max_new_tokens >= context:
        raise ConfigError(
            f"max_new_tokens is {config.max_new_tokens}, but chats of at most {context} tokens (max_length, and the "
            "target's context) must hold a question too: lower it"
        )
    chunks = {f"part-{i:05d}": chunk for i, chunk in enumerate(plan_chunks(config.chats, config.chats_per_part))}
    text = ChatTokenizer.load(config.target.model, config.target.template).fingerprint
    fingerprints = {"target": read_spec(config.target.model).fingerprint, "text": text}
    files = {chunk.label: chunk.file_bytes for chunk in chunks.values()}
    plan = {**fingerprints, "files": files, **config.text_settings}
    store.begin(plan, run_yaml(config, config.sampling.seed, fingerprints))
    summaries = {name: summary for name, summary in store.summaries().items() if name in chunks}
    _check_bad_rows(summaries, config.chats.max_bad_rows)
    if summaries.keys() != chunks.keys():
        _answer_missing(config, store, chunks, summaries)
    total = _total(summaries)
    for line in [line for summary in summaries.values() for line in summary.bad_rows][:KEPT_BAD_ROWS]:
        print(f"bad row: {line}")
    store.clear_temporary()  # left by target replicas that died
    store.put("summary.yaml", json.dumps(total, indent=2) + "\n")
    return total


def _answer_missing(
    config: RegenerateConfig, store: AnswerStore, chunks: Mapping[str, ChatChunk], summaries: dict[str, AnswerSummary]
) -> None:
    """Answer the parts that have no summary yet, and add their summaries."""
    missing = [ChunkRow(name, chunk) for name, chunk in chunks.items() if name not in summaries]
    dataset = dataset_of(missing).map_batches(
        _Answerer,
        fn_constructor_args=(store, config),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(config.num_targets, len(missing))),
        num_cpus=config.cpus_per_target,
        num_gpus=config.gpus_per_target,
    )
    done = sum(summary.rows for summary in summaries.values())
    total = sum(chunk.num_rows for chunk in chunks.values())
    with own_errors(), Progress("regenerate", total, done=done, unit="chats") as progress:
        begin, num_tokens = time.monotonic(), 0
        for row in rows_from(dataset, AnsweredRow):
            summaries[row.name] = row.summary
            num_tokens += row.summary.tokens
            progress.advance(row.summary.rows)
            progress.update(note=f"{num_tokens / (time.monotonic() - begin):,.0f} tokens/s")
            _check_bad_rows(summaries, config.chats.max_bad_rows)


class _Answerer:
    """Holds one target replica and answers chunks of chats with it."""

    def __init__(self, store: AnswerStore, config: RegenerateConfig) -> None:
        import torch

        from moray.drafters.loading import load_drafters
        from moray.targets.model import Target

        self._store = store
        self._attempts = Attempts(store)
        self._config = config
        torch.set_num_threads(self._config.threads_per_target)
        target = Target.load(self._config.target)
        self._tokenizer = ChatTokenizer.load(self._config.target.model, self._config.target.template)
        entries = () if config.drafter is None else (config.drafter,)
        drafters = [*load_drafters(entries, target, self._tokenizer).values(), None]
        self._engine = answering_engine(target, {*target.eos_ids, *self._tokenizer.eos_ids}, config, drafters[0])

    def __call__(self, batch: Batch) -> Batch:
        rows = rows_of(batch, ChunkRow)
        with exit_on_lost_rank():
            return batch_of([AnsweredRow(row.name, self._answer(row.name, row.chunk)) for row in rows])

    def _answer(self, name: str, chunk: ChatChunk) -> AnswerSummary:
        if not self._attempts.begin(name):
            raise DataError(
                f"{MAX_ATTEMPTS} target replicas died over {name} ({chunk.file}, {chunk.num_rows} rows from row "
                f"{chunk.first_row} on), out of memory perhaps: give a smaller batch_tokens or num_targets and {AGAIN}"
            )
        rows = list(read_chunk(chunk))
        answered, summary = answer_chats(rows, self._engine, self._tokenizer, self._config)
        self._store.write_part(name, answered, summary)
        self._attempts.end(name)
        return summary


def _check_bad_rows(summaries: Mapping[str, AnswerSummary], max_bad_rows: int) -> None:
    """Raise if there are too many bad rows over all parts, those of earlier runs included."""
    num_bad = sum(summary.bad for summary in summaries.values())
    if num_bad > max_bad_rows:
        first = next(line for name in sorted(summaries) for line in summaries[name].bad_rows)
        raise DataError(
            f"{num_bad} bad rows, chats.max_bad_rows allows {max_bad_rows}; the first: {first}; allow more and "
            f"{AGAIN}, or fix the file and start again"
        )


def _total(summaries: Mapping[str, AnswerSummary]) -> AnswerTotal:
    """Return the counts over all parts."""
    parts = list(summaries.values())
    return {
        "rows": sum(part.rows for part in parts),
        "chats": sum(part.chats for part in parts),
        "bad": sum(part.bad for part in parts),
        "tokens": sum(part.tokens for part in parts),
        "dropped": _sums(part.dropped for part in parts),
        "shortened": _sums(part.shortened for part in parts),
        "finish_reasons": _sums(part.finish_reasons for part in parts),
    }


def _sums(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up the counts of several parts, by name."""
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(sorted(total.items()))
