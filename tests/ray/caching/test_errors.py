"""What a worker raised reaches the user as one line, and what failed gives its CPUs back."""

import gc
import time
from typing import Any

import pytest

from moray.errors import DataError

pytestmark = pytest.mark.usefixtures("ray_session")


def test_cpus_of_a_failed_stage_are_free_while_its_error_is_kept() -> None:
    import ray
    import ray.data

    from moray.cluster.errors import own_errors

    class Fails:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            raise DataError("nothing can be read")

    def stage() -> None:
        dataset = ray.data.range(4, override_num_blocks=4).map_batches(
            Fails, batch_size=1, compute=ray.data.ActorPoolStrategy(size=2), num_cpus=1
        )
        for _ in dataset.iter_rows():
            pass

    total = ray.cluster_resources()["CPU"]
    gc.disable()
    try:
        with pytest.raises(DataError, match=r"^nothing can be read$") as kept, own_errors():
            stage()
        deadline = time.monotonic() + 20
        while ray.available_resources().get("CPU", 0.0) < total:
            assert time.monotonic() < deadline, f"{ray.available_resources()} of {total} CPUs, after {kept.value}"
            time.sleep(0.2)
    finally:
        gc.enable()
