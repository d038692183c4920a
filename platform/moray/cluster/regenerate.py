"""On-policy chats on Ray Data: the target answers every user turn itself.

A drafter is judged on the target's own text, so it learns most from that. One part per chunk of the input,
written whole or not at all; a killed job goes on with the parts that are missing.
"""

import json
from pathlib import Path
from typing import Any

import ray.data

from moray.activations.ultrachat import BadRow, Chat, ChatChunk, plan_chunks, read_chunk
from moray.cluster.configs import RegenerateConfig
from moray.cluster.errors import own_errors
from moray.cluster.progress import progress_bar
from moray.distill.runs import begin_run, check_run
from moray.errors import DataError
from moray.targets.spec import TargetConfig, read_spec
from moray.text import ChatTokenizer, Message


def regenerate(config: RegenerateConfig) -> int:
    """Answer all chats of `config.chats` with the target; returns how many were answered. Needs a session.

    A chat whose first question leaves no room for an answer is left out.

    Raises:
        MismatchError: the folder holds answers of another target or configuration.
        DataError: more bad rows than `config.chats.max_bad_rows`.
    """
    output = Path(config.output).absolute()
    fingerprints = {"target": read_spec(config.target.model).fingerprint}
    check_run(output, config, fingerprints)
    begin_run(output, config, None, fingerprints)
    chunks = {f"part-{i:05d}": chunk for i, chunk in enumerate(plan_chunks(config.chats, config.chats_per_part))}
    missing = [
        {"path": str(output / f"{name}.jsonl"), "chunk": chunk}
        for name, chunk in chunks.items()
        if not (output / f"{name}.jsonl").exists()
    ]
    if missing:
        dataset = ray.data.from_items(missing, override_num_blocks=len(missing)).map_batches(
            _Answerer,
            fn_constructor_args=(config.model_dump_json(),),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(config.num_targets, len(missing))),
            num_cpus=config.cpus_per_target,
            num_gpus=config.gpus_per_target,
        )
        with own_errors(), progress_bar() as bar:
            task = bar.add_task("regenerate", total=len(chunks), completed=len(chunks) - len(missing), note="")
            num_bad = 0
            for row in dataset.iter_rows():
                num_bad += int(row["bad"])
                bar.update(task, advance=1, note=f"{num_bad:,} bad rows" if num_bad else "")
                if num_bad > config.chats.max_bad_rows:
                    raise DataError(
                        f"{row['first_bad'] or 'rows'}: {num_bad} bad rows, chats.max_bad_rows allows "
                        f"{config.chats.max_bad_rows}; mend them or allow more"
                    )
    return sum(_num_lines(output / f"{name}.jsonl") for name in chunks)


def _num_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


class _Answerer:
    """Holds one target replica and rewrites chunks of chats with it."""

    def __init__(self, config_json: str) -> None:
        import torch

        from moray.targets.model import Target

        self._config = RegenerateConfig.model_validate_json(config_json)
        torch.set_num_threads(self._config.threads_per_target)
        target: TargetConfig = self._config.target
        self._target = Target.load(target)
        self._tokenizer = ChatTokenizer.load(target.model, target.template)
        self._eos_ids = frozenset(self._target.eos_ids) | frozenset(self._tokenizer.eos_ids)
        self._room = self._target.spec.max_positions - self._config.max_new_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        bad = [self._write(Path(path), chunk) for path, chunk in zip(batch["path"], batch["chunk"], strict=True)]
        return {"bad": [len(rows) for rows in bad], "first_bad": [str(rows[0]) if rows else "" for rows in bad]}

    def _write(self, path: Path, chunk: ChatChunk) -> list[BadRow]:
        """Answer one chunk into one part; returns the rows that could not be used."""
        rows = list(read_chunk(chunk))
        chats = [row for row in rows if not isinstance(row, BadRow)]
        answered = self._answer(chats)
        lines = [
            json.dumps({"prompt": messages[0]["content"], "prompt_id": chat.uid, "messages": messages})
            for chat, messages in zip(chats, answered, strict=True)
            if len(messages) > 1
        ]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        temporary.replace(path)
        return [row for row in rows if isinstance(row, BadRow)]

    def _answer(self, chats: list[Chat]) -> list[list[Message]]:
        """Turn by turn: a later question follows the target's own earlier answers."""
        given = [[m for m in chat.messages if m["role"] != "assistant"] for chat in chats]
        answered: list[list[Message]] = [[] for _ in chats]
        live = list(range(len(chats)))
        while live:
            prompts: dict[int, list[int]] = {}
            for index in live:
                turn = _next_turn(given[index])
                prompt = self._tokenizer.encode_prompt([*answered[index], *turn]) if turn else []
                if 0 < len(prompt) < self._room:
                    answered[index] += turn
                    prompts[index] = prompt
            # Neighbours in length share a batch; answers of one kind of question tend to be alike too.
            live = sorted(prompts, key=lambda index: len(prompts[index]))
            for begin in range(0, len(live), self._config.batch_size):
                self._answer_batch(live[begin : begin + self._config.batch_size], prompts, answered)
        return answered

    def _answer_batch(self, rows: list[int], prompts: dict[int, list[int]], answered: list[list[Message]]) -> None:
        from moray.decoding.lockstep import decode_lockstep

        chosen = [prompts[row] for row in rows]
        answers = decode_lockstep(self._target, chosen, self._config.max_new_tokens, self._eos_ids)
        for row, answer in zip(rows, answers, strict=True):
            answered[row].append({"role": "assistant", "content": self._tokenizer.decode(answer)})


def _next_turn(messages: list[Message]) -> list[Message]:
    """Take the messages up to and with the next user turn from the front of the list."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            turn = messages[: index + 1]
            del messages[: index + 1]
            return turn
    messages.clear()
    return []
