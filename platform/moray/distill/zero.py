"""DeepSpeed ZeRO (arXiv 1910.02054): workers shard optimizer state, gradients and weights instead of replicating them.

Importing this module imports DeepSpeed, so it is imported only if it is configured. Checkpoints are whole tensors in
our own format, never DeepSpeed's pickles, so a run can continue with another number of workers, another stage, or DDP.
"""

import logging
import os
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from moray.batch import TrainBatch
from moray.distill.configs import DeepSpeedConfig, LossConfig, TrainConfig
from moray.distill.losses import LossSums
from moray.distill.objective import Objective
from moray.distill.optim import Optimiser
from moray.distill.parallel import Parallel, nan_unless_finite, num_workers
from moray.drafters.learner import DraftView, Learner
from moray.errors import ConfigError, DataError

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed needs it; Ray Train sets it

import deepspeed
import deepspeed.ops
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(Parallel):
    """A drafter in a DeepSpeed engine. Load weights before creating it: from then on they are sharded over the
    workers."""

    has_equal_rounds = True  # every forward and backward pass is a collective operation

    def __init__(
        self, drafter: Learner, optimiser: Optimiser, losses: LossConfig, train: TrainConfig, config: DeepSpeedConfig
    ) -> None:
        """
        Raises:
            ConfigError: ZeRO cannot shard this optimizer.
        """
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        if not isinstance(optimiser.alone, torch.optim.AdamW):
            raise ConfigError("parallel.type is deepspeed, which shares AdamW alone: give optim.type=adamw")
        # A faster all-reduce for CPUs; it has to be compiled, for which not every machine has the tools.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        self.drafter = drafter
        self._stage = config.stage
        self._names = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
        self._shapes = {name: p.shape for name, p in self._names}
        self._optimiser = optimiser
        self._updates = 0
        engine, zero, _, _ = deepspeed.initialize(
            model=Objective(drafter, losses, train),
            optimizer=optimiser.alone,
            config=_engine_config(train, config),
            dist_init_required=False,
        )
        self._engine: Any = engine
        self._zero: Any = zero

    def accumulate(
        self, batch: TrainBatch, view: DraftView, factor: Tensor | float, is_last: bool, with_figures: bool = True
    ) -> LossSums:
        self._engine.set_gradient_accumulation_boundary(is_last)
        sums = LossSums(*self._engine(batch, view, with_figures))
        # DeepSpeed also averages over workers: undo that.
        factor = nan_unless_finite(sums.total, factor * num_workers())
        self._engine.backward(sums.total * factor, scale_wrt_gas=False)
        return sums

    def update(self, step: int, steps_per_epoch: int, total_steps: int) -> tuple[Tensor, Tensor]:
        self._optimiser.set_rate(step, steps_per_epoch, total_steps)
        self._engine.step()
        self._updates += 1
        norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32)
        return norm, torch.isfinite(norm)

    @property
    def learning_rate(self) -> float:
        return self._optimiser.learning_rate

    def weights(self) -> dict[str, Tensor]:
        if self._stage < 3:
            return self.drafter.state_dict()
        whole: dict[str, Tensor] = {}
        for name, tensor in self.drafter.state_dict(keep_vars=True).items():
            with deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
                if torch.distributed.get_rank() == 0:
                    whole[name] = tensor.detach().cpu().clone()
        return whole

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        is_first = torch.distributed.get_rank() == 0
        for name, parameter in self._names:
            for key in _MOMENTS if self._updates else ():
                moment = safe_get_full_optimizer_state(parameter, key)
                if is_first:
                    assert moment is not None
                    state[f"{name}/{key}"] = moment.view(self._shapes[name]).cpu()
            if self._updates and is_first:
                state[f"{name}/step"] = torch.tensor(float(self._updates))
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        unknown = {key.rpartition("/")[0] for key in state} - self._shapes.keys()
        if unknown:
            raise DataError(f"optimiser state of '{min(unknown)}' belongs to no parameter of this drafter")
        if not state:
            return
        self._updates = round(max(float(value) for key, value in state.items() if key.endswith("/step")))
        for flat in self._flat_parts():
            zeros = {key: torch.zeros_like(flat) for key in _MOMENTS}
            self._zero.optimizer.state[flat] = zeros | {"step": torch.tensor(float(self._updates))}
        if self._stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()
        for name, parameter in self._names:
            for key in _MOMENTS:
                safe_set_full_optimizer_state(parameter, state[f"{name}/{key}"].to(parameter.device), key)

    def _flat_parts(self) -> list[Tensor]:
        """The tensors that the optimizer updates on this worker: parts of all weights, concatenated."""
        if self._stage == 3:
            return self._zero.fp32_partitioned_groups_flat
        return [flat for group in self._zero.optimizer.param_groups for flat in group["params"]]


def _engine_config(train: TrainConfig, config: DeepSpeedConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.stage}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if config.stage == 3:
        zero["stage3_param_persistence_threshold"] = config.persistence_threshold
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # every update says which batch is its last
        "gradient_clipping": train.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": 2**62,
    }
