"""Computes the figures of a report from raw generations: tau, speed-ups and efficiency per method and category."""

from collections.abc import Sequence
from typing import Any

from moray.bench.runner import Measurement, Method
from moray.bench.spread import quartiles, ratio_interval, ratio_of_ratios_interval
from moray.decoding.engine.stats import CYCLE_PHASES
from moray.decoding.generation import Generation, acceptance_by_position, depth_shares, layer_count_shares, tau
from moray.decoding.params import SamplingParams


def summarise(measurement: Measurement, samplings: Sequence[SamplingParams], dtype: str) -> dict[str, Any]:
    """Compute the rows, baselines, categories and notes of a report (see `bench.reports.schema`) per temperature.

    Speeds are tokens per second including prefill. Efficiency is S / (tau / (1 + gamma c)), where S is the speed-up
    over plain decoding without prefill, gamma the number of levels drafted per cycle and c the cost of one draft level
    relative to one plain target step, all measured in this run. A figure that is undefined, for example because no
    answer needed a cycle, is None. A temperature at which nothing was asked has no rows.

    Args:
        measurement: all answers.
        samplings: the sampling parameters, one set per temperature.
        dtype: number format of the target.
    """
    figures: dict[str, list[Any]] = {"rows": [], "baselines": [], "categories": [], "notes": [*measurement.notes]}
    if measurement.num_skipped:
        figures["notes"].append(
            f"{measurement.num_skipped} turns were left out: with them the prompt fills the whole context"
            + (f" (counted at each of {len(samplings)} temperatures)" if len(samplings) > 1 else "")
        )
    for params in samplings:
        part = measurement.at(params.temperature)
        if part.asked:
            where = f" at temperature {params.temperature:g}" if len(samplings) > 1 else ""
            for key, values in _summarise_one(part, params, dtype, where).items():
                figures[key] += values
    return figures


def _summarise_one(measurement: Measurement, params: SamplingParams, dtype: str, where: str) -> dict[str, list[Any]]:
    """Like `summarise` for one temperature; `where` names it in notes."""
    plain = measurement.methods[0]
    generate = next((method for method in measurement.methods if method.name == "generate"), None)
    drafted = [method for method in measurement.methods if method.tree]
    # A different text proves nothing with rejection sampling, which preserves the distribution but not the text, or in
    # 16-bit formats, where passes over one token and over eight round differently.
    is_exact = (params.is_greedy or params.acceptance_method == "gumbel_coupled") and dtype == "float32"
    temperature = {"temperature": params.temperature}
    rows = [_row(method, plain, generate, is_exact) | temperature for method in drafted]
    if not params.is_lossless:
        rows = [row | {"lossless": None} for row in rows]
    names = sorted({asked.category for asked in measurement.asked})
    places = {name: [i for i, asked in enumerate(measurement.asked) if asked.category == name] for name in names}
    return {
        "rows": rows,
        "baselines": [
            {"name": method.name, "tokens_per_second": _speed(method.generations)} | temperature
            for method in measurement.methods
            if not method.tree
        ],
        "categories": [
            _category(name, method, plain, generate, places[name]) | temperature for method in drafted for name in names
        ],
        "notes": _notes(measurement, params, dtype, where),
    }


def _notes(measurement: Measurement, params: SamplingParams, dtype: str, where: str) -> list[str]:
    """Notes that a reader needs to interpret the figures."""
    notes = []
    if not params.is_lossless:
        notes.append(f"typical acceptance is lossy{where}: the text need not follow the target's distribution")
    elif dtype != "float32":
        notes += [
            f"{method.name}, {method.tree}: {method.lossless.count(False)} of {len(method.lossless)} answers differ "
            f"from plain decoding{where}; in {dtype} near ties fall either way, so only float32 can prove losslessness"
            for method in measurement.methods
            if method.tree and not all(method.lossless)
        ]
    generate = next((method for method in measurement.methods if method.name == "generate"), None)
    if params.is_greedy and generate is not None and not all(generate.lossless):
        notes.append(
            f"Hugging Face generate gives other tokens than our plain decoding on {generate.lossless.count(False)} of "
            f"{len(generate.lossless)} prompts{where}: its kernels round differently, which decides near ties"
        )
    return notes


