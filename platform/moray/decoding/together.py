"""Many prompts through one engine, where nobody waits for a single answer: for making data, and for measuring."""

from collections.abc import Sequence

from moray.decoding.engine.engine import Engine
from moray.decoding.request import Request
from moray.decoding.stats import Generation


def answer_together(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """Answer requests, as many at a time as the engine takes; the first token of each comes from its prefill.

    What is known of a single one is what became of its drafts: time and phases are those of all (see `Engine.stats`).
    """
    generations = [Generation([]) for _ in requests]
    number_of = {engine.submit(request): index for index, request in enumerate(requests)}
    while engine.is_busy:
        for update in engine.step():
            generations[number_of[update.number]].add(update)
    return generations
