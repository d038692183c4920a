"""What decoding costs with the shape of a real target, without its weights.

The cost of passes and drafts depends only on tensor sizes, but acceptance does not: random weights accept nothing.
Acceptance here is therefore SYNTHETIC (see `pipelines.benchmarks.replay`): at the rate that gives the requested tau, or
replayed from an evaluation. The results are milliseconds, the costs v, c and o, and the efficiency at that tau; they
say nothing about a drafter's quality.
They are compared with a ceiling from memory traffic: a plain step cannot be faster than reading every weight once, so

    S <= tau / (1 + gamma * c_bytes)        c_bytes = bytes of a draft step / bytes of a plain step
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoModelForCausalLM, LlamaConfig

from moray.bench.recording import record
from moray.bench.reports.wording import number, percent, times
from moray.bench.summary import cycle_costs
from moray.decoding.compiling import compile_models
from moray.decoding.device import synchronise
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.decoding.observed import taps_of_text
from moray.decoding.params import SamplingParams
from moray.decoding.planning.costs import median_seconds
from moray.decoding.sampling.batched_select import picks_of
from moray.decoding.sampling.sampler import Sampler
from moray.drafters.base import Drafter
from moray.progress import Progress
from moray.targets.attention import attention_backend
from moray.targets.head import TargetHead
from moray.targets.model import Target, pick_device
from moray.targets.spec import TargetSpec
from moray.trees.shapes import MAX_DEPTH, ChainShape
from moray.trees.tree import TokenTree, chain_of
from pipelines.benchmarks.decode import print_costs, table_of_rows
from pipelines.benchmarks.replay import LengthsAtRate, RecordedLengths, ReplayedAcceptance, acceptance_rate
from pipelines.benchmarks.shaped_config import ShapeConfig, ShapedBenchmarkConfig

_DRAFT_DEPTH = 5
_WARM_UP_TOKENS = 16
_CONFIDENCE = 20.0
_ROPE_THETA = 500_000.0
_GREEDY = SamplingParams()


def benchmark_shape(config: ShapedBenchmarkConfig) -> dict[str, Any]:
    """Time target passes, draft steps and whole generations of a target with random weights.

    Raises:
        ConfigError: the device does not exist, a tree is too shallow for the requested tau, or the file of recorded
            answers cannot be read.
        DataError: the recorded answers are damaged, or hold no cycle of the drafter and tree.
    """
    with Progress(f"time a target of {config.shape.num_layers} layers") as progress:
        return _measure(config, progress)


def _measure(config: ShapedBenchmarkConfig, progress: Progress) -> dict[str, Any]:
    label, rates, methods = _replays(config)
    progress.update(note="making the target")
    device = pick_device(config.device)
    target = random_target(config, device)
    drafter = config.drafter.build(TargetHead.of(target, config.drafter.num_target_layers)).eval().to(device)
    drafter.cast(target.dtype)
    progress.update(note="compiling")
    compiled = compile_models(target, [drafter], config.compile)
    max_nodes = max(*config.verify_sizes, *(shape.num_nodes for shape in config.trees))
    max_model_len = config.context + config.max_new_tokens
    runner = runner_for(target, max_model_len, max_nodes)
    prompt = torch.randint(
        config.shape.vocab_size, (config.context,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    progress.update(note="passes and drafts")
    verify_ms = _verify_times(target, runner, prompt, config.verify_sizes)
    draft_ms = _draft_time(target, drafter, prompt)
    decoder_of = partial(SpeculativeDecoder, target, max_model_len=max_model_len, runner=runner, is_timed=True)
    plain = decoder_of(None)
    baselines, generations = [], []
    for shape, method in zip(config.trees, methods, strict=True):
        progress.update(note=f"{shape.name}, {len(generations)} of {len(config.trees)} trees done")
        decoder = decoder_of(drafter, shape, accept=method)
        decoder.generate(prompt, _GREEDY, _WARM_UP_TOKENS, ())
        method.restart()  # discard the lengths used by the warm-up and by the previous tree
        baselines.append(plain.generate(prompt, _GREEDY, config.max_new_tokens, ()))
        generations.append(decoder.generate(prompt, _GREEDY, config.max_new_tokens, ()))
    step = sum(b.seconds for b in baselines) / sum(len(b.tokens) - 1 for b in baselines)
    ceiling = _ceiling(config, target, drafter)
    rows = [
        {"drafter": config.drafter.type, "tree": shape.name, "lossless": None, "acceptance_rate": rate}
        | _beside_ceiling(_speedup_renamed(cycle_costs([generation], step)), ceiling["draft_cost"])
        for shape, generation, rate in zip(config.trees, generations, rates, strict=True)
    ]
    return {
        "acceptance": label,
        "plain_ms": 1e3 * step,
        "verify_ms": verify_ms,
        "draft_step_ms": draft_ms,
        "rows": rows,
        "ceiling": ceiling,
        "notes": [compiled],
    } | record(config)


def _replays(config: ShapedBenchmarkConfig) -> tuple[str, list[float | None], list[ReplayedAcceptance]]:
    """The source of acceptance in words, and for each tree its rate (None if replayed) and its acceptance method."""
    if config.acceptance is not None:
        recorded = RecordedLengths.read(config.acceptance)
        method = ReplayedAcceptance(recorded)  # shared by all trees, since each starts with a restart
        label = (
            f"SYNTHETIC: {recorded.source}, as deep as each tree goes (adaptive shapes may draft less deep); the "
            "weights are random"
        )
        return label, [None] * len(config.trees), [method] * len(config.trees)
    assert config.tau is not None, "the configuration gives one of the two"
    rates = [acceptance_rate(config.tau, shape) for shape in config.trees]
    label = (
        f"SYNTHETIC: replayed at the rate that gives tau {config.tau:g} at full depth; the weights are random, so that "
        "trees may be flatter than trained drafters', and adaptive shapes may draft less deep"
    )
    return label, [*rates], [ReplayedAcceptance(LengthsAtRate(rate)) for rate in rates]


def _speedup_renamed(costs: dict[str, Any]) -> dict[str, Any]:
    """Name the speed-up in cycles `speedup_vs_plain`, as the decoding benchmark does: no prefill on either side."""
    return costs | {"speedup_vs_plain": costs.pop("speedup_in_cycles")}


def random_target(config: ShapedBenchmarkConfig, device: torch.device) -> Target:
    """Create a Llama of the given shape with random weights, directly on its device."""
    shape: ShapeConfig = config.shape
    positions = config.context + config.max_new_tokens + MAX_DEPTH
    llama = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
    )
    backend = attention_backend(device.type)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            llama, dtype=getattr(torch, config.dtype), attn_implementation=backend
        )
    # Scale the logits so that the model is as confident as a real one: flat distributions grow no deep trees.
    model.lm_head.weight.data.mul_(_CONFIDENCE)
    spec = TargetSpec(
        family="llama",
        max_positions=positions,
        rope_theta=_ROPE_THETA,
        norm_eps=llama.rms_norm_eps,
        fingerprint="random weights",
        **shape.model_dump(),
    )
    return Target(model, spec, ())


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    def clock() -> float:
        synchronise(device)
        return time.perf_counter()

    return 1e3 * median_seconds(run, clock)


@torch.inference_mode()
def _verify_times(target: Target, runner: TargetRunner, prompt: list[int], sizes: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of a target pass after the prompt, by its number of tokens."""
    runner.cache.arrange(len(prompt) + max(sizes), 0, 0)
    runner.read(0, [prompt], [0])
    times_by_size = {}
    for size in sizes:
        tree = chain_of(torch.zeros(size, dtype=torch.long, device=target.device))

        def verify(tree: TokenTree = tree) -> None:
            target.logits(runner.verify(0, [len(prompt)], [tree]).last)

        times_by_size[str(size)] = _milliseconds(verify, target.device)
    return times_by_size


