"""How much faster sequences that are decoded together are with a drafter than without: speed-up at a batch size.

What a drafter is worth falls as the batch grows: a pass over many rows has less to spare for drafted tokens. The
baseline is plain decoding by the same engine, and both sides keep their rows filled from the same prompts in the same
order, prefill included in their time.
"""

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from moray.bench.spread import quartiles
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.engine.kv_cache import GRAIN
from moray.decoding.params import SamplingParams
from moray.decoding.planning.fitting import depth_notice, fit_shape, say_once
from moray.decoding.request import Request
from moray.decoding.session import synchronise
from moray.decoding.stats import Generation, tau
from moray.decoding.together import answer_together
from moray.drafters.base import Drafter
from moray.errors import ConfigError, DataError
from moray.targets.model import Target
from moray.trees.shapes import AnyShape

_WARM_UP_TOKENS = 8
_DRAFTING = ("propose", "observe", "tell")
"""Phases; what the drafter is told counts for the draft that needs it."""
_CYCLE = (*_DRAFTING, "verify", "accept", "commit")


@dataclass
class _Answers:
    """What one way of decoding did with all prompts."""

    tokens: list[list[int]]
    num_passes: int
    """Target passes after the prefill."""
    generations: list[Generation] = field(default_factory=list)
    """Of the drafted side."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase of all cycles."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


_Decode = Callable[[Sequence[list[int]], int], _Answers]
"""decode(prompts, max_new_tokens): all answers, `batch` at a time."""


def measure_batch_speedup(
    target: Target,
    drafter: Drafter,
    shape: AnyShape,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    batch: int,
    eos_ids: Collection[int],
    params: SamplingParams,
    *,
    rounds: int = 3,
) -> dict[str, Any]:
    """Decode all prompts plainly, then drafted, `rounds` times in turn, so that the machine's moods hit both alike.

    Towards the end fewer than `batch` sequences run: several times as many prompts keep that end short.

    Args:
        target: what both sides decode with.
        drafter: on the target's device and in its type.
        shape: of the trees.
        prompts: at least `batch`.
        max_new_tokens: most tokens of one answer.
        batch: sequences that run together.
        eos_ids: tokens that end an answer.
        params: greedy, or how tokens are drawn.
        rounds: how often both sides are timed.

    Returns:
        `round_seconds` holds what both sides took in each round, plain first. `speedup_vs_plain` is the median over
        the rounds of the quotient of both sides' tokens per second, and `speedup_quartiles` its 25 % and 75 % points.
        `equal_share` is the part of answers that are the plain ones, None where they need not be (rejection,
        typical). `lossless` is whether all are; None where a difference would prove nothing, as in 16 bits. Even in
        float32 sums depend on a batch's shapes, and a near tie may fall either way: a share just below 1 is that, a
        low one a defect. `rows_per_pass` says how many sequences a pass really had, `draft_share` what part of the
        cycles' time went into drafting (known on a CPU alone).

    Raises:
        ConfigError: the shape does not go with the drafter, or `rounds` or `batch` is below 1.
        DataError: there are fewer prompts than `batch`, or one does not fit into the target's context.
    """
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}; it must be at least 1")
    if len(prompts) < batch:
        raise DataError(f"{len(prompts)} prompts were given for a batch of {batch}; give at least as many")
    capacity = max(map(len, prompts)) + max_new_tokens
    if capacity > target.spec.max_positions:
        raise DataError(
            f"the longest prompt has {capacity - max_new_tokens} tokens; with answers of {max_new_tokens} it does not "
            f"fit into the target's context of {target.spec.max_positions}"
        )
    if batch < 1:
        raise ConfigError(f"batch is {batch}; it must be at least 1")
    name = type(drafter).__name__.lower()
    fitted = fit_shape(shape, name, drafter.max_depth, target.spec.vocab_size)
    say_once(depth_notice(shape, name, fitted))
    drafted, plain = (_side(target, d, shape, capacity, batch, params, eos_ids) for d in (drafter, None))
    for decode in (plain, drafted):  # the first call of anything is slow
        decode(prompts[:batch], min(_WARM_UP_TOKENS, max_new_tokens))
    pairs = [
        (_timed(plain, target, prompts, max_new_tokens), _timed(drafted, target, prompts, max_new_tokens))
        for _ in range(rounds)
    ]
    ratios = [after.tokens_per_second / before.tokens_per_second for before, after in pairs]
    low, median, high = quartiles(ratios)
    generations = [generation for _, after in pairs for generation in after.generations]
    return {
        "batch": batch,
        "num_prompts": len(prompts),
        "num_tokens": sum(map(len, pairs[0][0].tokens)),
        "rounds": rounds,
        "round_seconds": [(before.seconds, after.seconds) for before, after in pairs],
        "plain_tokens_per_second": statistics.median(before.tokens_per_second for before, _ in pairs),
        "drafted_tokens_per_second": statistics.median(after.tokens_per_second for _, after in pairs),
        "speedup_vs_plain": median,
        "speedup_quartiles": (low, high),
        "tau": tau(generations) or None,
        "draft_share": _draft_share([after for _, after in pairs]) if target.device.type == "cpu" else None,
        "rows_per_pass": {"plain": _rows_per_pass(pairs[0][0]), "drafted": _rows_per_pass(pairs[0][1])},
    } | _comparison(pairs, target, params)


def _comparison(pairs: Sequence[tuple[_Answers, _Answers]], target: Target, params: SamplingParams) -> dict[str, Any]:
    """How many of the drafted answers are the plain ones, over all rounds."""
    if not (params.is_greedy or params.acceptance_method == "gumbel_coupled"):
        return {"lossless": None, "equal_share": None}
    equal = [a == b for before, after in pairs for a, b in zip(before.tokens, after.tokens, strict=True)]
    is_exact = str(target.dtype) == "torch.float32"
    return {"lossless": all(equal) or (False if is_exact else None), "equal_share": sum(equal) / len(equal)}


def _timed(decode: _Decode, target: Target, prompts: Sequence[list[int]], max_new_tokens: int) -> _Answers:
    synchronise(target.device)
    begin = time.perf_counter()
    answers = decode(prompts, max_new_tokens)
    synchronise(target.device)
    answers.seconds = time.perf_counter() - begin
    return answers


def _draft_share(answers: Sequence[_Answers]) -> float | None:
    """What part of the cycles' time went into drafting."""
    spent = sum(each.phases.get(phase, 0.0) for each in answers for phase in _CYCLE)
    return sum(each.phases.get(phase, 0.0) for each in answers for phase in _DRAFTING) / spent if spent else None


