"""Which kernels compute linear layers: measured at load, told in one line, and never less precise ones."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import needs_compiler
from tiny_targets import load_target
from torch import nn

from moray.config import run_command
from moray.targets import model as target_model
from moray.targets.kernels import choice, weights
from moray.targets.kernels.build import UnavailableError
from moray.targets.kernels.choice import choose_kernels
from moray.targets.kernels.kinds import ALL_ROWS, Kernels
from moray.targets.kernels.weights import has_packed_kernels, linear_weights

NEEDS_BF16 = pytest.mark.skipif(
    not has_packed_kernels(torch.bfloat16), reason="this CPU has no instructions that oneDNN wants for bf16"
)
NEVER = (0.5,) * 7
LARGE = [torch.randn(2048, 1024) for _ in range(3)]


def measured(monkeypatch: pytest.MonkeyPatch, *rounds: Mapping[str, Sequence[float]], noise: float = 1.1) -> None:
    """In place of `_seconds`: runs the products once, whose results must be equal but for rounding, and gives times
    that make these gains, for each call of `_measure` in turn."""
    times = iter([1.0 / gain for gains in rounds for by_rows in zip(*gains.values(), strict=True) for gain in by_rows])

    def run_once(*runs: Sequence[Callable[[], torch.Tensor]]) -> tuple[list[float], float]:
        plain, *others = ([product() for product in run] for run in runs)
        for other in others:
            for a, b in zip(plain, other, strict=True):
                torch.testing.assert_close(a.float(), b.float(), atol=0.5, rtol=0.05)
        return [1.0, *[next(times) for _ in others]], noise

    monkeypatch.setattr(choice, "_seconds", run_once)


def test_small_and_unknown_weights_are_left_as_they_are(monkeypatch):
    assert choose_kernels(linear_weights(nn.Linear(32, 48))) == Kernels(None, "")
    assert "number format" in choose_kernels([one.half() for one in 2 * LARGE]).reason
    monkeypatch.setattr(choice, "_free_bytes", lambda: 1 << 20)
    assert "copies of them take 24 MiB, more than half of the 1 MiB" in choose_kernels(LARGE).reason


@pytest.mark.parametrize(
    ("packed", "expected"),
    [
        ((2.0,) * 7, 1),
        ((1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0), 2),
        ((0.7, 0.7, 1.1, 1.1, 1.1, 1.1, 1.1), 4),
        ((0.7, 0.7, 1.04, 1.1, 1.1, 1.1, 1.1), 8),
        ((2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 0.96), 1),
        ((2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.95), None),
        ((1.04,) * 7, None),
    ],
)
def test_packed_weights_are_used_from_the_first_row_count_that_gains(monkeypatch, packed, expected):
    monkeypatch.setattr(choice, "load_kernels", lambda: UnavailableError("g++ is not installed"))
    measured(monkeypatch, {"packed": packed})
    found = choose_kernels(LARGE)
    assert (found.packed_from, found.compiled_up_to, found.dtype) == (expected, 0, None)
    assert "with 1, 2, 4, 8, 17, 64 and 512 rows: packed " in found.reason
    assert re.search(r"packed( \d\.\d\d,){5} \d\.\d\d and \d\.\d\d; no", found.reason)
    assert found.reason.endswith("no compiled ones: g++ is not installed")
    assert ("torch's own" in found.reason) == (expected != 1)


@needs_compiler
@pytest.mark.parametrize(
    ("compiled", "packed", "up_to", "packed_from"),
    [
        ((2.0,) * 7, (1.5,) * 7, ALL_ROWS, None),
        ((2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0), (1.5,) * 7, 17, 18),
        ((2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0), (0.5, 0.5, 0.5, 0.5, 0.5, 1.5, 1.5), 17, 64),
        ((2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 0.9), NEVER, 64, None),
        ((0.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0), NEVER, ALL_ROWS, None),
        ((1.0,) * 7, NEVER, 0, None),
        ((1.52,) * 7, (1.5,) * 7, 0, 1),
    ],
)
def test_compiled_kernels_are_used_while_they_are_the_fastest(monkeypatch, compiled, packed, up_to, packed_from):
    measured(monkeypatch, {"compiled": compiled, "packed": packed})
    found = choose_kernels(LARGE)
    assert (found.compiled_up_to, found.packed_from) == (up_to, packed_from)
    assert ("compiled kernels" in found.reason) == (up_to > 0)
    assert ("packed weights" in found.reason) == (packed_from is not None)


@pytest.mark.parametrize(
    ("has_compiler", "expected"),
    [pytest.param(True, (64, 65), marks=needs_compiler), (False, (0, 4))],
)
def test_nothing_is_concluded_while_other_work_disturbs_the_timing(monkeypatch, has_compiler, expected):
    if not has_compiler:
        monkeypatch.setattr(choice, "load_kernels", lambda: UnavailableError("of this test"))
    figures = {"compiled": (0.5, 3.0, 0.5, 1.0, 1.0, 1.0, 1.0), "packed": (24.0,) * 7}
    measured(monkeypatch, figures if has_compiler else {"packed": figures["packed"]}, noise=2.34)
    found = choose_kernels(LARGE, may_round=True)
    assert (found.compiled_up_to, found.packed_from) == expected
    assert found.dtype is None
    assert "as on most machines; other work disturbs the timing here, products take 2.3 times" in found.reason


@needs_compiler
@NEEDS_BF16
@pytest.mark.parametrize(("has_amx", "expected"), [(True, (8, 9)), (False, (64, 65))])
def test_a_unit_for_matrices_is_usually_faster_with_more_rows_than_a_draft(monkeypatch, has_amx, expected):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    measured(monkeypatch, {"compiled": NEVER, "packed": NEVER}, noise=2.34)
    found = choose_kernels([one.bfloat16() for one in 2 * LARGE])
    assert (found.compiled_up_to, found.packed_from) == expected


@needs_compiler
def test_a_second_copy_is_not_made_without_memory_for_it(monkeypatch):
    monkeypatch.setattr(choice, "_free_bytes", lambda: 70 << 20)
    measured(monkeypatch, {"compiled": (2.0, 2.0, 2.0, 2.0, 0.5, 0.5, 0.5), "packed": (1.5,) * 7})
    found = choose_kernels(LARGE)
    assert (found.compiled_up_to, found.packed_from) == (8, None)
    assert "too little memory" in found.reason
    measured(monkeypatch, {"compiled": NEVER, "packed": NEVER}, noise=2.34)
    assert choose_kernels(LARGE).packed_from is None


@NEEDS_BF16
@needs_compiler
@pytest.mark.parametrize(
    ("exact", "rounded", "expected"),
    [
        ((2.0,) * 7, (4.0,) * 7, (torch.bfloat16, ALL_ROWS)),
        ((2.0,) * 7, (4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 2.0), (None, ALL_ROWS)),
        (NEVER, (1.1,) * 7, (torch.bfloat16, ALL_ROWS)),
        (NEVER, (1.0,) * 7, (None, 0)),
    ],
    ids=["faster", "not for every number of rows", "where others are slower", "no faster than torch's"],
)
def test_weights_that_may_be_rounded_are_where_that_is_faster(monkeypatch, exact, rounded, expected):
    measured(monkeypatch, {"compiled": exact, "packed": NEVER}, {"compiled": rounded, "packed": NEVER})
    found = choose_kernels(LARGE, may_round=True)
    assert (found.dtype, found.compiled_up_to) == expected
    assert ("bfloat16" in found.reason) == (expected[0] is not None)


def test_a_command_prints_which_kernels_its_target_got(monkeypatch, tmp_path, capsys):
    chosen = Kernels(None, "linear layers: torch's own kernels, because of this test")
    monkeypatch.setattr(target_model, "stay_in_cache", lambda _: False)
    monkeypatch.setattr(target_model, "choose_kernels", lambda *_, **__: chosen)
    run_command(lambda: load_target(tmp_path, num_hidden_layers=1))
    assert capsys.readouterr().err.splitlines()[-1] == f"target {tmp_path}: {chosen.reason}"
    load_target(tmp_path, num_hidden_layers=1)  # a library prints nothing by itself
    assert "linear layers" not in capsys.readouterr().err


def test_kernels_that_compute_less_precisely_are_not_used(monkeypatch):
    """oneDNN may be told to multiply float32 in bfloat16: faster, and no longer the target's text."""
    monkeypatch.setattr(choice, "load_kernels", lambda: UnavailableError("of this test"))
    monkeypatch.setattr(choice, "_seconds", lambda *runs: ([2.0, 1.0], 1.1))
    assert choose_kernels(LARGE).are_packed
    monkeypatch.setattr(
        weights, "packed_linear", lambda x, packed, bias: F.linear(x.bfloat16(), LARGE[0].bfloat16()).float()
    )
    found = choose_kernels(3 * LARGE[:1])
    assert not found.are_packed
    assert "results of packed ones differ by" in found.reason
    assert "more than rounding" in found.reason
    monkeypatch.setattr(weights, "packed_linear", lambda x, packed, bias: F.linear(x, LARGE[0]) * torch.nan)
    assert "differ by inf" in choose_kernels(3 * LARGE[:1]).reason


