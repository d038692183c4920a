"""DeepSpeed ZeRO on two CPU processes: every drafter trains as with DDP, and goes on with any other way."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafters import TRAINED
from zero_workers import STEPS, resume_everywhere, spawn, train_every_drafter, zero

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = sorted({*{name.rpartition("-")[0]: name for name in TRAINED}.values(), "moa-1"})
"""One drafter of every kind, and the one that is trained at all stages."""


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """Every drafter at stage 3, MoA at all stages; clipping is at work."""
    folder = tmp_path_factory.mktemp("zero")
    settings = [(None, 0.5), (zero(3), 0.5)]
    spawn(train_every_drafter, folder, NAMES, settings)
    found = {
        (name, way): torch.load(folder / f"{name}-{i}.pt") for name in NAMES for i, way in enumerate(["ddp", "zero-3"])
    }
    more = [(zero(1), 0.5), (zero(2), 0.5), (zero(2, offload=True), 0.5)]
    other = tmp_path_factory.mktemp("stages")
    spawn(train_every_drafter, other, ["moa-1"], more)
    for i, way in enumerate(["zero-1", "zero-2", "zero-2-offload"]):
        found["moa-1", way] = torch.load(other / f"moa-1-{i}.pt")
    return found


CASES = [(name, "zero-3") for name in NAMES] + [("moa-1", way) for way in ("zero-1", "zero-2", "zero-2-offload")]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_losses_weights_and_optimiser_state_are_those_of_ddp(
    name: str, way: str, trained: dict[tuple[str, str], Any]
) -> None:
    """Three data shards on two workers: one of them has a batch less."""
    wanted, got = trained[name, "ddp"], trained[name, way]
    assert len(got["rows"]) == STEPS
    torch.testing.assert_close(torch.tensor(got["rows"]), torch.tensor(wanted["rows"]), rtol=1e-4, atol=1e-5)
    for part in ("weights", "state"):
        assert got[part].keys() == wanted[part].keys()
        for key, value in wanted[part].items():
            assert got[part][key].shape == value.shape, key
            torch.testing.assert_close(got[part][key], value, rtol=1e-3, atol=1e-5, msg=key)


def test_a_run_goes_on_with_any_other_way(tmp_path: Path) -> None:
    spawn(resume_everywhere, tmp_path)
    wanted = torch.load(tmp_path / "0-0.pt")
    for i in range(3):
        for j in range(3):
            got = torch.load(tmp_path / f"{i}-{j}.pt")
            torch.testing.assert_close(torch.tensor(got["rows"]), torch.tensor(wanted["rows"]), rtol=1e-4, atol=1e-5)
            for key, value in wanted["weights"].items():
                torch.testing.assert_close(got["weights"][key], value, rtol=1e-3, atol=1e-5, msg=key)