def _rows_per_pass(answers: _Answers) -> float | None:
    """Sequences per target pass: a plain one gets one token of each, the first of an answer comes from its prefill."""
    cycles = sum(g.num_cycles for g in answers.generations) or sum(len(tokens) - 1 for tokens in answers.tokens)
    return cycles / answers.num_passes if answers.num_passes else None


# --- Both sides ---


def _side(
    target: Target,
    drafter: Drafter | None,
    shape: AnyShape,
    capacity: int,
    batch: int,
    params: SamplingParams,
    eos_ids: Collection[int],
) -> _Decode:
    """Drafted, or plain without a drafter."""
    width = -(-(capacity + shape.num_nodes + 1) // GRAIN) * GRAIN
    config = EngineConfig(
        max_num_seqs=batch, kv_cache_tokens=batch * width, max_model_len=capacity, tree=shape, batch_admissions=True
    )
    drafts = {} if drafter is None else {"drafter": LocalDrafts(drafter, capacity, shape.num_expanded)}
    engine = Engine(target, config, eos_ids, drafts=drafts)
    engine.calibrate({} if drafter is None else {"drafter": drafter})

    def together(prompts: Sequence[list[int]], most: int) -> _Answers:
        before, spent = engine.stats.num_passes, dict(engine.stats.seconds)
        made = answer_together(
            engine,
            [
                Request(prompt=tuple(prompt), params=params, max_new_tokens=most, sequence=index)
                for index, prompt in enumerate(prompts)
            ],
        )
        phases = {phase: seconds - spent[phase] for phase, seconds in engine.stats.seconds.items()}
        return _Answers([g.tokens for g in made], engine.stats.num_passes - before, made if drafts else [], phases)

    return together
