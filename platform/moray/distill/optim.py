"""Optimizers behind one small interface: set the learning rate, step, and convert to and from flat tensors."""

import torch
import torch.distributed
from torch import Tensor, nn

from moray.distill.configs import AdamWConfig, LinearSchedule, MuonConfig, SpikeSchedule
from moray.distill.shared_muon import SharedMuon
from moray.errors import ConfigError, DataError


class Optimiser:
    """One or two torch optimizers over a drafter's parameters, with a shared schedule.

    With several processes, each computes a share of Muon's updates; all must then call every method together. The state
    is a flat mapping of tensors ("name/key"), so that checkpoints are safetensors and nothing is unpickled.
    """

    def __init__(
        self, module: nn.Module, config: AdamWConfig | MuonConfig, schedule: SpikeSchedule | LinearSchedule
    ) -> None:
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named}
        self._schedule = schedule
        self._optimisers: list[torch.optim.Optimizer]
        if isinstance(config, AdamWConfig):
            parameters = [parameter for _, parameter in named]
            self._optimisers = [
                torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
            ]
        else:
            matrices = [parameter for name, parameter in named if _is_hidden_matrix(name, parameter)]
            vectors = [parameter for name, parameter in named if not _is_hidden_matrix(name, parameter)]
            if not matrices:
                raise ConfigError(
                    "optim.type is 'muon', which is for matrices between hidden states, and this drafter has none: use "
                    "optim.type=adamw"
                )
            is_shared = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
            muon = SharedMuon if is_shared else torch.optim.Muon
            self._optimisers = [
                muon(matrices, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay),
                torch.optim.AdamW(vectors, lr=config.vector_lr, betas=(0.9, 0.95), weight_decay=0.0),
            ]
        self._base_rates = [group["lr"] for optimiser in self._optimisers for group in optimiser.param_groups]

    def step(self, step: int, steps_per_epoch: int, total_steps: int, is_applied: bool = True) -> None:
        """Set the learning rate for `step`, update the weights unless `is_applied` is False, and clear the
        gradients."""
        self.set_rate(step, steps_per_epoch, total_steps)
        for optimiser in self._optimisers:
            if is_applied:
                optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def set_rate(self, step: int, steps_per_epoch: int, total_steps: int) -> None:
        """Set the learning rate for `step`."""
        factor = self._schedule.factor(step, steps_per_epoch, total_steps)
        groups = [group for optimiser in self._optimisers for group in optimiser.param_groups]
        for group, rate in zip(groups, self._base_rates, strict=True):
            group["lr"] = rate * factor

    @property
    def alone(self) -> torch.optim.Optimizer | None:
        """The torch optimizer if there is only one; otherwise None."""
        return self._optimisers[0] if len(self._optimisers) == 1 else None

    @property
    def learning_rate(self) -> float:
        """The current learning rate of the first group."""
        return float(self._optimisers[0].param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Tensor]:
        """All moments and step counts as tensors named "parameter/key"."""
        state: dict[str, Tensor] = {}
        for optimiser in self._optimisers:
            if isinstance(optimiser, SharedMuon):
                optimiser.gather()
            for parameter, values in optimiser.state.items():
                for key, value in values.items():
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                    state[f"{self._names[parameter]}/{key}"] = tensor.detach().contiguous()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the output of `state_dict`.

        Raises:
            DataError: the state names parameters that do not exist here.
        """
        owners = {
            self._names[parameter]: (optimiser, parameter)
            for optimiser in self._optimisers
            for group in optimiser.param_groups
            for parameter in group["params"]
        }
        for full_name, value in state.items():
            name, _, key = full_name.rpartition("/")
            if name not in owners:
                raise DataError(f"optimiser state '{full_name}' belongs to no parameter of this drafter")
            optimiser, parameter = owners[name]
            # AdamW keeps its step count on the CPU, and moments on their parameter's device.
            device = value.device if value.ndim == 0 else parameter.device
            optimiser.state[parameter][key] = value.to(device)


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon trains the parameter: matrices between hidden states. Embeddings and vocabulary projections are
    lookups."""
    return parameter.ndim == 2 and not name.startswith(("embedding.", "projection"))
