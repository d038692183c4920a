"""Compares simulated tau, estimated by a drafter's training pass, with real tau, measured by decoding.

The target answers held-out prompts greedily with the drafter's help, which gives the real tau. On exactly these answers
the drafter's training pass then predicts every token from 1 to `depth` steps after the last verified one:

    answer      a0  a1  a2  a3  a4  a5  a6
    verified     x   .   .   x   .   .   x      depth 2, first of three phases
    steps            1   2       1   2          the other two phases shift this by one

Each position thus counts once per step, as in decoding, where any token may be the last verified one. The simulated
tau 1 + a_1 + a_1 a_2 + ... is then wrong only where training differs from decoding: acceptances may depend on each
other, and drafts continue from drafted states. This module does not depend on Ray.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from moray.batch import Taps, TrainBatch
from moray.bench.validation_config import ValidationConfig
from moray.data.ultrachat import BadRow, ChatsConfig, plan_chunks, read_chunk
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.decoding.generation import Generation, acceptance_by_position, tau
from moray.decoding.observed import taps_of_text
from moray.decoding.params import SamplingParams
from moray.distill.configs import LossConfig
from moray.distill.losses import LossSums, distillation_loss, simulated_tau
from moray.distill.masks import draw_view, loss_positions, verified_start
from moray.drafters.base import Drafter
from moray.drafters.learner import DraftView
from moray.errors import ConfigError, DataError
from moray.targets.model import Target
from moray.text import ChatTokenizer, Message
from moray.trees.shapes import ChainShape


def read_prompts(config: ValidationConfig) -> list[list[Message]]:
    """Read the first prompts of the held-out chats (the messages before the first answer), in the file's order.

    Raises:
        ConfigError: the file does not exist.
        DataError: no chat has a question before an answer.
    """
    prompts: list[list[Message]] = []
    try:
        chunks = plan_chunks(ChatsConfig(path=config.chats))
    except ConfigError as error:  # its message names chats.path
        raise ConfigError(f"validation.chats: {error}") from None
    for chunk in chunks:
        for chat in read_chunk(chunk):
            if isinstance(chat, BadRow):
                continue
            answers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
            if answers and answers[0]:
                prompts.append(chat.messages[: answers[0]])
            if len(prompts) == config.max_chats:
                return prompts
    if not prompts:
        raise DataError(f"validation.chats '{config.chats}' holds no chat with a question and an answer; give others")
    return prompts


class Validator:
    """Validates any drafter of one target on the held-out prompts."""

    def __init__(self, target: Target, tokenizer: ChatTokenizer, config: ValidationConfig) -> None:
        """
        Raises:
            DataError: no prompt fits into the target's context.
        """
        most = target.spec.max_positions
        prompts = [tokenizer.encode_prompt(messages) for messages in read_prompts(config)]
        self._prompts = [prompt for prompt in prompts if len(prompt) + 2 < most]
        if not self._prompts:
            raise DataError(
                f"no prompt of validation.chats '{config.chats}' fits into the context of {most} tokens; give others"
            )
        self._target = target
        self._config = config
        self._eos_ids = frozenset(target.eos_ids) | frozenset(tokenizer.eos_ids)
        self._max_model_len = min(most, max(map(len, self._prompts)) + config.max_new_tokens)

    @torch.inference_mode()
    def validate(self, drafter: Drafter, losses: LossConfig) -> dict[str, float]:
        """Measure a drafter, which must have the target's precision. Returns these figures:

        real_tau, acceptance_step_k     from decoding
        simulated_tau, accuracy_step_k  from the training pass on the same answers
        tau_gap                         simulated - real
        loss                            of the training pass, with views drawn as in training
        chats, answer_tokens            how much was decoded

        Raises:
            DataError: every answer ended at its first token.
        """
        config, losses = self._config, losses.for_validation()
        depth, period = min(config.depth, drafter.max_depth or config.depth), drafter.config.verified_period
        shape = ChainShape(type="chain", depth=depth)
        runner = runner_for(self._target, self._max_model_len, shape.num_nodes)
        decoder = SpeculativeDecoder(self._target, drafter, shape, self._max_model_len, runner)
        generations: list[Generation] = []
        drawn: list[LossSums] = []
        stepped: list[LossSums] = []
        for number, prompt in enumerate(self._prompts):
            answer = decoder.generate(prompt, SamplingParams(), config.max_new_tokens, self._eos_ids)
            generations.append(answer)
            batch = _batch(runner, [*prompt, *answer.tokens], len(prompt), drafter)
            view = draw_view(batch, period, 0.0, torch.Generator().manual_seed(number), drafter.config.layer_counts)
            drawn.append(distillation_loss(drafter(batch, view), batch, loss_positions(batch), drafter, losses))
            if period is None:
                stepped.append(drawn[-1])
            else:
                repeated, view, positions = _every_step(batch, depth)
                stepped.append(distillation_loss(drafter(repeated, view), repeated, positions, drafter, losses))
        if not any(generation.num_cycles for generation in generations):
            raise DataError(f"every answer to validation.chats '{config.chats}' is one token long; give other chats")
        real, accuracy = tau(generations), _accuracy_by_step(stepped, depth)
        simulated = simulated_tau(accuracy)
        count = sum(int(sums.count) for sums in drawn)
        figures = {
            "chats": len(generations),
            "answer_tokens": sum(len(generation.tokens) for generation in generations),
            "loss": sum(float(sums.total) for sums in drawn) / max(1, count),
            "real_tau": real,
            "simulated_tau": simulated,
            "tau_gap": simulated - real,
        }
        by_step = {"acceptance": acceptance_by_position(generations), "accuracy": accuracy}
        return figures | {
            f"{name}_step_{i + 1}": rate for name, rates in by_step.items() for i, rate in enumerate(rates)
        }


def _batch(runner: TargetRunner, ids: list[int], num_prompt: int, drafter: Drafter) -> TrainBatch:
    """Make a training batch of one from a prompt with its answer; one more target pass over them provides the taps."""
    pieces = [taps for _, taps in taps_of_text(runner, ids, drafter.needs)]
    kv = [piece.kv for piece in pieces if piece.kv is not None]
    hidden = {depth: torch.cat([piece.hidden[depth] for piece in pieces], dim=1) for depth in pieces[0].hidden}
    tokens = runner.to_device([ids])
    response = torch.arange(len(ids), device=tokens.device)[None] >= num_prompt
    lengths = torch.tensor([len(ids)], device=tokens.device)
    return TrainBatch(tokens, response, lengths, Taps(torch.cat(kv, dim=1) if kv else None, hidden))


def _every_step(batch: TrainBatch, depth: int) -> tuple[TrainBatch, DraftView, Bool[Tensor, "phases seq"]]:
    """Repeat a batch of one `depth` + 1 times, verified every `depth` + 1 tokens, one row per phase.

    Returns the batch, its view and the positions that count. Drafts from the end of the prompt appear in all phases
    but one; they count only in the phase that has them in full length.
    """
    period, device = depth + 1, batch.tokens.device
    taps = batch.taps
    kv = None if taps.kv is None else taps.kv.expand(period, -1, -1, -1)
    repeated = replace(
        batch,
        tokens=batch.tokens.expand(period, -1),
        response_mask=batch.response_mask.expand(period, -1),
        lengths=batch.lengths.expand(period),
        taps=Taps(kv, {key: hidden.expand(period, -1, -1) for key, hidden in taps.hidden.items()}),
    )
    phases = torch.arange(period, device=device)
    start = verified_start(repeated.response_mask, torch.full_like(phases, period), phases)
    from_prompt = ~repeated.response_mask.gather(1, start)
    positions = loss_positions(repeated) & (~from_prompt | (phases == 1)[:, None])
    return repeated, DraftView(start, torch.zeros(period, dtype=torch.bool, device=device)), positions


def _accuracy_by_step(sums: Sequence[LossSums], depth: int) -> list[float]:
    """Accuracy of steps 1..depth. A step without a training signal gets the accuracy of the last step that has one;
    for example, an EAGLE chain is trained only on its first step."""
    correct = torch.stack([each.correct_by_step for each in sums]).sum(dim=0).tolist()
    counts = torch.stack([each.count_by_step for each in sums]).sum(dim=0).tolist()
    known = [right / count for right, count in zip(correct, counts, strict=True) if count][:depth]
    return known + known[-1:] * (depth - len(known))
