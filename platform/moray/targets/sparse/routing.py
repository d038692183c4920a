"""Sparse targets (D-LLM, NeurIPS 2024): each layer decides by a small router which tokens run through it.

    router        z = SiLU(RMSNorm(W1 x + b1)),  logits = W2 z + b2      x: what enters the layer, before its norm
    route         the layer runs for a token if the second logit is the larger one
    skipped       x goes on unchanged, and the layer has no key or value of this token for anybody

A sparse target is an ordinary model folder with two more files: `routing.json` (a `RoutingSpec`) and
`routers.safetensors`. With `router_bits`, a router reads x as codes of so many bits (SpaDec): a few large coordinates
set the grid, so tokens look alike to it, and the nodes of a draft tree tend to take the same layers.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moray.errors import ConfigError
from moray.explain import one_line
from moray.targets.spec import ROUTERS, RoutingSpec, TargetSpec

RUNS = 1
"""Index of the logit for running a layer; 0 is for skipping it."""
_BIASES = (0.1, 2.0)
"""At first, 87 % of the decisions are to run."""


def quantise(x: Float[Tensor, "*any hidden"], num_bits: int) -> Float[Tensor, "*any hidden"]:
    """Codes 0 .. 2^bits - 1 on a grid from the smallest to the largest value of each vector. They are the same for
    a x + c with any a > 0."""
    least, most = torch.aminmax(x, dim=-1, keepdim=True)
    step = (most - least) / (2**num_bits - 1) + 1e-7
    return ((x - least) / step).round()


class Router(nn.Module):
    """Decides for one layer which tokens run through it; computes in float32."""

    def __init__(self, hidden_size: int, size: int, norm_eps: float, num_bits: int | None) -> None:
        """
        Args:
            hidden_size: of the target.
            size: width of the router.
            norm_eps: epsilon of its norm.
            num_bits: of the codes that it reads; None for the hidden state itself.
        """
        super().__init__()
        self.inner = nn.Linear(hidden_size, size)
        self.norm = nn.RMSNorm(size, eps=norm_eps)
        self.outer = nn.Linear(size, 2)
        self._num_bits = num_bits
        with torch.no_grad():
            self.outer.bias.copy_(torch.tensor(_BIASES))

    def forward(self, x: Float[Tensor, "*any hidden"]) -> Float[Tensor, "*any 2"]:
        """Logits for skipping and running."""
        x = x.float()
        if self._num_bits is not None:
            x = quantise(x, self._num_bits)
        return self.outer(F.silu(self.norm(self.inner(x))))

    def margin(self, x: Float[Tensor, "*any hidden"]) -> Float[Tensor, "*any"]:
        """Logit for running less that for skipping: the layer runs where it is positive."""
        x = x.float()
        if self._num_bits is not None:
            x = quantise(x, self._num_bits)
        inner, norm = self.inner, self.norm  # not self(x): calling modules takes longer than the products
        z = F.linear(x, inner.weight, inner.bias)
        assert norm.eps is not None
        z = F.silu(z * (z.square().mean(dim=-1, keepdim=True) + norm.eps).rsqrt_() * norm.weight)  # F.rms_norm is slow
        logits = F.linear(z, self.outer.weight, self.outer.bias).unbind(-1)
        return logits[RUNS] - logits[1 - RUNS]


def build_routers(spec: TargetSpec, routing: RoutingSpec) -> nn.ModuleDict:
    """New routers for a target, by the number of their layer."""
    layers = routing.routed_layers(spec.num_layers)
    routers = {
        str(layer): Router(spec.hidden_size, routing.router_size, spec.norm_eps, routing.router_bits)
        for layer in layers
    }
    return nn.ModuleDict(routers)


def load_routers(folder: Path, spec: TargetSpec, field: str = "target.model") -> dict[int, Router]:
    """The routers of a sparse target, by layer.

    Raises:
        ConfigError: their file is missing or damaged, or belongs to another model.
    """
    assert spec.routing is not None
    routers = build_routers(spec, spec.routing)
    try:
        state = load_file(folder / ROUTERS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{field} '{folder}': {ROUTERS} cannot be read: {one_line(str(error))}") from None
    wanted = {name: tuple(tensor.shape) for name, tensor in routers.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ConfigError(
                f"{field} '{folder}': tensor '{name}' of {ROUTERS} has the shape {found.get(name)}, where routing.json "
                f"and config.json need {wanted.get(name)}: save the routers again"
            )
        if not bool(torch.isfinite(state[name]).all()):
            raise ConfigError(f"{field} '{folder}': tensor '{name}' of {ROUTERS} holds numbers that are not finite")
    routers.load_state_dict(state)
    routers.eval().requires_grad_(False)
    found_routers: dict[int, Any] = {int(layer): router for layer, router in routers.items()}
    return found_routers


def save_routers(folder: Path, routers: nn.ModuleDict, routing: RoutingSpec) -> None:
    """Make the model in a folder a sparse one."""
    save_file({name: tensor.float().contiguous() for name, tensor in routers.state_dict().items()}, folder / ROUTERS)
    routing.save(folder)
