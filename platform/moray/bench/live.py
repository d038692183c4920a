"""Decode one answer live in the terminal, with accepted draft tokens and the target's own tokens in two colours."""

import torch
from rich.console import Console
from rich.text import Text

from moray.bench.configs import LiveConfig
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.generation import tau
from moray.decoding.planning.fitting import depth_notice, say_once
from moray.drafters.loading import load_drafters
from moray.targets.model import Target
from moray.text import ChatTokenizer

ACCEPTED, CORRECTED = "green", "bold yellow"


def show_live(config: LiveConfig, console: Console) -> None:
    """Decode `config.prompt` and print every token as it is emitted."""
    torch.set_num_threads(1)
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    target = Target.load(config.target)
    drafter = next(iter(load_drafters((config.drafter,), target, tokenizer).values()))
    decoder = SpeculativeDecoder(target, drafter, config.tree, target.spec.max_positions)
    say_once(depth_notice(config.tree, type(drafter).__name__.lower(), decoder.shape))
    prompt = tokenizer.encode_prompt([{"role": "user", "content": config.prompt}])
    shown: list[int] = []

    def show(tokens: list[int], accepted: int) -> None:
        for index, token in enumerate(tokens):
            before = tokenizer.decode(shown)
            shown.append(token)
            # Decoding the whole answer each time gets multi-token characters and leading spaces right.
            style = ACCEPTED if index < accepted else CORRECTED
            console.print(Text(tokenizer.decode(shown)[len(before) :], style), end="")

    console.print(Text.assemble("user: ", config.prompt))
    eos_ids = frozenset(target.eos_ids) | frozenset(tokenizer.eos_ids)
    generation = decoder.generate(prompt, config.sampling, config.max_new_tokens, eos_ids, show)
    num_accepted = sum(map(min, generation.accepted, generation.emitted))
    console.print()
    console.print(
        Text.assemble(
            (f"{num_accepted} drafted and accepted", ACCEPTED),
            ", ",
            (f"{len(generation.tokens) - num_accepted} from the target", CORRECTED),
            f": {len(generation.tokens)} tokens in {generation.num_cycles} target passes, tau {tau([generation]):.2f}",
        )
    )