def products(clock: list[float], seconds: Callable[[int, int], float]) -> list[Callable[[], None]]:
    """Six products; number `index` takes `seconds(index, turn)` of this clock."""
    turns = [0] * 6

    def product(index: int) -> None:
        clock[0] += seconds(index, turns[index])
        turns[index] += 1

    return [partial(product, index) for index in range(6)]


def test_each_product_counts_with_its_own_shortest_time(monkeypatch):
    """Other work disturbs every product in every turn but one."""
    clock = [0.0]
    monkeypatch.setattr(choice.time, "perf_counter", lambda: clock[0])

    def disturbed(seconds: float) -> Callable[[int, int], float]:
        return lambda index, turn: seconds if turn == 3 + index else seconds + 0.01

    found, noise = choice._seconds(products(clock, disturbed(2e-3)), products(clock, disturbed(1e-3)))
    assert found == pytest.approx([12e-3, 6e-3])
    assert noise == pytest.approx((6 * 12e-3 + 6 * 11e-3) / 18e-3)


def test_timing_stops_after_two_turns_on_a_busy_machine(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(choice.time, "perf_counter", lambda: clock[0])
    choice._seconds(products(clock, lambda index, turn: 0.2), products(clock, lambda index, turn: 0.1))
    assert clock[0] == pytest.approx(2 * 6 * 0.3)
