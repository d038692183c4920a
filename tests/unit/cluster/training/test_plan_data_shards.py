"""A cache with fewer row groups than data shards cannot be trained from, and the error says what to change."""

import pytest
from tiny_drafters import DRAFTERS

from moray.activations.format.manifest import Manifest
from moray.activations.format.records import PlanRecord
from moray.activations.format.schema import Column
from moray.activations.format.shard_info import ShardInfo
from moray.batch import TapNeeds
from moray.cluster.training.configs import DistillConfig
from moray.cluster.training.worker import plan_data_shards
from moray.errors import DataError

NEEDS = TapNeeds(hidden_depths=(-1,))


def manifest_of(row_groups: list[list[int]]) -> Manifest:
    num_tokens = sum(map(sum, row_groups))
    shard = ShardInfo("shard-00000-00000", sum(map(len, row_groups)), num_tokens, 1, "", row_groups, {})
    plan = PlanRecord.model_construct(columns={"hidden.-1": Column("bfloat16", 8)})
    return Manifest(plan, {shard.name: shard}, {}, {})


def config_of(**train: int) -> DistillConfig:
    return DistillConfig.model_validate(
        {
            "target": {"model": "m"},
            "drafter": DRAFTERS["eagle"][0].model_dump(mode="json"),
            "activations": "a",
            "output": "o",
            "optim": {"type": "adamw"},
            "train": {"batch_tokens": 64, **train},
        }
    )


def test_every_data_shard_needs_a_row_group_of_its_own():
    one = manifest_of([[40, 30, 50, 20]])
    with pytest.raises(
        DataError, match=r"row groups \(1, 140 tokens\) are too few for 2 data .*lower cache\.batch_tokens"
    ):
        plan_data_shards(config_of(), one, NEEDS, 2)
    assert plan_data_shards(config_of(), one, NEEDS, 1)[0][0].num_steps >= 2


def test_two_row_groups_are_enough_for_two():
    plans = plan_data_shards(config_of(epochs=2), manifest_of([[40, 30], [50, 20]]), NEEDS, 2)
    assert [len(plan) for plan in plans] == [2, 2]
    assert all(data_shard.num_steps for plan in plans for data_shard in plan)
