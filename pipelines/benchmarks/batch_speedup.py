"""Speed-up of a drafter at a batch size: both sides decode the same prompts with the same engine, one of them plainly.

The speed-up falls as the batch grows, because a pass over many sequences leaves less idle compute for drafted tokens.
Times include prefill.
"""

import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moray.bench.spread import quartiles
from moray.decoding.batch import answer_batch
from moray.decoding.device import synchronise
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.engine.kv_cache import GRAIN
from moray.decoding.generation import Generation, tau
from moray.decoding.params import SamplingParams
from moray.decoding.planning.fitting import say_once
from moray.decoding.request import Request
from moray.drafters.base import Drafter
from moray.errors import ConfigError, DataError
from moray.targets.model import Target
from moray.trees.shapes import AnyShape

_WARM_UP_TOKENS = 8
_DRAFTING_PHASES = ("propose", "observe", "prefill_drafter")
_CYCLE_PHASES = (*_DRAFTING_PHASES, "verify", "accept", "commit")


@dataclass(frozen=True)
class BatchSpeedup:
    """Both sides at one batch size."""

    batch: int
    """Sequences that run together."""
    num_prompts: int
    num_tokens: int
    """Tokens of all plain answers of one round."""
    rounds: int
    round_seconds: list[tuple[float, float]]
    """(plain, drafted) seconds of every round."""
    plain_tokens_per_second: float
    """Median over the rounds."""
    drafted_tokens_per_second: float
    """Median over the rounds."""
    speedup_vs_plain: float
    """Median over the rounds of the ratio of both sides' tokens per second."""
    speedup_quartiles: tuple[float, float]
    """25 % and 75 % points of that ratio."""
    tau: float | None
    draft_share: float | None
    """Share of the cycles' time that drafting takes; None on a GPU, whose phases are not timed."""
    rows_per_pass: dict[str, float | None]
    """Mean number of sequences in a target pass, by side."""
    lossless: bool | None
    """Whether all answers are equal; None where a difference proves nothing, as in 16-bit formats."""
    equal_share: float | None
    """Share of the answers that equal the plain ones; None with an acceptance method whose answers may differ. Sums in
    float32 depend on a batch's shape, so a near tie may turn: a share just below 1 is that, a low one is a defect."""


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
) -> BatchSpeedup:
    """Decode all prompts plainly, then with drafts, and repeat this `rounds` times.

    The sides take turns so that a slow spell of the machine slows both.

    At the end of a round fewer than `batch` sequences run. Give several times as many prompts to keep that end short.

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

    Raises:
        ConfigError: the drafter cannot draft this shape, or `rounds` or `batch` is below 1.
        DataError: there are fewer prompts than `batch`, or one does not fit into the target's context.
    """
    _check(prompts, max_new_tokens, batch, rounds, target)
    config = _engine_config(shape, max(map(len, prompts)) + max_new_tokens, batch)
    plain = _Side(Engine(target, config, eos_ids), params)
    drafted = _Side(_drafting_engine(target, drafter, config, eos_ids), params)
    for side in (plain, drafted):  # the first call of anything is slow
        side.decode(prompts[:batch], min(_WARM_UP_TOKENS, max_new_tokens))
    timed = [
        _Round(plain.decode(prompts, max_new_tokens), drafted.decode(prompts, max_new_tokens)) for _ in range(rounds)
    ]
    return _figures(timed, batch, target, params)


@dataclass(frozen=True)
class _Decoded:
    """All prompts, decoded once by one side."""

    answers: list[Generation]
    num_passes: int
    """Target passes after the prefill."""
    phases: dict[str, float]
    """Seconds of all cycles, by phase."""
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def rows_per_pass(self) -> float | None:
        """Mean number of sequences in a target pass."""
        return sum(answer.num_cycles for answer in self.answers) / self.num_passes if self.num_passes else None


class _Round(NamedTuple):
    """Both sides, one after the other."""

    plain: _Decoded
    drafted: _Decoded

    @property
    def speedup(self) -> float:
        return self.drafted.tokens_per_second / self.plain.tokens_per_second


