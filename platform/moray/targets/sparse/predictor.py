"""Predicts, at one layer of a sparse target, which nodes of a draft tree will be accepted (SpaDec).

    p = sigmoid(v . H_K + c)        H_K: what enters layer K at the node

Layers from K on can then leave out the nodes that are not worth their routes. The predictor lies beside the routers, in
`predictor.safetensors`. It is no part of the target: it changes what is read, never the text.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moray.errors import ConfigError
from moray.explain import one_line
from moray.targets.spec import TargetSpec

PREDICTOR = "predictor.safetensors"


@dataclass(frozen=True)
class Predictor:
    """A logistic regression on hidden states."""

    layer: int
    """K: it reads what enters this layer."""
    weight: Float[Tensor, " hidden"]
    bias: Float[Tensor, ""]
    fingerprint: str
    """Of the target that it was trained for."""
    auc: float | None = None
    """Probability that it ranks an accepted node above a refused one, on held-out prompts; None if not measured."""

    def probabilities(self, hidden: Float[Tensor, "nodes hidden"]) -> list[float]:
        """How likely each node is to be on the accepted path. Waits for the device."""
        return torch.sigmoid(hidden.float() @ self.weight + self.bias).tolist()

    def to(self, device: torch.device) -> "Predictor":
        """The same on another device."""
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def save(self, folder: Path) -> None:
        """Write it beside a sparse target's routers."""
        tensors = {"weight": self.weight.contiguous(), "bias": self.bias.reshape(1)}
        metadata = {"layer": str(self.layer), "target": self.fingerprint}
        if self.auc is not None:
            metadata["auc"] = str(self.auc)
        save_file(tensors, folder / PREDICTOR, metadata=metadata)


def load_predictor(folder: Path, spec: TargetSpec, field: str) -> Predictor:
    """Read a target's predictor; `field` names the setting that needs it.

    Raises:
        ConfigError: it is missing or damaged, or was trained for another target.
    """
    path = folder / PREDICTOR
    again = "train it with `python -m pipelines.sparsify predictor`, or give " + f"{field}=all"
    if not path.is_file():
        raise ConfigError(f"{field} needs a predictor, and there is no {PREDICTOR} in the target's folder: {again}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            layer, fingerprint = int(metadata.get("layer", "-1")), metadata.get("target", "")
            auc = float(metadata["auc"]) if "auc" in metadata else None
            weight, bias = file.get_tensor("weight").float(), file.get_tensor("bias").float()
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{field}: '{path}' cannot be read: {one_line(str(error))}; {again}") from None
    fits = weight.shape == (spec.hidden_size,) and bias.shape == (1,) and 0 < layer < spec.num_layers
    if not fits or fingerprint != spec.fingerprint:
        raise ConfigError(f"{field}: '{path}' was trained for another target: {again}")
    if not bool(torch.isfinite(weight).all()) or not bool(torch.isfinite(bias).all()):
        raise ConfigError(f"{field}: '{path}' holds numbers that are not finite: {again}")
    return Predictor(layer, weight, bias[0], fingerprint, auc)
