"""One update, or its gradients alone, of a drafter on batches that are in memory."""

from moray.batch import DataShardBatch, TrainBatch
from moray.distill.configs import AdamWConfig, LinearSchedule, LossConfig, TrainConfig
from moray.distill.optim import Optimiser
from moray.distill.parallel import Replicas
from moray.distill.step import UpdateContext, UpdateResult, run_update
from moray.drafters.base import Drafter

SCHEDULE = LinearSchedule(type="linear", warmup_steps=1)


def as_data_shard(batch: TrainBatch, data_shard: int = 0, uid: str = "chat") -> DataShardBatch:
    """A whole batch as a data shard hands it over."""
    uids = tuple(f"{uid}-{data_shard}-{row}" for row in range(batch.tokens.shape[0]))
    return DataShardBatch(data_shard, batch, uids, lambda: batch.taps)


class KeepsGradients(Optimiser):
    """Changes no weight and clears no gradient, so that tests can look at them."""

    def step(self, step: int, steps_per_epoch: int, total_steps: int, is_applied: bool = True) -> None:
        pass


def gradients_of(
    drafter: Drafter,
    data_shards: list[TrainBatch],
    losses: LossConfig,
    train: TrainConfig | None = None,
    staircase_probability: float = 0.0,
    seed: int = 0,
) -> UpdateResult:
    """Leave in `drafter` the clipped gradients of one update over these data shards."""
    optimiser = KeepsGradients(drafter, AdamWConfig(type="adamw"), SCHEDULE)
    replicas = Replicas(drafter, optimiser, losses, train or TrainConfig())
    context = UpdateContext(0, 1, 1, staircase_probability, len(data_shards), seed)
    return run_update(
        replicas, [as_data_shard(batch, data_shard) for data_shard, batch in enumerate(data_shards)], context
    )
