"""Many prompts through one engine, when no client waits for a single answer: for making data, and for measuring."""

from collections.abc import Sequence

from moray.decoding.engine.engine import Engine
from moray.decoding.generation import Generation
from moray.decoding.request import Request


def answer_batch(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """Answer requests, as many at a time as the engine takes; the first token of each comes from its prefill.

    Each generation records only its drafts; times and phases are known for all together (see `Engine.stats`).
    """
    generations = [Generation([]) for _ in requests]
    number_of = {engine.submit(request): index for index, request in enumerate(requests)}
    while engine.is_busy:
        for update in engine.step():
            generations[number_of[update.number]].add(update)
    return generations
