"""Splits: offsets and schedules against plain Python, checks at the door, travel through save_for_backward."""

import copy
import pickle
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.tensors.splits import Splits, clamped_splits


def make(sizes, rows, **kwargs):
    return Splits.make(sizes, rows=rows, device="cpu", **kwargs)


@st.composite
def sizes_and_rows(draw):
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(0, 70)), min_size=1, max_size=9))
    return sizes, sum(sizes) + draw(st.sampled_from([0, 0, 1, 5, 64]))


def up(number, block):
    return -(-number // block) * block


def test_worked_example_of_the_docstring():
    splits = make([3, 0, 4], rows=8)
    assert splits.sizes.tolist() == [3, 0, 4]
    assert splits.offsets.tolist() == [0, 3, 3, 7]
    assert splits.ends.tolist() == [3, 3, 7]
    assert splits.group_of_row.tolist() == [0, 0, 0, 2, 2, 2, 2, 3]
    assert splits.aligned(4).tolist() == [0, 4, 4, 8]
    assert splits.block_of_row(2).tolist()[:7] == [0, 0, 1, 2, 2, 3, 3]
    assert splits.tolist() == [3, 0, 4]


def test_dtypes_are_those_kernels_expect():
    splits = make([3, 0, 4], rows=8)
    assert splits.offsets.dtype == splits.sizes.dtype == splits.group_of_row.dtype == torch.int64
    assert splits.aligned(32).dtype == splits.block_of_row(32).dtype == torch.int64
    assert splits.ends.dtype == torch.int32


@given(sizes_and_rows(), st.sampled_from([1, 2, 16, 32, 128]))
def test_everything_agrees_with_plain_python(case, block):
    sizes, rows = case
    splits = make(sizes, rows)
    starts = [sum(sizes[:g]) for g in range(len(sizes) + 1)]
    assert splits.offsets.tolist() == starts
    owners = [g for g, size in enumerate(sizes) for _ in range(size)]
    assert splits.group_of_row.tolist() == owners + [len(sizes)] * (rows - sum(sizes))

    padded = [up(size, block) for size in sizes]
    aligned = [sum(padded[:g]) for g in range(len(sizes) + 1)]
    assert splits.aligned(block).tolist() == aligned
    assert aligned[-1] <= splits.aligned_capacity(block)
    assert splits.aligned_capacity(block) % block == 0
    if block == 16:
        assert splits.aligned_capacity(16) % 64 == 0
        assert aligned[-1] + up(rows - sum(sizes), 16) <= splits.aligned_capacity(16)
    blocks = [aligned[g] // block + i // block for g, size in enumerate(sizes) for i in range(size)]
    found = splits.block_of_row(block).tolist()
    assert found[: sum(sizes)] == blocks
    assert all(0 <= b < splits.aligned_capacity(block) // block for b in found)


@given(st.lists(st.integers(-5, 40), min_size=1, max_size=6), st.integers(0, 60))
def test_sizes_on_the_device_are_clamped(sizes, rows):
    splits = clamped_splits(torch.tensor(sizes, dtype=torch.int32), rows)
    ends = [min(sum(max(size, 0) for size in sizes[: g + 1]), rows) for g in range(len(sizes))]
    assert splits.offsets.tolist() == [0, *ends]
    assert splits.tolist() == splits.sizes.tolist() == splits.offsets.diff().tolist()
    assert splits.group_of_row.shape == (rows,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_tensors_lists_and_splits_mean_the_same(dtype):
    splits = make(torch.tensor([2, 0, 5], dtype=dtype), rows=7)
    assert splits.offsets.tolist() == make([2, 0, 5], rows=7).offsets.tolist()
    assert make(splits, rows=7, num_groups=3) is splits


@pytest.mark.parametrize(
    "sizes",
    [(2, 0, 5), range(1, 4), torch.Size([2, 0, 5]), deque([2, 0, 5]), [np.int32(2), np.uint8(0), torch.tensor(5)]],
    ids=lambda sizes: type(sizes).__name__,
)
def test_any_sequence_of_integers_is_taken(sizes):
    assert make(sizes, rows=7, num_groups=3).tolist() == [int(size) for size in sizes]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_arrays_of_numpy_are_taken(dtype):
    assert make(np.array([2, 0, 5], dtype=dtype), rows=7).tolist() == [2, 0, 5]


def test_refilling_the_callers_tensor_changes_nothing():
    sizes = torch.tensor([3, 4])
    splits = make(sizes, rows=7)
    clamped = clamped_splits(sizes, 7)
    sizes.fill_(0)
    assert splits.sizes.tolist() == clamped.sizes.tolist() == [3, 4]


def test_no_rows_is_legal():
    splits = make([0, 0], rows=0)
    assert splits.group_of_row.tolist() == splits.block_of_row(32).tolist() == []


CAPACITY = pytest.param([5, 6], 10, ValueError, r"split_sizes sum to 11, but x has only 10 rows\. Pass", id="sum")


@pytest.mark.parametrize(
    ("sizes", "rows", "error", "text"),
    [
        CAPACITY,
        pytest.param(
            [3, -1], 10, ValueError, r"split_sizes\[1\] is -1, but cannot be negative\. Pass 0", id="negative"
        ),
        pytest.param([], 10, ValueError, r"split_sizes is empty\. Pass one size", id="empty-list"),
        pytest.param([1, 2, 3], 10, ValueError, r"has 3 entries, but there are 2 groups\. Pass one size", id="groups"),
        pytest.param([1.0, 2.0], 10, TypeError, r"must be integers, but is \[1\.0, 2\.0\]\. Pass ints", id="floats"),
        pytest.param(
            {3: 1, 4: 2}, 10, TypeError, r"is of type dict, but must be a list or a tensor of integers", id="dict"
        ),
        pytest.param({3, 4}, 10, TypeError, r"split_sizes is of type set, but must be a list or a tensor", id="set"),
        pytest.param((i for i in (3, 4)), 10, TypeError, r"is of type generator, but must be a list", id="generator"),
        pytest.param({3: 1, 4: 2}.values(), 10, TypeError, r"is of type dict_values, but must be a list", id="values"),
        pytest.param("34", 10, TypeError, r"split_sizes is of type str, but must be a list", id="text"),
        pytest.param(b"\x03\x04", 10, TypeError, r"split_sizes is of type bytes, but must be a list", id="bytes"),
        pytest.param(None, 10, TypeError, r"split_sizes is of type NoneType, but must be a list", id="none"),
        pytest.param(7, 10, TypeError, r"split_sizes is of type int, but must be a list", id="number"),
        pytest.param([[1], [2]], 10, TypeError, r"must be integers, but is \[\[1\], \[2\]\]", id="nested"),
        pytest.param([True, False], 10, TypeError, r"must be integers, but is \[True, False\]", id="bools"),
        pytest.param([1, 2.5], 10, TypeError, r"must be integers, but is \[1, 2\.5\]", id="half"),
        pytest.param(["1", "2"], 10, TypeError, r"must be integers, but is \['1', '2'\]", id="texts"),
        pytest.param(np.array([1.0, 2.0]), 10, TypeError, r"must be integers, but is array", id="float-array"),
        pytest.param(np.array([True, False]), 10, TypeError, r"must be integers, but is array", id="bool-array"),
        pytest.param(np.array([[1, 2]]), 10, ValueError, r"has shape \[1, 2\], but must be \[num", id="2-d-array"),
        pytest.param(np.array(3), 10, ValueError, r"has shape \[\], but must be \[num_groups\]", id="0-d-array"),
        pytest.param(np.int64(3), 10, ValueError, r"has shape \[\], but must be \[num_groups\]", id="numpy-number"),
        pytest.param(torch.tensor(3), 10, ValueError, r"has shape \[\], but must be \[num_groups\]", id="0-d"),
        pytest.param(torch.ones(2) * 1j, 10, TypeError, r"is torch\.complex64, but must be integers", id="complex"),
        pytest.param(torch.ones(2), 10, TypeError, r"is torch\.float32, but must be integers", id="float-tensor"),
        pytest.param(torch.ones(2) > 0, 10, TypeError, r"is torch\.bool, but must be integers", id="bool-tensor"),
        pytest.param(
            torch.ones(2, requires_grad=True), 10, ValueError, r"requires a gradient, but sizes have none", id="grad"
        ),
        pytest.param(
            torch.ones(2, 1, dtype=torch.int64), 10, ValueError, r"has shape \[2, 1\], but must be \[num", id="2-d"
        ),
        pytest.param(
            make([1, 2], rows=3), 10, ValueError, r"made for 3 rows, but x has 10\. Pass the sizes", id="rows"
        ),
    ],
)
def test_bad_sizes_are_refused(sizes, rows, error, text):
    with pytest.raises(error, match=text):
        make(sizes, rows, num_groups=2)


def test_splits_on_another_device_are_refused():
    with pytest.raises(ValueError, match="are on cpu, but x is on meta"):
        Splits.make(make([1], rows=1), rows=1, device="meta")


def test_the_default_device_of_torch_is_not_theirs():
    with torch.device("meta"):
        assert Splits.make([1, 2], rows=3, device="cpu").offsets.tolist() == [0, 1, 3]


def test_tensors_and_rebuild_are_a_round_trip():
    splits = make([3, 0, 4], rows=8)
    splits.group_of_row, splits.row_in_padded(2)
    tensors = splits.tensors()
    empty = splits.rebuild([None] * len(tensors))
    assert all(tensor is None for tensor in empty.tensors())
    splits.aligned(4)  # made after the tensors were taken
    for template in (splits, empty):
        rebuilt = template.rebuild([tensor.clone() for tensor in tensors])
        assert rebuilt.num_groups == 3 and rebuilt.rows == 8 and rebuilt.tolist() == [3, 0, 4]
        assert rebuilt.group_of_row.tolist() == splits.group_of_row.tolist()
        assert rebuilt.row_in_padded(2).tolist() == splits.row_in_padded(2).tolist()
        assert rebuilt.aligned(4).tolist() == splits.aligned(4).tolist()


def test_derived_tensors_are_made_once():
    splits = make([3, 4], rows=7)
    assert splits.ends is splits.ends
    assert splits.aligned(16) is splits.aligned(16)
    assert splits.aligned(16) is not splits.aligned(32)


def test_copies_and_text():
    splits = make([3, 4], rows=9)
    assert repr(splits) == "Splits(sizes=[3, 4], num_groups=2, rows=9)"
    assert repr(clamped_splits(torch.tensor([3, 4]), 9)) == "Splits(num_groups=2, rows=9)"
    assert copy.deepcopy(splits).tolist() == pickle.loads(pickle.dumps(splits)).tolist() == [3, 4]


@pytest.mark.gpu
def test_the_device_is_never_read():
    sizes = torch.tensor([3, 0, 40], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given_sizes in (sizes, [3, 0, 40]):
            splits = Splits.make(given_sizes, rows=50, device="cuda")
            made = [splits.sizes, splits.ends, splits.group_of_row, splits.aligned(32), splits.block_of_row(32)]
            made.append(splits.row_in_padded(16))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_host = make([3, 0, 40], rows=50)
    assert splits.row_in_padded(16).tolist() == on_host.row_in_padded(16).tolist()
    assert splits.block_of_row(32).tolist() == on_host.block_of_row(32).tolist()
