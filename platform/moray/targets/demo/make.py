"""Trains the demo target from scratch, in a minute or two on two CPU cores.

A laptop without a network has no target to distill a drafter from. This module makes one: a small Llama, trained on the
chats of `moray.targets.demo.chats` as `moray.targets.demo.data` encodes them, and saved as an ordinary Hugging Face
folder that the rest of Moray treats like any other. It does not know drafters, taps or caches.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from moray.targets.demo.chats import generate_chats, generate_questions
from moray.targets.demo.config import DemoTargetConfig
from moray.targets.demo.data import PackedRows, build_tokenizer, pack
from moray.targets.demo.training import ResponseLoss, fit

RECIPE = 4
"""Increase it with any change that makes the same configuration give other chats, tokens or weights."""

MARKER = "demo_target.json"
"""Written last, with the configuration and the result in it; an output without it does not count."""


_MAX_HELDOUT_ROWS = 100


@dataclass(frozen=True)
class DemoTargetResult:
    """The result of the training, as stored in the marker file."""

    num_steps: int
    heldout_loss: float
    heldout_accuracy: float
    seconds: float
    sample_question: str
    sample_answer: str


def read_result(config: DemoTargetConfig) -> DemoTargetResult | None:
    """The finished result for exactly this configuration and recipe, or None if there is work to do."""
    try:
        marker = json.loads((config.output / MARKER).read_text(encoding="utf-8"))
        result = DemoTargetResult(**marker["result"])
        # A run that finished all of its steps does not depend on max_seconds.
        is_same_budget = result.num_steps == config.optim.num_steps or marker["max_seconds"] == config.max_seconds
        return result if marker["key"] == _key(config) and is_same_budget else None
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        return None  # treat a damaged or foreign marker like none: start again


def train_demo_target(config: DemoTargetConfig, console: Console) -> DemoTargetResult:
    """Write the chats, the questions and the trained target to `config.output`.

    Interrupted work leaves no marker and is repeated from the start: it takes a minute.
    """
    began = time.monotonic()
    (config.output / MARKER).unlink(missing_ok=True)
    train_chats = list(generate_chats(config.num_train_chats, config.seed, heldout=False))
    heldout_chats = list(generate_chats(config.num_heldout_chats, config.seed, heldout=True))
    questions = generate_questions(config.num_questions, config.seed)
    _write_jsonl(config.output / "chats" / "train.jsonl", [chat.as_row() for chat in train_chats])
    _write_jsonl(config.output / "chats" / "heldout.jsonl", [chat.as_row() for chat in heldout_chats])
    _write_jsonl(config.output / "questions.jsonl", questions)

    tokenizer = build_tokenizer(train_chats, config.model)
    row_length = config.optim.row_length
    num_tokens = config.optim.num_steps * config.optim.rows_per_step * row_length
    rows = pack(tokenizer, train_chats, row_length, num_tokens)
    heldout = pack(tokenizer, heldout_chats, row_length, min(num_tokens, _MAX_HELDOUT_ROWS * row_length))
    console.print(
        f"{len(train_chats)} chats to train on, {len(heldout_chats)} held out, {len(questions)} questions; "
        f"vocabulary {len(tokenizer)}"
    )

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, num_steps = fit(tokenizer, rows, config, console)
        loss, accuracy = evaluate(model, heldout)
        question = str(questions[0]["turns"][0])  # type: ignore[index]
        answer = generate_answer(model, tokenizer, question)
    finally:
        torch.set_num_threads(num_threads)
    _save(model, tokenizer, config.output / "target")
    result = DemoTargetResult(num_steps, loss, accuracy, round(time.monotonic() - began, 1), question, answer)
    _write_marker(config, result)
    return result


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, rows: PackedRows) -> tuple[float, float]:
    """Mean loss per response token, and the share of response tokens predicted exactly."""
    objective = ResponseLoss(model)
    losses, hits, count = 0.0, 0, 0
    for index in range(len(rows.tokens)):
        loss, hit = objective(rows.batch(index, 1))
        losses, hits, count = losses + loss.item(), hits + int(hit.sum()), count + len(hit)
    return losses / count, hits / count


def generate_answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """The greedy answer to one question, limited to 128 tokens."""
    encoded: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    # The generation mixin's protocol types reject its own models.
    generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    tokens = generate(**encoded, max_new_tokens=128)
    return str(tokenizer.decode(tokens[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True))


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)  # files of an older format must not survive
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    transformers_logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)


def _write_jsonl(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _write_marker(config: DemoTargetConfig, result: DemoTargetResult) -> None:
    path = config.output / MARKER
    temporary = path.with_suffix(".tmp")
    marker = {"key": _key(config), "max_seconds": config.max_seconds, "result": vars(result)}
    temporary.write_text(json.dumps(marker, indent=2), encoding="utf-8")
    temporary.replace(path)


def _key(config: DemoTargetConfig) -> dict[str, Any]:
    """What the output depends on: the configuration without path and clock, and the recipe that reads it."""
    return {"recipe": RECIPE, "config": config.model_dump(mode="json", exclude={"output", "max_seconds"})}
