"""Two workers share out Muon's updates: weights and state are those of one worker that makes all of them."""

from pathlib import Path

import torch
import torch.distributed
from torch import nn
from zero_workers import begin, spawn

from moray.distill.configs import LinearSchedule, MuonConfig
from moray.distill.optim import Optimiser
from moray.distill.shared_muon import SharedMuon, share_out

SCHEDULE = LinearSchedule(type="linear", warmup_steps=4)
MUON = MuonConfig(type="muon", weight_decay=0.1)


def test_shares_cost_about_the_same():
    assert share_out([1.0, 8.0, 2.0, 5.0], 2) == [1, 0, 1, 1]
    assert share_out([3.0], 2) == [0]


def test_weights_and_state_are_those_of_one_worker(tmp_path: Path) -> None:
    spawn(compare, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], "both came to their end"


def compare(rank: int, port: int, folder: Path) -> None:
    """Three steps, and three more from the state after them, on this worker and on one that is alone."""
    alone, shared, again = module(), module(), module()
    whole = Optimiser(alone, MUON, SCHEDULE)  # before the group is there
    begin(rank, port)
    part = Optimiser(shared, MUON, SCHEDULE)
    muon = part._optimisers[0]
    assert isinstance(muon, SharedMuon)
    for number in range(3):
        step(alone, whole, number)
        step(shared, part, number)
    own = [matrix for matrix, state in muon.state.items() if state]
    assert len(own) in (1, 2), "a worker makes its own updates alone"
    check_equal(alone.state_dict(), shared.state_dict())
    state = {name: tensor.clone() for name, tensor in part.state_dict().items()}
    check_equal(whole.state_dict(), state)
    again.load_state_dict(shared.state_dict())
    resumed = Optimiser(again, MUON, SCHEDULE)
    resumed.load_state_dict(state)
    for number in range(3, 6):
        step(alone, whole, number)
        step(again, resumed, number)
    check_equal(alone.state_dict(), again.state_dict())
    check_equal(whole.state_dict(), resumed.state_dict())
    torch.distributed.destroy_process_group()
    (folder / str(rank)).touch()


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 5, bias=False))


def step(model: nn.Module, optimiser: Optimiser, number: int) -> None:
    """With the same gradients on both workers, as after averaging."""
    data = torch.randn(7, 6, generator=torch.Generator().manual_seed(number))
    model(data).square().sum().backward()
    optimiser.step(number, 10, 20)


def check_equal(wanted: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
