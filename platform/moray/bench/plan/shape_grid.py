"""Shapes of independent drafters, from deep and narrow to shallow and wide, and what their steps cost by depth.

"Decoding Speculative Decoding" (arXiv 2402.01528) finds that a draft's latency follows its depth, not its parameters.
Torch-free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moray.bench.plan.configs import ShapesConfig
from moray.drafters.config_base import BlockConfig
from moray.drafters.configs import IndependentConfig
from moray.errors import ConfigError
from moray.targets.spec import TargetSpec

_MLP_RATIO = 8 / 3
"""Inner width of a gated MLP over the hidden size: then it has twice the parameters of the attention."""
_MLP_MULTIPLE = 16


@dataclass(frozen=True)
class LinearFit:
    """seconds = intercept + slope * units, fitted by least squares."""

    intercept: float
    slope: float
    r_squared: float
    """Share of the variance that the line explains; 1 where there is none."""


def grid_of(config: ShapesConfig, spec: TargetSpec) -> list[IndependentConfig]:
    """One drafter for each depth, with about the same parameters in its layers.

    Raises:
        ConfigError: a depth would need a hidden size below one head.
    """
    if config.draft_vocab_size is not None and config.draft_vocab_size > spec.vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {config.draft_vocab_size}; the target has {spec.vocab_size} tokens: give at most that"
        )
    wanted = config.block_parameters or 2 * block_parameters(
        spec.hidden_size,
        BlockConfig(num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, intermediate_size=spec.intermediate_size),
        spec.head_dim,
    )
    return [_shape(config, spec, depth, wanted) for depth in config.depths]


def block_parameters(width: int, layer: BlockConfig, head_dim: int) -> int:
    """Parameters of one decoder layer: attention, gated MLP and two norms."""
    attention = width * head_dim * (2 * layer.num_heads + 2 * layer.num_kv_heads)
    return attention + 3 * width * layer.intermediate_size + 2 * width


def name_of(drafter: IndependentConfig) -> str:
    """Layers and hidden size, as in 4x384."""
    return f"{drafter.num_layers}x{drafter.hidden_size}"


def fit_line(units: Sequence[float], seconds: Sequence[float]) -> LinearFit:
    """The line of best fit; with a single number of units, a constant."""
    mean_x, mean_y = sum(units) / len(units), sum(seconds) / len(seconds)
    spread = sum((x - mean_x) ** 2 for x in units)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(units, seconds, strict=True)) / spread if spread else 0.0
    intercept = mean_y - slope * mean_x
    total = sum((y - mean_y) ** 2 for y in seconds)
    left = sum((y - intercept - slope * x) ** 2 for x, y in zip(units, seconds, strict=True))
    return LinearFit(intercept, slope, 1 - left / total if total else 1.0)


def break_even_tau(pass_seconds: dict[int, float], draft_seconds: float, depth: int) -> float:
    """Tokens per cycle at which chains of this depth are as fast as plain decoding.

    Args:
        pass_seconds: seconds of a target pass, by its number of tokens: 1, and depth + 1.
        draft_seconds: seconds of one token of a chain.
        depth: number of tokens in the chain.
    """
    return (depth * draft_seconds + pass_seconds[depth + 1]) / pass_seconds[1]


def _shape(config: ShapesConfig, spec: TargetSpec, depth: int, wanted: int) -> IndependentConfig:
    head_dim = spec.head_dim
    heads = max(1, round((wanted / depth / (4 + 3 * _MLP_RATIO)) ** 0.5 / head_dim))
    width = heads * head_dim
    if wanted / depth < 0.5 * (4 + 3 * _MLP_RATIO) * head_dim**2:
        raise ConfigError(
            f"depths has {depth}, but {wanted:,} parameters in {depth} layers leave less than one head of {head_dim}: "
            "give smaller depths, or more block_parameters"
        )
    inner = max(_MLP_MULTIPLE, round((wanted / depth / width - 4 * width) / 3 / _MLP_MULTIPLE) * _MLP_MULTIPLE)
    return IndependentConfig(
        type="independent",
        num_layers=depth,
        hidden_size=width,
        head_dim=head_dim,
        layer=BlockConfig(num_heads=heads, num_kv_heads=heads, intermediate_size=inner),
        embeddings="random",
        draft_vocab_size=config.draft_vocab_size,
    )
