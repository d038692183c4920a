"""The demo target's training loop: Muon and AdamW over packed chats, on one process or several.

Each process trains on its share of every step's rows with one thread; DistributedDataParallel averages the gradients.
Matrices this small gain nothing from a second thread. Ray Train would do the same, but half the time that the second
process saves would be spent on starting workers.
"""

import math
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from jaxtyping import Bool, Float
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from moray.progress import Progress
from moray.targets.demo.config import DemoModelConfig, DemoOptimConfig, DemoTargetConfig
from moray.targets.demo.data import SPECIAL_TOKENS, PackedRows

_INTERFACE = "GLOO_SOCKET_IFNAME"


def fit(
    tokenizer: PreTrainedTokenizerFast, rows: PackedRows, config: DemoTargetConfig, console: Console
) -> tuple[LlamaForCausalLM, int]:
    """Train a new model on `config.num_processes` processes, including this one.

    Returns:
        The model in eval mode, and the number of steps made: fewer than requested if time ran out.
    """
    with _helpers(tokenizer, rows, config):
        model, num_steps = _train(tokenizer, rows, config, console)
    if num_steps < config.optim.num_steps:
        console.print(
            f"[yellow]slow machine:[/] {num_steps} of {config.optim.num_steps} steps fit into "
            f"max_seconds={config.max_seconds:g}; the target is weaker than it should be. Raise max_seconds for the "
            "full budget."
        )
    return model.eval(), num_steps


@contextmanager
def _helpers(tokenizer: PreTrainedTokenizerFast, rows: PackedRows, config: DemoTargetConfig) -> Iterator[None]:
    """Run the other processes for the duration of the block; none if there is only one process."""
    if config.num_processes == 1:
        yield
        return
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        helpers = [
            context.Process(target=_help, args=(rank, folder, tokenizer, rows, config), daemon=True)
            for rank in range(1, config.num_processes)
        ]
        for helper in helpers:
            helper.start()
        try:
            with _process_group(0, folder, config.num_processes):
                yield
        finally:
            for helper in helpers:
                helper.join(timeout=10)
                helper.kill()  # still alive only if it hangs


def _help(
    rank: int, folder: str, tokenizer: PreTrainedTokenizerFast, rows: PackedRows, config: DemoTargetConfig
) -> None:
    """The other processes: the same steps on their own rows, silently."""
    torch.set_num_threads(1)
    with _process_group(rank, folder, config.num_processes):
        _train(tokenizer, rows, config, Console(quiet=True))


@contextmanager
def _process_group(rank: int, folder: str, size: int) -> Iterator[None]:
    """Join the other processes over the loopback interface."""
    interface = os.environ.get(_INTERFACE)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ[_INTERFACE] = loopback
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    finally:  # processes started later inherit the environment
        os.environ.pop(_INTERFACE, None)
        if interface is not None:
            os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        dist.destroy_process_group()


def _train(
    tokenizer: PreTrainedTokenizerFast, rows: PackedRows, config: DemoTargetConfig, console: Console
) -> tuple[LlamaForCausalLM, int]:
    """Run the training steps, or as many of them as fit into `max_seconds`."""
    optim = config.optim
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = build_model(tokenizer, config.model, config.seed)
    objective: nn.Module = ResponseLoss(model)
    if size > 1:
        objective = nn.parallel.DistributedDataParallel(objective, forward_sync_buffers=False)
    optimizers = _optimizers(model, optim, size > 1)
    began = time.monotonic()
    step, done = 0, 0.0
    model.train()
    with Progress("training the demo target", optim.num_steps, unit="steps", console=console) as progress:
        while done < 1.0:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * _learning_rate_factor(step, done, optim)
            batch = rows.batch(step, optim.rows_per_step).share(rank, size)
            loss, num_tokens, seconds = _step(objective, batch, time.monotonic() - began, size)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            # The clock counts only if it is ahead of the steps; until then the run is deterministic.
            done = max(step / optim.num_steps, seconds / config.max_seconds)
            speed = step * optim.rows_per_step * optim.row_length / seconds
            total = step if done >= 1.0 else math.ceil(step / done)
            progress.update(done=step, total=total, note=f"loss {loss / num_tokens:.3f}  {speed:,.0f} tokens/s")
    return model, step


def _step(objective: nn.Module, batch: PackedRows, seconds: float, size: int) -> tuple[float, float, float]:
    """Compute gradients of the mean loss over all processes' response tokens.

    Returns:
        Summed loss, number of response tokens, and the first process's clock; the same on all processes.
    """
    loss, hits = objective(batch)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    shared = torch.tensor([loss.item(), len(hits), seconds if is_first else 0.0], dtype=torch.float64)
    if size > 1:
        dist.all_reduce(shared)
    total, count, clock = shared.tolist()
    # At least 1: rows cut within a long prompt hold no response. `size` undoes DDP's averaging.
    (loss * (size / max(1.0, count))).backward()
    return total, max(1.0, count), clock


class ResponseLoss(nn.Module):
    """Cross-entropy summed over response tokens, and which of them were predicted correctly.

    Positions that start again at zero tell the model where the next chat begins; it then masks the chats before. The
    head runs on the response positions only.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: PackedRows) -> tuple[Float[Tensor, ""], Bool[Tensor, " response"]]:
        model = self.model
        hidden = model.model(input_ids=rows.tokens, position_ids=rows.positions, use_cache=False).last_hidden_state
        wanted = rows.is_response[:, 1:]  # position i predicts token i + 1
        logits = model.lm_head(hidden[:, :-1][wanted])
        truth = rows.tokens[:, 1:][wanted]
        return nn.functional.cross_entropy(logits, truth, reduction="sum"), logits.argmax(-1) == truth


def build_model(tokenizer: PreTrainedTokenizerFast, config: DemoModelConfig, seed: int) -> LlamaForCausalLM:
    """An untrained, unmodified Llama, initialised so that few steps suffice."""
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
        # Embeddings of unit size keep the layers' early contributions comparatively small; a head of zeros
        # starts from the uniform distribution. Both were measured to save steps.
        nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
        nn.init.zeros_(model.lm_head.weight)
        # Larger than the library's 0.02, with which attention would start uniform and stay so for a long time.
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


def _optimizers(model: LlamaForCausalLM, config: DemoOptimConfig, is_shared: bool) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, with each process updating its share of them; AdamW for the rest."""
    layers = list(model.model.layers.parameters())
    matrices = [p for p in layers if p.ndim == 2]
    norms = [p for p in layers if p.ndim == 1] + list(model.model.norm.parameters())
    # "original" scales a step by sqrt(max(1, rows / columns)); the configured rates assume that.
    muon_options: dict[str, Any] = {
        "lr": config.matrix_lr,
        "weight_decay": config.weight_decay,
        "momentum": 0.95,
        "adjust_lr_fn": "original",
    }
    muon: torch.optim.Optimizer
    if is_shared:
        muon = ZeroRedundancyOptimizer(matrices, torch.optim.Muon, parameters_as_bucket_view=True, **muon_options)
    else:
        muon = torch.optim.Muon(matrices, **muon_options)
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
    """Linear warm-up, a plateau, then a linear fall to zero; `done` is the finished share of the run."""
    rise = (step + 1) / (config.warmup_steps + 1)
    fall = (1.0 - done) / config.decay_share
    return min(1.0, rise, fall)
