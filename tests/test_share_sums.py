"""Sums of shares: the kernel against float64, for numbers of shares and rows that fill no block."""

import pytest
import torch

from ops.kernels.elementwise.share_sums import sum_shares, sum_shares_triton

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


@pytest.mark.launches("sum_shares_kernel")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 1), (8, 256), (9, 300), (44, 513), (3, 0)], ids=str)
def test_each_share_is_added_once(shape, device):
    shares = torch.randn(shape, device=device)
    out = shares.new_full(shape[1:], torch.nan)
    sum_shares_triton(shares, out)
    exact = shares.double().sum(0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(sum_shares(shares).double(), exact, rtol=1e-6, atol=1e-5)
