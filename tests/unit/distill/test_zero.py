"""DeepSpeed ZeRO on two CPU processes: every drafter trains as with DDP, and goes on with any other way."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafters import TRAINED
from zero_workers import STEPS, spawn, train_and_resume, zero

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = sorted({*{name.rpartition("-")[0]: name for name in TRAINED}.values(), "moa-1"})
"""One drafter of every kind, and the one that is trained at all stages."""


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"


STAGES = {"zero-1": zero(1), "zero-2": zero(2), "zero-2-offload": zero(2, offload=True)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what every drafter came to at stage 3, and MoA at all stages."""
    folder = tmp_path_factory.mktemp("zero")
    ways = {name: {"ddp": None, "zero-3": zero(3)} | (STAGES if name == "moa-1" else {}) for name in NAMES}
    spawn(train_and_resume, folder, ways)
    return folder


CASES = [(name, "zero-3") for name in NAMES] + [("moa-1", way) for way in STAGES]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_losses_weights_and_optimiser_state_are_those_of_ddp(name: str, way: str, trained: Path) -> None:
    """Three data shards on two workers: one of them has a batch less."""
    wanted, got = torch.load(trained / f"{name}-ddp.pt"), torch.load(trained / f"{name}-{way}.pt")
    assert len(got["rows"]) == STEPS
    torch.testing.assert_close(torch.tensor(got["rows"]), torch.tensor(wanted["rows"]), rtol=1e-4, atol=1e-5)
    for part in ("weights", "state"):
        assert got[part].keys() == wanted[part].keys()
        for key, value in wanted[part].items():
            assert got[part][key].shape == value.shape, key
            torch.testing.assert_close(got[part][key], value, rtol=1e-3, atol=1e-5, msg=key)


def test_a_run_goes_on_with_any_other_way(trained: Path) -> None:
    wanted = torch.load(trained / "0-0.pt")
    for i in range(3):
        for j in range(3):
            got = torch.load(trained / f"{i}-{j}.pt")
            torch.testing.assert_close(torch.tensor(got["rows"]), torch.tensor(wanted["rows"]), rtol=1e-4, atol=1e-5)
            for key, value in wanted["weights"].items():
                torch.testing.assert_close(got["weights"][key], value, rtol=1e-3, atol=1e-5, msg=key)
