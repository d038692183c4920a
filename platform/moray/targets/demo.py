"""Trains the embedded demo target from nothing, in a minute or two on two CPU cores.

A laptop without a network has no target to distil a drafter from. This module makes one: a small Llama,
trained on the chats of `moray.targets.demo_chats` as `moray.targets.demo_data` encodes them, and saved as an
ordinary Hugging Face folder that the rest of Moray treats like any other. It refuses to know drafters, taps
and caches. One process with one thread: matrices this small gain nothing from a second one, and two
data-parallel processes would save less than they take to start.
"""

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from moray.targets.demo_chats import generate_chats, generate_questions
from moray.targets.demo_config import DemoModelConfig, DemoOptimConfig, DemoTargetConfig
from moray.targets.demo_data import SPECIAL_TOKENS, PackedRows, build_tokenizer, pack

RECIPE = 3
"""Raise it with any change that makes the same configuration give other chats, tokens or weights."""

MARKER = "demo_target.json"
"""Written last, with the configuration and the result in it; without it the output does not count."""


@dataclass(frozen=True)
class DemoTargetResult:
    """What the training ended with, as the marker file keeps it."""

    num_steps: int
    heldout_loss: float
    heldout_accuracy: float
    seconds: float
    sample_question: str
    sample_answer: str


def read_result(config: DemoTargetConfig) -> DemoTargetResult | None:
    """The finished result for exactly this configuration and this recipe, or None if there is work to do."""
    try:
        marker = json.loads((config.output / MARKER).read_text(encoding="utf-8"))
        result = DemoTargetResult(**marker["result"])
        # A run that kept its step budget is the same whatever the clock allowed.
        is_same_budget = result.num_steps == config.optim.num_steps or marker["max_seconds"] == config.max_seconds
        return result if marker["key"] == _key(config) and is_same_budget else None
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        return None  # a torn or foreign marker means the same as none: make it again


