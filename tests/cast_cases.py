"""What the tests of the casts' kernels share: devices, numbers of every kind, and the comparison with the reference."""

import pytest
import torch

from recipes.casts.cast import cast_ref
from recipes.casts.cast_blocks import cast_blocks_on_triton
from recipes.tensors.formats import E4M3, E5M2
from recipes.tensors.splits import Splits
from tests.grouped_cases import DEVICES

EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
INF, NAN = float("inf"), float("nan")


def poisoned(*shape, dtype=torch.bfloat16, extremes=None):
    """Values around powers of two over a wide range, a zero row, and `extremes` somewhere (place -> value).

    By default a NaN, both Infs, the largest and the smallest normal number.
    """
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1)).float())
    x = x.to(dtype)
    flat = x.view(-1)
    limits = torch.finfo(dtype)
    for place, value in (extremes or {3: NAN, 5: INF, 7: -INF, 11: limits.max, 13: limits.tiny}).items():
        if flat.numel():
            flat[(place * 131) % flat.numel()] = value
    if x.ndim == 2 and x.shape[0] > 1:
        x[1] = 0
    return x


def assert_same(name, mine, other):
    """Bit for bit, but for the sign and payload of a NaN, which are the machine's."""
    assert (mine is None) == (other is None), name
    if mine is None:
        return
    mine = mine.cpu()
    assert mine.shape == other.shape and mine.dtype == other.dtype, name
    if other.dtype in (E4M3.dtype, E5M2.dtype):
        nan = other.float().isnan()
        assert torch.equal(mine.float().isnan(), nan), name
        mine, other = (codes.view(torch.uint8).masked_fill(nan, 0) for codes in (mine, other))
    assert torch.equal(mine, other), name


def assert_same_copies(found, expected):
    for name, mine, other in zip(found._fields, found, expected, strict=True):
        assert_same(name, mine, other)


def check_blocks(device, x, quantizer, *, sizes=None, **options):
    """The copies that the kernel makes of x [..., K] on this device are those of the reference on the CPU."""
    wanted = {"rowwise": True, "columnwise": True} | options
    splits = [None if sizes is None else Splits.make(sizes, rows=len(x), device=place) for place in ("cpu", device)]
    expected = cast_ref(x, quantizer.spec, splits=splits[0], **wanted)
    found = cast_blocks_on_triton(x.to(device), quantizer.spec, splits=splits[1], **wanted)
    assert_same_copies(found, expected)
