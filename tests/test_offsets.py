"""Offsets of groups on the device: the kernel against torch, for sizes of any sign, number and dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.triton.offsets import (
    aligned_offsets,
    aligned_offsets_ref,
    aligned_offsets_triton,
    clamp_and_zero,
    clamped_offsets,
    clamped_offsets_ref,
    clamped_offsets_triton,
)
from recipes.triton.replay import Replays

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def test_worked_example():
    offsets, aligned = clamped_offsets(torch.tensor([3, -1, 4, 9, 2]), 10, 4)
    assert offsets.tolist() == [0, 3, 3, 7, 10, 10] and aligned.tolist() == [0, 4, 4, 8, 12, 12]


def launched(sizes: torch.Tensor, rows: int, block: int = 4) -> torch.Tensor:
    """The offsets; those aligned, which the same launch makes, are checked."""
    alone, out, aligned = torch.empty(3, sizes.numel() + 1, dtype=torch.int64, device=sizes.device)
    clamped_offsets_triton(sizes, alone, None, rows, 1)
    clamped_offsets_triton(sizes, out, aligned, rows, block)
    assert torch.equal(alone, out) and torch.equal(aligned, aligned_offsets_ref(out, block))
    return out


@pytest.mark.interpreter
@settings(max_examples=50)
@given(st.lists(st.integers(-5, 40), min_size=1, max_size=70), st.integers(0, 900), st.sampled_from([1, 16, 128]))
def test_kernel_agrees_for_any_sizes_interpreted(sizes, rows, block):
    given_sizes = torch.tensor(sizes)
    assert torch.equal(launched(given_sizes, rows, block), clamped_offsets_ref(given_sizes, rows))


@pytest.mark.launches("clamped_offsets_kernel")
@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_kernel_takes_every_integer_dtype_interpreted(dtype):
    sizes = torch.tensor([3, 0, 120, 1], dtype=dtype)
    assert launched(sizes, 123).tolist() == [0, 3, 3, 123, 123]


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", [1, 5_000, 3 * 2**40])
def test_kernel_sums_more_groups_than_a_block_and_beyond_32_bits_interpreted(rows):
    sizes = torch.arange(-3, 2500) * (2**31 if rows > 2**31 else 1)
    assert torch.equal(launched(sizes, rows), clamped_offsets_ref(sizes, rows))


DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [1, 2048, 2049, 5000])
def test_kernel_makes_memory_zero_besides(words, device):
    sizes, zeroed = torch.tensor([3, 0, 120, 1], device=device), torch.ones(words + 3, dtype=torch.int64, device=device)
    few = torch.ones(12, dtype=torch.int64, device=device)
    out, aligned = torch.empty(2, 5, dtype=torch.int64, device=device)
    clamp_and_zero(sizes, out, aligned, 123, 16, (zeroed, words), (few, 5))
    assert out.tolist() == [0, 3, 3, 123, 123] and aligned.tolist() == [0, 16, 16, 144, 144]
    assert not zeroed[:words].any() and zeroed[words:].all() and not few[:5].any() and few[5:].all()


@pytest.mark.gpu
def test_repeated_function_has_its_counters_made_zero():
    def function(sizes):
        made = clamped_offsets(sizes, 200, 16)
        counters = [torch.zeros(n, dtype=torch.int64, device="cuda") for n in (4, 5000)]
        found = [torch.empty_like(each) for each in counters]
        for each, copy in zip(counters, found, strict=True):
            aligned_offsets_triton(each, copy, 1)  # a sum over what is 0
        return *made, *found, torch.zeros(6, dtype=torch.int64, device="cuda")

    replays = Replays(function)
    for _ in range(5):
        dirty = torch.full((2**26,), 0x7F, dtype=torch.uint8, device="cuda")
        del dirty
        offsets, aligned, *zeros = replays(torch.tensor([3, 0, 120, 1], device="cuda"))
        assert offsets.tolist() == [0, 3, 3, 123, 124] and aligned.tolist() == [0, 16, 16, 144, 160]
        assert not any(each.any() for each in zeros)
    assert [found.source.count(", stream, ") for found in replays.kept.values()] == [3]  # launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("num_groups", [1, 2, 33, 1024, 1025, 5000])
@pytest.mark.parametrize("rows", [0, 1, 160, 2**33])
def test_kernel_agrees_with_torch(dtype, num_groups, rows):
    sizes = torch.randint(-5 if dtype.is_signed else 0, 100, (2 * num_groups,), dtype=dtype)[::2]
    for block in (None, 1, 16, 128):
        found, aligned = clamped_offsets(sizes.cuda(), rows, block)
        assert torch.equal(found.cpu(), clamped_offsets_ref(sizes, rows))
        assert aligned is None if block is None else torch.equal(aligned, aligned_offsets_ref(found, block))


def aligned_launched(offsets: torch.Tensor, block: int) -> torch.Tensor:
    out = torch.empty_like(offsets)
    aligned_offsets_triton(offsets, out, block)
    return out


def test_aligned_worked_example():
    assert aligned_offsets(torch.tensor([0, 3, 3, 7, 16]), 4).tolist() == [0, 4, 4, 8, 20]


@pytest.mark.launches("aligned_offsets_kernel")
@pytest.mark.interpreter
@pytest.mark.parametrize("num_groups", [1, 5, 33, 1030])
@pytest.mark.parametrize("block", [1, 16, 128])
def test_aligned_kernel_agrees_interpreted(num_groups, block):
    offsets = clamped_offsets_ref(torch.randint(0, 300, (num_groups,)), 2**40)
    assert torch.equal(aligned_launched(offsets, block), aligned_offsets_ref(offsets, block))


@pytest.mark.gpu
@pytest.mark.parametrize("num_groups", [1, 2, 33, 1024, 1025, 5000])
@pytest.mark.parametrize("block", [1, 16, 32, 128])
def test_aligned_kernel_agrees_with_torch(num_groups, block):
    offsets = clamped_offsets_ref(torch.randint(0, 300, (num_groups,)), 2**40)
    assert torch.equal(aligned_offsets(offsets.cuda(), block).cpu(), aligned_offsets_ref(offsets, block))
