"""Test session: the environment before anything imports ray or torch, checked tensor shapes, shared fixtures."""

import os

# Set before the first import of ray, torch or transformers: all three read these once. Processes that tests start
# inherit them. One thread per process, for Ray's workers and the tests share the cores.
os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.25",
    RAY_DATA_USE_DATASOURCE_V2="0",
    RAY_metrics_report_interval_ms="1000",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
TENSOR_PACKAGES = [
    f"moray.{name}" for name in ("drafters", "decoding", "targets", "trees", "distill", "activations", "batch")
]

# Shapes in annotations are checked on every call from here on; only modules imported later are covered. A function
# defined inside another is compiled anew each time: what runs in every cycle is a `partial` instead.
jaxtyping.install_import_hook(TENSOR_PACKAGES, "beartype.beartype")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Processes that share the tests take them file by file, so that what a file sets up is set up once; one process
    takes all that use Ray."""
    folder = item.path.relative_to(REPOSITORY / "tests").parts[0]
    item.add_marker(pytest.mark.xdist_group("ray" if folder == "ray" else str(item.path)))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real tokenizers, chats and models beside the repository; skips where it is absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("../shared/data is absent: no real tokenizers, chats and models to test with")
    return folder


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray of four logical CPUs for the whole session."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