class _Side:
    """An engine, and how it draws tokens."""

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self.engine = engine
        self._params = params

    def decode(self, prompts: Sequence[list[int]], max_new_tokens: int) -> _Decoded:
        """Answer all prompts, as many at a time as the engine takes."""
        requests = [
            Request(prompt=tuple(prompt), params=self._params, max_new_tokens=max_new_tokens, sequence=index)
            for index, prompt in enumerate(prompts)
        ]
        stats, device = self.engine.stats, self.engine.target.device
        passes_before, seconds_before = stats.num_passes, dict(stats.seconds)
        synchronise(device)
        begin = time.perf_counter()
        answers = answer_batch(self.engine, requests)
        synchronise(device)
        seconds = time.perf_counter() - begin
        phases = {phase: spent - seconds_before[phase] for phase, spent in stats.seconds.items()}
        return _Decoded(answers, stats.num_passes - passes_before, phases, seconds)


def _check(prompts: Sequence[list[int]], max_new_tokens: int, batch: int, rounds: int, target: Target) -> None:
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}; it must be at least 1")
    if batch < 1:
        raise ConfigError(f"batch is {batch}; it must be at least 1")
    if len(prompts) < batch:
        raise DataError(f"{len(prompts)} prompts were given for a batch of {batch}; give at least as many")
    longest = max(map(len, prompts))
    if longest + max_new_tokens > target.spec.max_positions:
        raise DataError(
            f"the longest prompt has {longest} tokens; with answers of {max_new_tokens} it does not fit into the "
            f"target's context of {target.spec.max_positions}"
        )


def _engine_config(shape: AnyShape, max_model_len: int, batch: int) -> EngineConfig:
    """An engine with room for `batch` sequences of `max_model_len` tokens and a tree each."""
    slots = -(-(max_model_len + shape.num_nodes + 1) // GRAIN) * GRAIN
    return EngineConfig(
        max_num_seqs=batch,
        kv_cache_tokens=batch * slots,
        max_model_len=max_model_len,
        tree=shape,
        batch_admissions=True,
    )


def _drafting_engine(target: Target, drafter: Drafter, config: EngineConfig, eos_ids: Collection[int]) -> Engine:
    """An engine whose drafts come from this process, with its costs measured."""
    assert config.max_model_len is not None
    drafts = LocalDrafts(drafter, config.max_model_len, config.tree.num_expanded)
    name = type(drafter).__name__.lower()
    engine = Engine(target, config, eos_ids, drafts={name: drafts})
    say_once(engine.draft_schedulers[name].notices)
    engine.measure_costs({name: drafter})
    return engine


def _figures(timed: Sequence[_Round], batch: int, target: Target, params: SamplingParams) -> BatchSpeedup:
    """The figures of all rounds."""
    first = timed[0]
    low, median, high = quartiles([each.speedup for each in timed])
    equal_share = _equal_share(timed, params)
    return BatchSpeedup(
        batch=batch,
        num_prompts=len(first.plain.answers),
        num_tokens=first.plain.num_tokens,
        rounds=len(timed),
        round_seconds=[(each.plain.seconds, each.drafted.seconds) for each in timed],
        plain_tokens_per_second=statistics.median(each.plain.tokens_per_second for each in timed),
        drafted_tokens_per_second=statistics.median(each.drafted.tokens_per_second for each in timed),
        speedup_vs_plain=median,
        speedup_quartiles=(low, high),
        tau=tau([answer for each in timed for answer in each.drafted.answers]) or None,
        draft_share=_draft_share([each.drafted for each in timed]) if target.device.type == "cpu" else None,
        rows_per_pass={"plain": first.plain.rows_per_pass, "drafted": first.drafted.rows_per_pass},
        lossless=_lossless(equal_share, target),
        equal_share=equal_share,
    )


def _equal_share(timed: Sequence[_Round], params: SamplingParams) -> float | None:
    """Share of the drafted answers that equal the plain ones, over all rounds; None if they may differ."""
    if not (params.is_greedy or params.acceptance_method == "gumbel_coupled"):
        return None
    equal = [
        plain.tokens == drafted.tokens
        for each in timed
        for plain, drafted in zip(each.plain.answers, each.drafted.answers, strict=True)
    ]
    return sum(equal) / len(equal)


def _lossless(equal_share: float | None, target: Target) -> bool | None:
    """Whether all answers are equal; None where a difference proves nothing."""
    if equal_share == 1.0:
        return True
    is_exact = str(target.dtype) == "torch.float32"
    return False if is_exact and equal_share is not None else None


def _draft_share(decoded: Sequence[_Decoded]) -> float | None:
    """Share of the cycles' time that drafting takes."""

    def seconds(phases: Sequence[str]) -> float:
        return sum(each.phases.get(phase, 0.0) for each in decoded for phase in phases)

    whole = seconds(_CYCLE_PHASES)
    return seconds(_DRAFTING_PHASES) / whole if whole else None
