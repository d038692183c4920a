"""Compiled linear layers: exact sums, in the same order for every number of rows."""

import pytest
import torch
from compiled_kernels import CPUS, kernels_for, needs_compiler

from moray.targets.kernels.compiled import CompiledKernels, CompiledWeight, load_kernels


@pytest.fixture(scope="module", params=CPUS)
def kernels(request, tmp_path_factory):
    yield from kernels_for(request.param, tmp_path_factory.mktemp("cache"))


@needs_compiler
def test_where_there_is_a_compiler_there_are_kernels():
    assert isinstance(load_kernels(), CompiledKernels), str(load_kernels())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 6), (32, 576), (97, 50), (960, 1536)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_sums_are_exact_for_small_whole_numbers(kernels, dtype, outputs, inputs, has_bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-1, 2, (outputs, inputs), generator=generator).to(dtype)
    bias = torch.arange(outputs).sub(3).fmod(4).to(dtype) if has_bias else None
    packed = CompiledWeight(kernels, weight)
    for rows in (0, 1, 2, 5, 6, 7, 11, 12, 13, 25):
        x = torch.randint(-1, 2, (rows, inputs), generator=generator).to(dtype)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert torch.equal(packed.linear(x, bias), exact.to(dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_gives_the_same_bits_alone_and_among_others(kernels, dtype, threads):
    before = torch.get_num_threads()
    x, weight = torch.randn(29, 576).to(dtype), torch.randn(1000, 576).to(dtype)
    packed = CompiledWeight(kernels, weight)
    together = packed.linear(x)
    torch.set_num_threads(threads)
    try:
        for begin in range(29):
            for end in (begin + 1, begin + 4, begin + 13):
                assert torch.equal(packed.linear(x[begin:end]), together[begin:end])
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities_and_nan_pass_through(kernels, dtype):
    weight = torch.eye(40, 40).to(dtype)
    x = torch.zeros(1, 40, dtype=dtype)
    x[0, 7], x[0, 9] = torch.inf, torch.nan
    found = CompiledWeight(kernels, weight).linear(x)
    assert found[0].isnan().all()  # 0 * inf
    largest = torch.full((1, 2), torch.finfo(dtype).max, dtype=dtype)
    assert CompiledWeight(kernels, torch.ones(1, 2, dtype=dtype)).linear(largest).isinf().all()