def train_demo_target(config: DemoTargetConfig, console: Console) -> DemoTargetResult:
    """Write the chats, the questions and the trained target below `config.output`.

    Interrupted work leaves no marker and is done again from the start: it is a minute.
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
    heldout = pack(tokenizer, heldout_chats, row_length, num_tokens)
    console.print(
        f"{len(train_chats)} chats to train on, {len(heldout_chats)} held out, {len(questions)} questions; "
        f"vocabulary {len(tokenizer)}"
    )

    num_threads = torch.get_num_threads()
    torch.set_num_threads(config.num_threads)
    try:
        model = build_model(tokenizer, config.model, config.seed)
        num_steps = _train(model, rows, config, console)
        loss, accuracy = evaluate(model, heldout)
        question = str(questions[0]["turns"][0])  # type: ignore[index]
        answer = generate_answer(model, tokenizer, question)
    finally:
        torch.set_num_threads(num_threads)
    _save(model, tokenizer, config.output / "target")
    result = DemoTargetResult(num_steps, loss, accuracy, round(time.monotonic() - began, 1), question, answer)
    _write_marker(config, result)
    return result


def build_model(tokenizer: PreTrainedTokenizerFast, config: DemoModelConfig, seed: int) -> LlamaForCausalLM:
    """An untrained Llama, unmodified, initialised so that few steps take it far."""
    pad, begin, end = (tokenizer.get_vocab()[token] for token in SPECIAL_TOKENS[:3])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                intermediate_size=config.intermediate_size,
                max_position_embeddings=config.max_positions,
                tie_word_embeddings=False,
                pad_token_id=pad,
                bos_token_id=begin,
                eos_token_id=end,
            )
        )
        # Embeddings of unit size keep the layers' early contributions small beside them; a head of zeros
        # starts from the uniform distribution. Both were measured to save steps.
        nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
        nn.init.zeros_(model.lm_head.weight)
        # Larger than the library's 0.02, by which attention would begin uniform and stay so for long.
        for name, matrix in model.model.layers.named_parameters():
            if "self_attn" in name:
                gain = 1.0 if "q_proj" in name or "k_proj" in name else 0.7
                nn.init.normal_(matrix, std=gain * matrix.shape[1] ** -0.5)
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=begin,
        eos_token_id=[end],
        pad_token_id=pad,
    )
    return model


def _train(model: LlamaForCausalLM, rows: PackedRows, config: DemoTargetConfig, console: Console) -> int:
    """Run the step budget, or what fits into `max_seconds` of it; return the number of steps done."""
    optim = config.optim
    optimizers = _optimizers(model, optim)
    began = time.monotonic()
    step, done = 0, 0.0
    model.train()
    with _progress(console) as progress:
        bar = progress.add_task("training the demo target", total=optim.num_steps, loss=float("nan"), speed=0.0)
        while done < 1.0:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * _learning_rate_factor(step, done, optim)
            loss, _ = _loss_and_hits(model, rows.batch(step, optim.rows_per_step))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            seconds = time.monotonic() - began
            # The clock only counts when it is ahead of the steps; until then the run is deterministic.
            done = max(step / optim.num_steps, seconds / config.max_seconds)
            speed = step * optim.rows_per_step * optim.row_length / seconds
            total = step if done >= 1.0 else math.ceil(step / done)
            progress.update(bar, completed=step, total=total, loss=loss.item(), speed=speed)
    if step < optim.num_steps:
        console.print(
            f"[yellow]slow machine:[/] {step} of {optim.num_steps} steps fit into max_seconds={config.max_seconds:g}; "
            "the target is weaker than it should be. Raise max_seconds for the full budget."
        )
    model.eval()
    return step


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, rows: PackedRows) -> tuple[float, float]:
    """Mean loss per response token, and the share of response tokens predicted exactly."""
    losses, hits, count = 0.0, 0, 0
    for index in range(len(rows.tokens)):
        loss, hit = _loss_and_hits(model, rows.batch(index, 1))
        losses, hits, count = losses + loss.item() * len(hit), hits + int(hit.sum()), count + len(hit)
    return losses / count, hits / count


def generate_answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """The greedy answer to one question, at most 128 tokens of it."""
    encoded: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    # The generation mixin's protocol types reject its own models.
    generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    tokens = generate(**encoded, max_new_tokens=128)
    return str(tokenizer.decode(tokens[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True))


def _loss_and_hits(model: LlamaForCausalLM, rows: PackedRows) -> tuple[Float[Tensor, ""], Bool[Tensor, " response"]]:
    """Mean loss over the response tokens, and which of them were predicted.

    Positions that begin again tell the model where the next chat starts; it then masks the others. The
    head runs on the response positions only.
    """
    hidden = model.model(input_ids=rows.tokens, position_ids=rows.positions, use_cache=False).last_hidden_state
    wanted = rows.is_response[:, 1:]  # position i predicts token i + 1
    logits = model.lm_head(hidden[:, :-1][wanted])
    truth = rows.tokens[:, 1:][wanted]
    # A sum over at least one: rows cut down to a long prompt hold no response, and the mean of none is NaN.
    loss = nn.functional.cross_entropy(logits, truth, reduction="sum") / max(1, len(truth))
    return loss, logits.argmax(-1) == truth


def _optimizers(model: LlamaForCausalLM, config: DemoOptimConfig) -> list[torch.optim.Optimizer]:
    layers = list(model.model.layers.parameters())
    matrices = [p for p in layers if p.ndim == 2]
    norms = [p for p in layers if p.ndim == 1] + list(model.model.norm.parameters())
    # "original" scales a step by sqrt(max(1, rows / columns)): the rates of the configuration are meant so.
    muon = torch.optim.Muon(
        matrices,
        lr=config.matrix_lr,
        weight_decay=config.weight_decay,
        momentum=0.95,
        adjust_lr_fn="original",
        ns_steps=3,
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [model.model.embed_tokens.weight], "lr": config.embedding_lr},
            {"params": [model.lm_head.weight], "lr": config.other_lr},
            {"params": norms, "lr": config.other_lr, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
    )
    for group in [*muon.param_groups, *adamw.param_groups]:
        group["initial_lr"] = group["lr"]
    return [muon, adamw]


def _learning_rate_factor(step: int, done: float, config: DemoOptimConfig) -> float:
    """Linear warm-up, a plateau, then a linear fall to zero; `done` is the share of the run behind us."""
    rise = (step + 1) / (config.warmup_steps + 1)
    fall = (1.0 - done) / config.decay_share
    return min(1.0, rise, fall)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:.0f} tokens/s  left"),
        TimeRemainingColumn(),
        console=console,
    )


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)  # a file of an older kind must not survive in it
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
    """What the output depends on: the configuration, less place and clock, and the recipe that reads it."""
    return {"recipe": RECIPE, "config": config.model_dump(mode="json", exclude={"output", "max_seconds"})}
