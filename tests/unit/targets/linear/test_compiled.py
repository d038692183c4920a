"""Compiled kernels: exact sums in the same order for every number of rows, and a reason where there are none."""

import pytest
import torch

from moray.targets.linear import compiled
from moray.targets.linear.compiled import CompiledKernels, UnavailableError, load_kernels

needs_compiler = pytest.mark.skipif(
    not isinstance(load_kernels(), CompiledKernels), reason="gcc or Linux is missing, which compiled kernels need"
)


@pytest.fixture
def kernels() -> CompiledKernels:
    found = load_kernels()
    assert isinstance(found, CompiledKernels)
    return found


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 6), (32, 576), (97, 50), (960, 1536)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_sums_are_exact_for_small_whole_numbers(kernels, dtype, outputs, inputs, has_bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-1, 2, (outputs, inputs), generator=generator).to(dtype)
    bias = torch.arange(outputs).sub(3).fmod(4).to(dtype) if has_bias else None
    packed = kernels.pack(weight)
    for rows in (0, 1, 2, 5, 6, 7, 11, 12, 13, 25):
        x = torch.randint(-1, 2, (rows, inputs), generator=generator).to(dtype)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert torch.equal(kernels.linear(x, packed, outputs, bias), exact.to(dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_gives_the_same_bits_alone_and_among_others(kernels, dtype, threads):
    before = torch.get_num_threads()
    x, weight = torch.randn(29, 576).to(dtype), torch.randn(1000, 576).to(dtype)
    packed = kernels.pack(weight)
    together = kernels.linear(x, packed, 1000)
    torch.set_num_threads(threads)
    try:
        for begin in range(29):
            for end in (begin + 1, begin + 4, begin + 13):
                assert torch.equal(kernels.linear(x[begin:end], packed, 1000), together[begin:end])
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities_and_nan_pass_through(kernels, dtype):
    weight = torch.eye(40, 40).to(dtype)
    x = torch.zeros(1, 40, dtype=dtype)
    x[0, 7], x[0, 9] = torch.inf, torch.nan
    found = kernels.linear(x, kernels.pack(weight), 40)
    assert found[0].isnan().all()  # 0 * inf
    largest = torch.full((1, 2), torch.finfo(dtype).max, dtype=dtype)
    assert kernels.linear(largest, kernels.pack(torch.ones(1, 2, dtype=dtype)), 1).isinf().all()


def unavailable_reason(monkeypatch: pytest.MonkeyPatch, tmp_path) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_kernels.cache_clear()
    try:
        found = load_kernels()
    finally:
        load_kernels.cache_clear()
    assert isinstance(found, UnavailableError)
    return str(found)


def test_without_a_compiler_the_reason_is_given(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)
    assert unavailable_reason(monkeypatch, tmp_path) in ("gcc is not installed", "they are for Linux only")


@needs_compiler
def test_a_compiler_that_fails_is_named_with_its_message(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "_FLAGS", ("-O3", "-march=of-a-test"))
    reason = unavailable_reason(monkeypatch, tmp_path)
    assert "gcc" in reason
    assert "of-a-test" in reason


@needs_compiler
def test_a_folder_that_others_may_write_to_is_refused(monkeypatch, tmp_path):
    (tmp_path / "moray").mkdir()
    (tmp_path / "moray").chmod(0o777)
    assert unavailable_reason(monkeypatch, tmp_path) == f"others may write to '{tmp_path / 'moray'}'"


@needs_compiler
def test_the_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compiled._load()
    (library,) = (tmp_path / "moray").iterdir()
    written = library.stat().st_mtime_ns
    assert compiled._load()._name == first._name == str(library)
    assert library.stat().st_mtime_ns == written
