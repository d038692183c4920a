"""What a distillation may be configured to: workers, data shards, and ways of sharing them."""

from typing import Any

import pytest

from moray.cluster.training.configs import DistillConfig
from moray.config import validate
from moray.errors import ConfigError

BASE: dict[str, Any] = {
    "target": {"model": "x"},
    "activations": "a",
    "output": "o",
    "drafter": {"type": "medusa", "num_heads": 2},
    "losses": {"feature": 0.0, "kl": 1.0},
    "optim": {"type": "adamw"},
}


def build(**more: Any) -> DistillConfig:
    return validate(DistillConfig, BASE | more)


def test_a_number_of_workers_or_a_range_of_them() -> None:
    assert (build().workers.min_workers, build().workers.max_workers) == (1, 1)
    some = build(workers={"num_workers": [2, 8]}).workers
    assert (some.min_workers, some.max_workers) == (2, 8)


@pytest.mark.parametrize("given", [0, [0, 2], [3, 2]])
def test_ranges_that_mean_nothing_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_workers is .*: give a number from 1, or the fewest and the most as"):
        build(workers={"num_workers": given})


def test_what_zero_cannot_share_is_refused_with_the_way_out() -> None:
    zero = {"type": "deepspeed", "stage": 3}
    assert build(parallel=zero).parallel.type == "deepspeed"
    with pytest.raises(ConfigError, match=r"optim.type is muon, .*: use optim.type=adamw or"):
        build(parallel=zero, optim={"type": "muon"})
    with pytest.raises(ConfigError, match=r"train.precision is float16: use bfloat16"):
        build(parallel=zero, train={"precision": "float16"})
    with pytest.raises(ConfigError, match=r"parallel.*stage"):
        build(parallel={"type": "deepspeed", "stage": 4})


def test_validation_beside_training_has_a_core_for_each_thread() -> None:
    for fine in ({"threads": 2, "cpus": 2}, {"threads": 2, "every_checkpoints": None}, {"threads": 1, "cpus": 0.5}):
        assert build(validation={"chats": "c.jsonl", **fine}).validation is not None
    with pytest.raises(ConfigError, match=r"validation.*threads is 2 but cpus is 1: .* give cpus=2, fewer threads, or"):
        build(validation={"chats": "c.jsonl", "threads": 2})
