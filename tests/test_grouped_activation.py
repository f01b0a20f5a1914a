"""A grouped product and its activation in one kernel: the bits of the two kernels it replaces, wherever it runs."""

import pytest
import torch
from torch import Tensor

from ops.kernels.elementwise.activation import Activation
from ops.kernels.grouped_gemm.grouped_activation import (
    grouped_activation_ref,
    grouped_activation_triton,
)
from ops.kernels.grouped_gemm.tile_rules import FEW_ROWS, activation_config
from tests.grouped_cases import DEVICES, Case, Operands, operands

# Triton 3.6's interpreter turns arrays of one element into loop bounds, which numpy >= 2.4 will refuse.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

HOPPER = (9, 0)
FULL = 2 * FEW_ROWS  # rows a group for which tiles are full
SHAPES = {
    "several tiles": Case([70, 3, 130], K=80, N=544),
    "empty groups and a tail": Case([0, 4, 0, 0, 9, 0], tail=130, K=64, N=160),
    "all empty": Case([0, 0, 0], tail=70, K=64, N=64),
    "one row": Case([0, 1, 0], K=64, N=64),
    "narrow": Case([5, 7, 3], K=24, N=32),
}


def launched(o: Operands, spec: Activation, *, bias: bool, scaled: bool, rows_a_group: int | None = None) -> Tensor:
    """What the kernel makes of an output full of NaN."""
    groups, N, _ = o.w.shape
    act = torch.full((len(o.x), N // 2 if spec.gated else N), torch.nan, dtype=o.x.dtype, device=o.x.device)
    tile = None if rows_a_group is None else activation_config(rows_a_group * groups, groups, spec.gated)
    grouped_activation_triton(
        o.x, o.w, o.splits.offsets, spec, o.bias if bias else None, o.scales if scaled else None, act, tile
    )
    return act


def spec_of(kind: str, interleave: int | None = None) -> Activation:
    return Activation(kind, glu_interleave_size=interleave)


def assert_is_the_reference(act: Tensor, o: Operands, spec: Activation, *, bias: bool, scaled: bool) -> None:
    """Sums of small integers are exact, so that what is rounded next is the same in any order of sums."""
    expected = grouped_activation_ref(
        o.x.nan_to_num(),
        o.w,
        o.splits,
        spec,
        bias_GN=o.bias if bias else None,
        scales_T=o.scales.nan_to_num() if scaled else None,
    )
    torch.testing.assert_close(act, expected, rtol=2**-7, atol=1e-30)  # sigmoids are never 0
    active = int(o.splits.offsets[-1])
    assert not act[active:].any(), "rows of no group are not zero"


@pytest.mark.launches("m_grouped_activation_kernel")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows_a_group", [1, FULL])
@pytest.mark.parametrize(
    ("kind", "interleave"), [("swiglu", None), ("swiglu", 1), ("swiglu", 16), ("swiglu", 128), ("srelu", None)]
)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in SHAPES.items()])
def test_kernel_agrees_with_the_reference(case, kind, interleave, rows_a_group, device):
    if interleave is not None and (case.N // 2) % interleave:
        case = case._replace(N=4 * interleave)
    for extras in (False, True):
        o = operands(case, torch.bfloat16, device=device, integers=True)
        act = launched(o, spec_of(kind, interleave), bias=extras, scaled=extras, rows_a_group=rows_a_group)
        assert_is_the_reference(act, o, spec_of(kind, interleave), bias=extras, scaled=extras)
