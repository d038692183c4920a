"""Measures what a draft step costs by the shape of the drafter. Weights are random: time depends on sizes alone."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from moray.bench.plan.configs import ShapesConfig
from moray.bench.plan.page import write_shapes_page
from moray.bench.plan.shape_grid import block_parameters, break_even_tau, fit_line, grid_of, name_of
from moray.bench.recording import check_writable, record
from moray.decoding.device import synchronise
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.batched_select import picks_of
from moray.decoding.sampling.sampler import Sampler
from moray.drafters.base import Drafter
from moray.drafters.configs import IndependentConfig
from moray.drafters.loading import build_untrained_drafter
from moray.errors import ConfigError
from moray.progress import Progress
from moray.targets.model import Target
from moray.trees.shapes import ChainShape
from moray.trees.tree import chain_of

_GREEDY = SamplingParams()
_REPEATS = 5
"""Chains, or passes, of one shape in one round; the median counts."""


def measure_shapes(config: ShapesConfig) -> dict[str, Any]:
    """Time a step of each shape and the target's passes, in turns; write shapes.html and a YAML file of each drafter.

    Raises:
        ConfigError: a shape is impossible, the context too long for the target, or `output` cannot be written.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = Path(config.output)
    check_writable(folder / "shapes.html", "output")
    with Progress(f"load target {config.target.model}"):
        target = Target.load(config.target)
    longest = max(config.chain_depths)
    if config.context + longest + 1 > target.spec.max_positions:
        raise ConfigError(
            f"context is {config.context}, with chains of {longest} more than the target's {target.spec.max_positions} "
            "tokens: give less"
        )
    shapes = grid_of(config, target.spec)
    runs: dict[str, Callable[[], object]] = {}
    sizes: dict[str, int] = {}
    for number, shape in enumerate(shapes):
        drafter = build_untrained_drafter(shape, target, number)
        sizes[name_of(shape)] = drafter.num_parameters
        runs[name_of(shape)] = _chain(drafter, config.context, config.step_depth)
    passes = {size: _pass(target, config.context, size) for size in sorted({1, *(d + 1 for d in config.chain_depths)})}
    seconds = _in_turns(runs, passes, config.rounds, target.device)
    result = _result(config, shapes, sizes, seconds) | record(config)
    _write_drafters(folder, shapes)
    write_shapes_page(folder / "shapes.html", result)
    return result


def _in_turns(
    runs: dict[str, Callable[[], object]],
    passes: dict[int, Callable[[], object]],
    rounds: int,
    device: torch.device,
) -> dict[str | int, list[float]]:
    """Seconds by shape and by size of the pass, one median for each round."""
    everything: dict[str | int, Callable[[], object]] = {**runs, **passes}
    found: dict[str | int, list[float]] = {name: [] for name in everything}
    with torch.inference_mode(), Progress("shapes", rounds * len(everything), unit="measurements") as progress:
        for turn in range(rounds):
            names = list(everything) if turn % 2 == 0 else list(everything)[::-1]
            for name in names:
                everything[name]()
                found[name].append(statistics.median(_timed(everything[name], device) for _ in range(_REPEATS)))
                progress.advance()
    return found


def _timed(run: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    begin = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - begin


@torch.inference_mode()
def _chain(drafter: Drafter, context: int, depth: int) -> Callable[[], object]:
    """PlannedDraft a chain after `context` tokens."""
    state = drafter.new_state(context + depth + 1, depth)
    tokens = torch.arange(context, device=drafter.head.weight.device) % drafter.spec.vocab_size
    drafter.extend(state, tokens, {})
    shape = ChainShape(type="chain", depth=depth)
    root = torch.zeros(1, dtype=torch.long, device=tokens.device)
    select = picks_of([Sampler(_GREEDY, drafter.spec.vocab_size, tokens.device)], [context], shape)
    return lambda: drafter.propose_many([state], root, shape, select)


@torch.inference_mode()
def _pass(target: Target, context: int, size: int) -> Callable[[], object]:
    """Verify `size` tokens after `context` tokens."""
    runner = TargetRunner(target, context + size + 65, max_rows=1)
    runner.cache.arrange(context + size, 0, 0)
    runner.read(0, [[token % target.spec.vocab_size for token in range(context)]], [0])
    tree = chain_of(torch.zeros(size, dtype=torch.long, device=target.device))
    return lambda: target.logits(runner.verify(0, [context], [tree]).last)


def _result(
    config: ShapesConfig,
    shapes: list[IndependentConfig],
    sizes: dict[str, int],
    seconds: dict[str | int, list[float]],
) -> dict[str, Any]:
    passes = {size: statistics.median(own) for size, own in seconds.items() if isinstance(size, int)}
    rows = []
    for shape in shapes:
        own = [each / config.step_depth for each in seconds[name_of(shape)]]
        step = statistics.median(own)
        rows.append(
            {
                "name": name_of(shape),
                "num_layers": shape.num_layers,
                "hidden_size": shape.hidden_size,
                "intermediate_size": shape.layer.intermediate_size,
                "block_parameters": shape.num_layers * block_parameters(shape.hidden_size, shape.layer, shape.head_dim),
                "parameters": sizes[name_of(shape)],
                "step_seconds": step,
                "spread": (max(own) - min(own)) / step,
                "break_even_tau": {str(depth): break_even_tau(passes, step, depth) for depth in config.chain_depths},
            }
        )
    line = fit_line([row["num_layers"] for row in rows], [row["step_seconds"] for row in rows])
    return {"rows": rows, "passes": {str(size): each for size, each in passes.items()}, "fit": asdict(line)}


def _write_drafters(folder: Path, shapes: list[IndependentConfig]) -> None:
    """One YAML file for each shape, to train it with pipelines.distill after the settings of another drafter."""
    for shape in shapes:
        text = f"# {name_of(shape)}: give it after the YAML file of an independent drafter.\n"
        settings = {"drafter": shape.model_dump(mode="json")}
        (folder / f"independent-{name_of(shape)}.yaml").write_text(
            text + yaml.safe_dump(settings, sort_keys=False), encoding="utf-8"
        )