def slower_than_plain(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A note that names the non-adaptive trees that were significantly slower than plain decoding, if any."""
    found = [row for row in rows if not row["tree"].startswith("adaptive") and _is_slower(row)]
    listed = ", ".join(
        f"{row['drafter']} {row['tree']} at T {row['temperature']:g} ({row['speedup_vs_plain']:.2f})" for row in found
    )
    advice = "an adaptive tree drafts only where that is faster on this machine"
    return [f"slower than plain decoding: {listed}; {advice}"] if found else []


def _is_slower(row: dict[str, Any]) -> bool:
    """Whether the whole 95 % interval of the speed-up is below 1."""
    return row["speedup_spread"] is not None and row["speedup_spread"][1] < 1


def cycle_costs(generations: Sequence[Generation], step_seconds: float) -> dict[str, Any]:
    """Compute the cost of cycles in units of a plain step (`step_seconds`), and their efficiency.

    A figure that is undefined, because nothing was drafted or no answer needed a cycle, is None. Prefill is excluded.
    """
    cycles = max(1, sum(g.num_cycles for g in generations))
    seconds = sum(g.seconds for g in generations)
    phases = {name: sum(g.phases[name] for g in generations) for name in CYCLE_PHASES}
    phases["other"] = seconds - sum(phases.values())
    levels = sum(map(sum, (g.drafted for g in generations)))
    gamma, rate = levels / cycles, tau(generations)
    draft_cost = phases["propose"] / levels / step_seconds if levels and step_seconds else None
    speedup = sum(sum(g.emitted) for g in generations) * step_seconds / seconds if seconds else 0.0
    efficiency = speedup * (1.0 + gamma * draft_cost) / rate if rate and draft_cost is not None else None
    return {
        "tau": rate or None,
        "speedup_in_cycles": speedup or None,
        "efficiency": efficiency,
        "draft_steps": gamma,
        "draft_cost": draft_cost,
        "verify_cost": phases["verify"] / cycles / step_seconds if step_seconds else None,
        "phases_ms": {name: 1e3 * spent / cycles for name, spent in phases.items()},
    }


def _row(method: Method, plain: Method, generate: Method | None, is_exact: bool) -> dict[str, Any]:
    """Compute all figures of one drafter and tree; `is_exact` says whether its text must equal plain decoding's."""
    generations = method.generations
    step_seconds = sum(g.seconds for g in plain.generations) / max(1, sum(len(g.tokens) - 1 for g in plain.generations))
    timings, plain_timings = list(map(_timing, generations)), list(map(_timing, plain.generations))
    low, median, high = quartiles(
        [_speed([own]) / _speed([other]) for own, other in zip(generations, plain.generations, strict=True)]
    )
    return cycle_costs(generations, step_seconds) | {
        "drafter": method.name,
        "tree": method.tree,
        "tau_spread": ratio_interval([(sum(g.emitted), g.num_cycles) for g in generations]),
        "tokens_per_second": _speed(generations),
        "speedup_vs_plain": _speed(generations) / _speed(plain.generations),
        "speedup_vs_generate": None if generate is None else _speed(generations) / _speed(generate.generations),
        "speedup_spread": ratio_of_ratios_interval(timings, plain_timings),
        "speedup_median": median,
        "speedup_quartiles": (low, high),
        "lossless": all(method.lossless) or (False if is_exact else None),
        "num_prompts": len(generations),
        "num_tokens": sum(len(g.tokens) for g in generations),
        "acceptance_by_position": acceptance_by_position(generations),
        "depth_shares": depth_shares(generations),
        "layer_count_shares": {
            str(num_target_layers): share for num_target_layers, share in layer_count_shares(generations).items()
        },
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
    timings = [_timing(g) for g in generations]
    seconds = sum(spent for _, spent in timings)
    return sum(tokens for tokens, _ in timings) / seconds if seconds else 0.0


def _timing(generation: Generation) -> tuple[int, float]:
    """Tokens of an answer, and its seconds including prefill."""
    return len(generation.tokens), generation.seconds + generation.prefill_seconds
