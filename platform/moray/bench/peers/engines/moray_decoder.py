"""Moray itself: plain decoding, and drafters with adaptive depth."""

import logging
from pathlib import Path

import torch

from moray.bench.peers.answering import Answer, Drafted, PeerRow, Prepare, Settings, answer_from
from moray.config import validate
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.decoding.params import SamplingParams
from moray.drafters.configs import NgramConfig
from moray.drafters.loading import build_drafters
from moray.provenance import git_state
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer
from moray.trees.shapes import AdaptiveShape, ChainShape


def load(settings: Settings) -> tuple[str, Prepare]:
    """Load one target and one KV cache that all rows share, because they take turns."""
    torch.set_num_threads(settings.threads)
    values = {"model": settings.model, "dtype": settings.dtype, "template": settings.template}
    target = Target.load(validate(TargetConfig, values))
    tokenizer = ChatTokenizer.load(settings.model, settings.template)
    runner = runner_for(target, settings.max_length, max(row.depth for row in settings.rows))

    def prepare(row: PeerRow) -> Answer:
        decoder = _decoder(row, target, tokenizer, settings.max_length, runner)

        def answer(prompt: list[int], max_new_tokens: int) -> list[int] | Drafted:
            found = decoder.generate(prompt, SamplingParams(), max_new_tokens, settings.eos_ids)
            if row.drafter is None:
                return found.tokens
            # Passes that verified a draft, as the other engines count them.
            accepted = [kept for kept, drafted in zip(found.accepted, found.drafted, strict=True) if drafted]
            return Drafted(found.tokens, len(accepted), sum(accepted))

        return answer

    return _version(), prepare


def _decoder(
    row: PeerRow, target: Target, tokenizer: ChatTokenizer, max_model_len: int, runner: TargetRunner
) -> SpeculativeDecoder:
    if row.drafter is None:
        return SpeculativeDecoder(target, None, max_model_len=max_model_len, runner=runner)
    entry = NgramConfig(type="ngram") if row.drafter == "prompt-lookup" else row.drafter
    (drafter,) = build_drafters((entry,), lambda num_layers: TargetHead.of(target, num_layers), tokenizer).values()
    chain = ChainShape(type="chain", depth=row.depth)
    shape = AdaptiveShape(type="adaptive", depth=row.depth) if row.adaptive else chain
    return SpeculativeDecoder(target, drafter, shape, max_model_len, runner)


def _version() -> str:
    state = git_state(Path(__file__))
    return "as installed" if state is None else f"commit {state['sha'][:7]}{' (changed)' if state['dirty'] else ''}"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # the log says which kernels were chosen
    answer_from(load)
