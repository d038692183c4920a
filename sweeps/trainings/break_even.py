"""The tau at which each trial's drafts would pay, measured before anything trains.

What a draft costs depends on the sizes of a drafter, not on its weights ("Decoding Speculative Decoding", arXiv
2402.01528), so drafters with random weights are timed beside plain decoding while the machine is otherwise idle:

    tau to break even = seconds of a cycle with drafts / seconds of a plain one

Hardly any random draft is accepted, so the drafter reads about one verified token per cycle. It is a lower bound for
drafters that read more of them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moray.cluster.errors import own_errors
from moray.cluster.training.configs import DistillConfig
from moray.provenance import read_json, write_json_atomically
from sweeps.trainings.configs import SweepConfig
from sweeps.tuning.spaces import Choices

if TYPE_CHECKING:
    from moray.bench.plan.cycles import Cycle

BREAK_EVEN_FILE = "break_even.json"
_ROUNDS = 2
_CYCLES = 12
"""Cycles of each drafter in each round."""


def break_even_of(sweep: SweepConfig, config: DistillConfig) -> float:
    """The tau to break even of a trial's drafter, as `store_break_even` has written it."""
    return read_json(Path(sweep.output) / BREAK_EVEN_FILE)[drafter_key(config)]


def store_break_even(sweep: SweepConfig, points: Sequence[Choices], gpus: float) -> None:
    """Measure every drafter of these trials that has not been measured yet. Requires a Ray session.

    Args:
        sweep: the sweep, with an absolute output.
        points: choices of all trials.
        gpus: number of GPUs to measure with.
    """
    import ray

    path = Path(sweep.output) / BREAK_EVEN_FILE
    known: dict[str, float] = read_json(path) if path.is_file() else {}
    wanted = {drafter_key(config): config for config in map(sweep.trial, points)}
    missing = [config.model_dump_json() for key, config in wanted.items() if key not in known]
    if not missing:
        return
    task: Any = ray.remote(measure_break_even).options(num_cpus=sweep.decoding.cpus, num_gpus=gpus)
    with own_errors():
        found: Any = ray.get(task.remote(sweep.model_dump_json(), missing, gpus))
    write_json_atomically(path, known | found)


def measure_break_even(sweep_json: str, configs: Sequence[str], gpus: float) -> Mapping[str, float]:
    """Time cycles of these distillations' drafters, with random weights, and of plain decoding, in turns.

    Args:
        sweep_json: the sweep, as JSON.
        configs: a distillation for each drafter, as JSON.
        gpus: number of GPUs; 0 measures on the CPU.

    Returns:
        Tau to break even by `drafter_key`.

    Raises:
        DataError: the target's context is too short for the cycles.
    """
    from moray.bench.loading import first_prompts, load_target
    from moray.bench.plan.cycles import time_cycles, trimmed_mean
    from moray.decoding.params import SamplingParams
    from moray.drafters.loading import build_untrained_drafter

    sweep = SweepConfig.model_validate_json(sweep_json)
    trials = [DistillConfig.model_validate_json(text) for text in configs]
    decoding = sweep.decoding
    device = "cuda" if gpus else "cpu"  # overrides the target's setting, because other GPUs are for the workers
    target_config = trials[0].target.model_copy(update={"device": device})
    questions, tokenizer, target = load_target(decoding.evaluation(target_config, ("untrained",)))
    max_model_len = min(decoding.max_model_len, target.spec.max_positions)
    texts = first_prompts(questions, tokenizer, max_model_len - decoding.max_new_tokens, decoding.questions)
    prompts = [texts[number % len(texts)] for number in range(decoding.batch_size)]
    plain: list[Cycle] = []
    drafted: dict[str, list[Cycle]] = {drafter_key(config): [] for config in trials}
    for _ in range(_ROUNDS):
        plain += time_cycles(target, None, None, prompts, SamplingParams(), _CYCLES)
        for config in trials:
            drafter = build_untrained_drafter(config.drafter, target)
            drafted[drafter_key(config)] += time_cycles(
                target, drafter, decoding.tree, prompts, SamplingParams(), _CYCLES
            )
    seconds = trimmed_mean([cycle.seconds for cycle in plain])
    return {key: trimmed_mean([cycle.seconds for cycle in cycles]) / seconds for key, cycles in drafted.items()}


def drafter_key(config: DistillConfig) -> str:
    """Trials with the same key share one measurement."""
    return json.dumps(config.drafter.model_dump(mode="json"), sort_keys=True)
