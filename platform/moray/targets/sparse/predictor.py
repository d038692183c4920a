"""Predicts, at one layer of a sparse target, which nodes of a draft tree will be accepted (SpaDec).

    p = sigmoid(v . H_K + c)        H_K: what enters layer K at the node

Layers from K on can then leave out the nodes that are not worth their routes. The predictor lies beside the routers, in
`predictor.safetensors`. It is no part of the target: it changes what is read, never the text.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moray.errors import ConfigError
from moray.explain import one_line

PREDICTOR = "predictor.safetensors"


@dataclass(frozen=True)
class Predictor:
    """A logistic regression on hidden states."""

    layer: int
    """K: it reads what enters this layer."""
    weight: Float[Tensor, " hidden"]
    bias: Float[Tensor, ""]

    def probabilities(self, hidden: Float[Tensor, "nodes hidden"]) -> list[float]:
        """How likely each node is to be on the accepted path. Waits for the device."""
        return torch.sigmoid(hidden.float() @ self.weight + self.bias).tolist()

    def to(self, device: torch.device) -> "Predictor":
        """The same on another device."""
        return Predictor(self.layer, self.weight.to(device), self.bias.to(device))

    def save(self, folder: Path) -> None:
        """Write it beside a sparse target's routers."""
        tensors = {"weight": self.weight.contiguous(), "bias": self.bias.reshape(1)}
        save_file(tensors, folder / PREDICTOR, metadata={"layer": str(self.layer)})


def load_predictor(folder: Path, hidden_size: int, num_layers: int) -> Predictor | None:
    """Read a target's predictor; None if it has none.

    Raises:
        ConfigError: it is damaged, or belongs to another model.
    """
    path = folder / PREDICTOR
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            layer = int((file.metadata() or {}).get("layer", "-1"))
            weight, bias = file.get_tensor("weight").float(), file.get_tensor("bias").float()
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"'{path}' cannot be read: {one_line(str(error))}; train it again") from None
    if weight.shape != (hidden_size,) or bias.shape != (1,) or not 0 < layer < num_layers:
        raise ConfigError(
            f"'{path}' holds {tuple(weight.shape)} weights for layer {layer}; this target has {num_layers} layers and "
            f"hidden size {hidden_size}: train the predictor again"
        )
    if not bool(torch.isfinite(weight).all()) or not bool(torch.isfinite(bias).all()):
        raise ConfigError(f"'{path}' holds numbers that are not finite: train it again")
    return Predictor(layer, weight, bias[0])
