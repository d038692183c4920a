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
from moray.targets.spec import TargetConfig, read_spec
from moray.text import ChatTokenizer, Message


def regenerate(config: RegenerateConfig) -> int:
    """Answer all chats of `config.chats` with the target; returns how many chats there are. Needs a session."""
    output = Path(config.output).absolute()
    output.mkdir(parents=True, exist_ok=True)
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
            chats = 0
            for row in dataset.iter_rows():
                chats += int(row["chats"])
                bar.update(task, advance=1, note=f"{chats:,} chats")
    return sum(chunk.num_rows for chunk in chunks.values())


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
        self._room = read_spec(target.model).max_positions - self._config.max_new_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"chats": [self._write(Path(p), chunk) for p, chunk in zip(batch["path"], batch["chunk"], strict=True)]}

    def _write(self, path: Path, chunk: ChatChunk) -> int:
        chats = [row for row in read_chunk(chunk) if not isinstance(row, BadRow)]
        answered = self._answer(chats)
        lines = [
            json.dumps({"prompt": messages[0]["content"], "prompt_id": chat.uid, "messages": messages})
            for chat, messages in zip(chats, answered, strict=True)
            if len(messages) > 1
        ]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        temporary.replace(path)
        return len(lines)

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
