"""Trials as a sweep might leave them, for tests of what is made of them."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moray.provenance import write_json_atomically
from sweeps.reports.results import Finalist, Trial, how_sure, rank_agreement
from sweeps.reports.views import read_space, searched
from sweeps.tuning.records import State
from sweeps.tuning.spaces import folder_name, label

RUNGS = (10_000, 30_000, 90_000)
LAYERS, WIDTH, RATE = "drafter.target_layers", "drafter.mask_width", "optim.lr"
GRID: dict[str, Any] = {LAYERS: [0, 1, 2], WIDTH: [[3, 4], [5, 15], [30, 31]]}


def row(rung: int, tau: float, cost: float = 0.1, **changes: Any) -> dict[str, Any]:
    """What is measured on a rung."""
    speedup = tau / (1 + 5 * cost)
    return {
        "rung": rung, "rung_tokens": RUNGS[rung], "step": RUNGS[rung] // 1000, "training_tokens": RUNGS[rung] - 7,
        "training_seconds": 1.5, "loss": 3 - tau / 2, "simulated_tau": tau + 0.1, "tau": tau,
        "tau_spread": [tau - 0.1, tau + 0.1], "speedup": speedup, "speedup_spread": [speedup - 0.1, speedup + 0.1],
        "tokens_per_second": 100 * speedup, "draft_steps": 5.0, "draft_cost": cost, "verify_cost": 1.2,
        "efficiency": 0.9, "lossless": True, "num_prompts": 4, "num_tokens": 200, "objective": speedup, "seconds": 9.0,
        "answers": [[50, 1 / speedup, 1.0, 20, 20 * tau]] * 4,
    } | changes  # fmt: skip


def trial(
    choices: Mapping[str, Any],
    taus: Sequence[float],
    state: State = "finished",
    message: str | None = None,
    **changes: Any,
) -> Trial:
    """A trial that came to as many rungs as it has taus."""
    rows = [row(rung, tau, **changes) for rung, tau in enumerate(taus)]
    return Trial(label(choices), dict(choices), state, message, rows, Path("runs/s/trials") / folder_name(choices))


def a_grid(space: Mapping[str, Sequence[Any]] = GRID) -> list[Trial]:
    """One trial for every combination: a third finishes, one diverges, the others are stopped on the way."""
    found = []
    for i, values in enumerate(itertools.product(*space.values())):
        tau, cost = 1.5 + 0.37 * ((i * 5) % 9) / 9 + 0.01 * i, 0.05 + 0.04 * (i % 5)
        choices = dict(zip(space, values, strict=True))
        if i == 4:
            found.append(trial(choices, [tau], "diverged", "loss is NaN at step 12", cost=cost))
            continue
        reached = 3 if i % 3 == 0 else 1 + i % 2
        state: State = "finished" if reached == 3 else "stopped"
        found.append(trial(choices, [tau + 0.2 * rung + 0.05 * (i % 4) for rung in range(reached)], state, cost=cost))
    return found


def finalist(name: str, *speedups: Sequence[float], choices: Mapping[str, Any] | None = None) -> Finalist:
    """One whose speed-ups are known, prompt by prompt: a list for every seed."""
    seeds = {
        seed: row(2, 2.0) | {"answers": [[50, 1 / speedup, 1.0, 20, 40] for speedup in of_seed]}
        for seed, of_seed in enumerate(speedups)
    }
    return Finalist(name, dict(choices or {LAYERS: 0}), seeds, {seed: f"runs/s/trials/{seed}" for seed in seeds})


def summary(
    trials: Sequence[Trial], finalists: Sequence[Finalist], space: Mapping[str, Any], objective: str = "speedup"
) -> dict[str, Any]:
    """What a finished sweep leaves in summary.json."""
    sure = how_sure(finalists, objective)
    first = sure["finalists"][0]
    return {
        "winner": {
            "name": first["name"], "choices": first["choices"], "objective": first["mean"], "spread": first["spread"],
            "folder": "runs/s/best",
        },
        "objective": objective,
        "sure": sure,
        "ranks": rank_agreement(searched(trials, read_space(space), objective).trials),
        "trials": [one.summary() for one in trials],
        "training_tokens": sum(one.training_tokens for one in trials),
        "search_tokens": sum(one.training_tokens for one in trials),
        "wall_seconds": 4000.0,
        "machine": {"cpu": "two cores", "gpus": []},
        "versions": {"python": "3.11"},
        "config": {"space": dict(space), "objective": objective, "ladder": {"rungs": 3, "reduction": 3}},
    }  # fmt: skip


def write_trials(trials: Sequence[Trial], output: Path) -> None:
    """Leave them on disk, as a sweep does."""
    for begun, one in enumerate(trials):
        folder = output / "trials" / one.folder.name
        record = {"choices": one.choices, "begun": begun, "state": one.state, "message": one.message}
        write_json_atomically(folder / "trial.json", record)
        write_json_atomically(folder / "rungs.json", one.rows)
