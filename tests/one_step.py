"""One update, or its gradients alone, of a drafter on batches that are in memory."""

from moray.batch import LaneBatch, TrainBatch
from moray.distill.configs import AdamWConfig, LinearSchedule, LossConfig, TrainConfig
from moray.distill.optim import Optimiser
from moray.distill.parallel import Replicas
from moray.distill.step import UpdatePlace, UpdateResult, run_update
from moray.drafters.base import Drafter

SCHEDULE = LinearSchedule(type="linear", warmup_steps=1)


def as_lane(batch: TrainBatch, lane: int = 0, uid: str = "chat") -> LaneBatch:
    """A whole batch as a lane hands it over."""
    uids = tuple(f"{uid}-{lane}-{row}" for row in range(batch.tokens.shape[0]))
    return LaneBatch(lane, batch, uids, lambda: batch.taps)


class KeepsGradients(Optimiser):
    """Changes no weight and clears no gradient, so that tests can look at them."""

    def step(self, step: int, steps_per_epoch: int, total_steps: int, is_applied: bool = True) -> None:
        pass


def gradients_of(
    drafter: Drafter,
    lanes: list[TrainBatch],
    losses: LossConfig,
    train: TrainConfig | None = None,
    staircase_probability: float = 0.0,
    seed: int = 0,
) -> UpdateResult:
    """Leave in `drafter` the clipped gradients of one update over these lanes."""
    optimiser = KeepsGradients(drafter, AdamWConfig(type="adamw"), SCHEDULE)
    replicas = Replicas(drafter, optimiser, losses, train or TrainConfig())
    place = UpdatePlace(0, 1, 1, staircase_probability, len(lanes), seed)
    return run_update(replicas, [as_lane(batch, lane) for lane, batch in enumerate(lanes)], place)
