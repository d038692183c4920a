"""How weights, gradients and optimizer state are placed on the workers: all of them on each (DDP), or sharded
(`distill.zero`). Both use one checkpoint format, so a run can continue with the other."""

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from moray.batch import TrainBatch
from moray.distill.configs import LossConfig, TrainConfig
from moray.distill.losses import LossSums
from moray.distill.objective import Objective
from moray.distill.optim import Optimiser
from moray.drafters.learner import DraftView, Learner


def nan_unless_finite(loss: Tensor, factor: Tensor | float) -> Tensor:
    """The factor, or NaN for a loss that is not finite. Its gradients may be finite all the same (those of smooth L1
    are); NaN gradients tell every worker."""
    known = factor if isinstance(factor, Tensor) else loss.new_full((), factor)
    return torch.where(torch.isfinite(loss.detach()), known, torch.nan)


def num_workers() -> int:
    """Number of processes that train together."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def sum_over_workers(values: Tensor) -> Tensor:
    """Sum `values` over all workers, in place and, if possible, without waiting."""
    if num_workers() > 1:
        torch.distributed.all_reduce(values)
    return values


class Parallel(ABC):
    """Accumulates gradients batch by batch; an update clips and applies them. All workers call every method together,
    except for the properties."""

    has_equal_rounds = False
    """Whether all workers must process the same number of batches in an update."""

    drafter: Learner

    @abstractmethod
    def accumulate(
        self, batch: TrainBatch, view: DraftView, factor: Tensor | float, is_last: bool, with_figures: bool = True
    ) -> LossSums:
        """Add the gradients of this batch's summed losses times `factor`, so that the gradients of all workers add up.

        `is_last`: whether this is the last batch before the update. `with_figures`: see `distillation_loss`.
        """

    @abstractmethod
    def update(self, step: int, steps_per_epoch: int, total_steps: int) -> tuple[Tensor, Tensor]:
        """Clip the gradients and apply them with the learning rate of `step`.

        Returns:
            The norm of all gradients, and whether training may go on: both the same on all workers.
        """

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Learning rate of the last update."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """What `drafter.state_dict()` would return if this worker had all weights."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The whole optimizer state (see `Optimiser.state_dict`)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the output of `state_dict`, possibly from a run with another number of workers."""


class Replicas(Parallel):
    """Everything on every worker; DistributedDataParallel averages the gradients."""

    def __init__(self, drafter: Learner, optimiser: Optimiser, losses: LossConfig, train: TrainConfig) -> None:
        self.drafter = drafter
        self._optimiser = optimiser
        self._clip = train.max_grad_norm
        self._model: Any = Objective(drafter, losses, train)
        self._is_shared = num_workers() > 1
        if self._is_shared:
            self._model = nn.parallel.DistributedDataParallel(self._model, forward_sync_buffers=False)
        self._scale = LossScale() if train.precision == "float16" else None
        device = next(drafter.parameters()).device
        self._is_finite = torch.ones((), dtype=torch.bool, device=device)

    def accumulate(
        self, batch: TrainBatch, view: DraftView, factor: Tensor | float, is_last: bool, with_figures: bool = True
    ) -> LossSums:
        with nullcontext() if is_last or not self._is_shared else self._model.no_sync():
            sums = LossSums(*self._model(batch, view, with_figures))
            # DistributedDataParallel averages over workers: undo that.
            factor = factor * num_workers() * (self._scale.value if self._scale else 1.0)
            (sums.total * nan_unless_finite(sums.total, factor)).backward()
        self._is_finite = self._is_finite & torch.isfinite(sums.total.detach())
        return sums

    def update(self, step: int, steps_per_epoch: int, total_steps: int) -> tuple[Tensor, Tensor]:
        if self._scale is not None:
            for parameter in self.drafter.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self._scale.value)
        norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), self._clip)
        may_go_on = torch.isfinite(norm)
        is_applied = True
        if self._scale is not None:
            is_applied = bool(may_go_on)  # waits for the device, as every loss scaler does
            may_go_on = self._judge(may_go_on)
        self._optimiser.step(step, steps_per_epoch, total_steps, is_applied)
        self._is_finite = torch.ones_like(self._is_finite)
        return norm, may_go_on

    def _judge(self, is_applied: Tensor) -> Tensor:
        """Adapt the loss scale; return whether training may go on. After an overflow it may, unless a loss was not
        finite or the scale is exhausted."""
        assert self._scale is not None
        if self._scale.adapt(bool(is_applied)):
            return torch.ones_like(is_applied)
        return sum_over_workers((~self._is_finite).int()) + int(self._scale.is_exhausted) == 0

    @property
    def learning_rate(self) -> float:
        return self._optimiser.learning_rate

    def weights(self) -> dict[str, Tensor]:
        return self.drafter.state_dict()

    def state_dict(self) -> dict[str, Tensor]:
        return self._optimiser.state_dict() | (self._scale.state_dict() if self._scale else {})

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        rest = {name: value for name, value in state.items() if not name.startswith(LossScale.PREFIX)}
        self._optimiser.load_state_dict(rest)
        if self._scale is not None and len(rest) < len(state):
            self._scale.load_state_dict(state)


class LossScale:
    """Factor on losses so that small gradients survive half precision (arXiv 1710.03740, section 3.2).

    Like torch's GradScaler, for any number of optimizers: either all of them take a step or none does.
    """

    PREFIX = "loss_scale/"
    _LEAST = 1.0

    def __init__(self, value: float = 2.0**16, growth_steps: int = 2000) -> None:
        self.value = value
        self._growth_steps = growth_steps
        self._good_steps = 0

    def adapt(self, is_applied: bool) -> bool:
        """Halve the scale after an overflow, double it after many steps without one; return `is_applied`."""
        self._good_steps = self._good_steps + 1 if is_applied else 0
        if not is_applied:
            self.value /= 2
        elif self._good_steps == self._growth_steps:
            self.value, self._good_steps = self.value * 2, 0
        return is_applied

    @property
    def is_exhausted(self) -> bool:
        """Whether the scale is so small that it cannot be the cause of an overflow."""
        return self.value < self._LEAST

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{self.PREFIX}value": torch.tensor(self.value), f"{self.PREFIX}steps": torch.tensor(self._good_steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value = float(state[f"{self.PREFIX}value"])
        self._good_steps = int(state[f"{self.PREFIX}steps"])
