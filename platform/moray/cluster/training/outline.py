"""What a distillation will need, known before anything starts: its drafter's shapes, its columns, its length."""

import torch

from moray.activations.format.manifest import Manifest
from moray.activations.reading.collate import needed_columns
from moray.cluster.training.configs import TrainingConfig
from moray.cluster.training.worker import plan_data_shards
from moray.drafters.learner import Learner
from moray.targets.head import TargetHead


def outline_learner(config: TrainingConfig) -> Learner:
    """The drafter without its weights, on torch's meta device: a matter of milliseconds, whatever its size.

    Raises:
        ConfigError: it does not go with the target.
    """
    head = TargetHead.outline(config.target, config.num_head_layers)
    with torch.device("meta"):
        return config.learner.build(head)


def run_length(config: TrainingConfig, manifest: Manifest, drafter: Learner) -> int:
    """Updates of a distillation from a complete cache.

    Raises:
        DataError: the cache lacks a column that the drafter reads, or has too few row groups.
    """
    needed_columns(drafter.needs, manifest.columns)
    plans = plan_data_shards(
        config, manifest, drafter.needs, config.workers.max_workers * config.train.gradient_accumulation_steps
    )
    total = sum(data_shards[0].num_steps for data_shards in plans)
    return min(total, config.train.max_steps or total)