@torch.inference_mode()
def _draft_time(target: Target, drafter: Drafter, prompt: list[int]) -> float:
    """Milliseconds per level of a draft chain."""
    state = drafter.new_state(len(prompt) + _DRAFT_DEPTH, _DRAFT_DEPTH)
    for tokens, taps in taps_of_text(TargetRunner(target, len(prompt), max_rows=1), prompt, drafter.observed):
        drafter.extend(state, tokens, drafter.observe(taps))
    shape = ChainShape(type="chain", depth=min(_DRAFT_DEPTH, drafter.max_depth or _DRAFT_DEPTH))
    root = torch.zeros(1, dtype=torch.long, device=target.device)
    select = picks_of([Sampler(_GREEDY, target.spec.vocab_size, target.device)], [len(prompt)], shape)
    return _milliseconds(lambda: drafter.propose_many([state], root, shape, select), target.device) / shape.depth


def _ceiling(config: ShapedBenchmarkConfig, target: Target, drafter: Drafter) -> dict[str, Any]:
    """Bytes that a plain step and a draft step must read, and the costs that follow from them (v = 1, o = 0)."""
    size = target.dtype.itemsize
    embeddings = target.spec.vocab_size * target.spec.hidden_size
    plain_bytes = (sum(p.numel() for p in target.model.parameters()) - embeddings) * size
    # A drafter of limited depth (Medusa) produces all levels in one step, so they share its cost.
    levels = 1 if drafter.max_depth is None else min(_DRAFT_DEPTH, drafter.max_depth)
    draft_bytes = sum(weight.numel() * weight.element_size() for weight in drafter.step_weights()) / levels
    bandwidth = config.memory_bandwidth
    return {
        "plain_bytes": float(plain_bytes),
        "draft_bytes": float(draft_bytes),
        "draft_cost": draft_bytes / plain_bytes,
        "plain_ms": 1e3 * plain_bytes / bandwidth if bandwidth else None,
        "draft_step_ms": 1e3 * draft_bytes / bandwidth if bandwidth else None,
    }


