"""From raw generations to the figures of a report: tau, speed-ups, efficiency, per method and category."""

import random
from collections.abc import Sequence
from typing import Any

from moray.bench.runner import Measurement, Method
from moray.decoding.params import SamplingParams
from moray.decoding.stats import PHASES, Generation, acceptance_by_position, tau

_NUM_RESAMPLES = 400


def summarise(measurement: Measurement, params: SamplingParams, dtype: str) -> dict[str, Any]:
    """The rows, baselines and categories of a report (see `bench.report_schema`).

    Speeds are tokens per second of prefill and decoding together. Efficiency is S / (tau / (1 + gamma c))
    with S over plain decoding, gamma the levels drafted per cycle and c the cost of one draft level over one
    plain target step, all measured in this run. A figure that is not defined (no answer took a cycle) is None.
    """
    plain = measurement.methods[0]
    generate = next((method for method in measurement.methods if method.name == "generate"), None)
    drafted = [method for method in measurement.methods if method.tree]
    baselines = [
        {"name": method.name, "tokens_per_second": _speed(method.generations)}
        for method in measurement.methods
        if not method.tree
    ]
    # Rejection sampling keeps the distribution, not the text; 16 bits round one token and eight differently. A
    # difference then proves nothing.
    is_exact = (params.is_greedy or params.rule == "coupled") and dtype == "float32"
    rows = [_row(method, plain, generate, is_exact) | {"temperature": params.temperature} for method in drafted]
    if not params.is_lossless:
        rows = [row | {"lossless": None} for row in rows]
    categories = []
    names = sorted({asked.category for asked in measurement.asked})
    for method in drafted:
        for category in names:
            chosen = [i for i, asked in enumerate(measurement.asked) if asked.category == category]
            categories.append(_category(category, method, plain, generate, chosen))
    return {
        "rows": rows,
        "baselines": baselines,
        "categories": categories,
        "notes": _notes(measurement, generate if params.is_greedy else None, dtype, params.is_lossless),
    }


def _notes(measurement: Measurement, generate: Method | None, dtype: str, is_lossless: bool) -> list[str]:
    """What a reader must know to read the figures right."""
    notes = []
    if measurement.num_skipped:
        notes.append(f"{measurement.num_skipped} turns were left out: with them the prompt fills the whole context")
    if not is_lossless:
        notes.append("typical acceptance is lossy: the text need not follow the target's distribution")
    elif dtype != "float32":
        notes += [
            f"{method.name}, {method.tree}: {method.lossless.count(False)} of {len(method.lossless)} answers differ "
            f"from plain decoding; in {dtype} near ties fall either way, so only float32 can prove losslessness"
            for method in measurement.methods
            if method.tree and not all(method.lossless)
        ]
    if generate is not None and not all(generate.lossless):
        notes.append(
            f"Hugging Face generate gives other tokens than our plain decoding on {generate.lossless.count(False)} of "
            f"{len(generate.lossless)} prompts: its kernels round differently, which decides near ties"
        )
    return notes


def _row(method: Method, plain: Method, generate: Method | None, is_exact: bool) -> dict[str, Any]:
    generations = method.generations
    cycles = max(1, sum(g.num_cycles for g in generations))
    step_seconds = sum(g.seconds for g in plain.generations) / max(1, sum(len(g.tokens) - 1 for g in plain.generations))
    phases = {name: sum(g.phases[name] for g in generations) for name in PHASES}
    phases["other"] = sum(g.seconds for g in generations) - sum(phases.values())
    levels = sum(map(sum, (g.drafted for g in generations)))
    gamma = levels / cycles
    draft_cost = phases["propose"] / levels / step_seconds if levels and step_seconds else None
    rate = tau(generations) or None
    speedup = _speed(generations) / _speed(plain.generations)
    return {
        "drafter": method.name,
        "tree": method.tree,
        "tau": rate,
        "tokens_per_second": _speed(generations),
        "speedup_vs_plain": speedup,
        "speedup_vs_generate": None if generate is None else _speed(generations) / _speed(generate.generations),
        "speedup_spread": _spread(generations, plain.generations),
        "efficiency": None if rate is None or draft_cost is None else speedup / (rate / (1.0 + gamma * draft_cost)),
        "lossless": all(method.lossless) or (False if is_exact else None),
        "num_prompts": len(generations),
        "num_tokens": sum(len(g.tokens) for g in generations),
        "draft_steps": gamma,
        "draft_cost": draft_cost,
        "verify_cost": phases["verify"] / cycles / step_seconds if step_seconds else None,
        "acceptance_by_position": acceptance_by_position(generations),
        "phases_ms": {name: 1e3 * seconds / cycles for name, seconds in phases.items()},
    }


def _category(
    category: str, method: Method, plain: Method, generate: Method | None, chosen: Sequence[int]
) -> dict[str, Any]:
    generations = [method.generations[i] for i in chosen]
    speed = _speed(generations)
    return {
        "category": category,
        "drafter": method.name,
        "tree": method.tree,
        "tau": tau(generations) or None,
        "speedup_vs_plain": speed / _speed([plain.generations[i] for i in chosen]),
        "speedup_vs_generate": None if generate is None else speed / _speed([generate.generations[i] for i in chosen]),
        "num_prompts": len(generations),
        "num_tokens": sum(len(g.tokens) for g in generations),
    }


def _speed(generations: Sequence[Generation]) -> float:
    seconds = sum(g.seconds + g.prefill_seconds for g in generations)
    return sum(len(g.tokens) for g in generations) / seconds if seconds else 0.0


def _spread(method: Sequence[Generation], plain: Sequence[Generation]) -> tuple[float, float]:
    """95 % interval of the speed-up, by bootstrap over prompts."""
    rng = random.Random(0)
    ratios = []
    for _ in range(_NUM_RESAMPLES):
        chosen = rng.choices(range(len(plain)), k=len(plain))
        ratios.append(_speed([method[i] for i in chosen]) / _speed([plain[i] for i in chosen]))
    ratios.sort()
    return ratios[int(0.025 * _NUM_RESAMPLES)], ratios[int(0.975 * _NUM_RESAMPLES)]