def _beside_ceiling(row: dict[str, Any], byte_cost: float) -> dict[str, Any]:
    """Add the speed-up that memory traffic allows at the row's tau and draft steps, and the share of it reached."""
    ceiling = row["tau"] / (1.0 + row["draft_steps"] * byte_cost) if row["tau"] else None
    measured = row["speedup_vs_plain"]
    share = measured / ceiling if measured is not None and ceiling else None
    return row | {"ceiling_speedup": ceiling, "share_of_ceiling": share}


def print_shaped(result: dict[str, Any], console: Console) -> None:
    """Print pass and draft times, the rows and the ceiling."""
    console.print(Text(f"acceptance: {result['acceptance']}"))
    passes = ", ".join(f"{size} tokens {number(ms)} ms" for size, ms in result["verify_ms"].items())
    console.print(f"target pass: {passes}; draft step {number(result['draft_step_ms'])} ms", highlight=False)
    ceiling = result["ceiling"]
    console.print(
        f"from bytes alone: plain step {number(ceiling['plain_ms'])} ms, draft step {number(ceiling['draft_step_ms'])} "
        f"ms, c = {number(ceiling['draft_cost'])}",
        highlight=False,
    )
    print_costs(result["rows"], result["plain_ms"], console)
    table = table_of_rows("Beside the ceiling from bytes: tau / (1 + gamma c_bytes)")
    for name in ("S", "ceiling", "share"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        cells = times(row["speedup_vs_plain"]), times(row["ceiling_speedup"]), percent(row["share_of_ceiling"])
        table.add_row(Text(row["drafter"]), Text(row["tree"]), *cells)
    console.print(table)
    for note in result["notes"]:
        console.print(Text(f"note: {note}"))
