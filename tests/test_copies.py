"""A copy by a launch: the bits of the numbers, in memory of their own, and nothing behind it."""

import pytest
import torch

from recipes.triton.copies import BLOCK, copied, copy_ref, copy_triton

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


@pytest.mark.launches("copy_kernel")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 8, BLOCK, BLOCK + 3])
def test_so_many_numbers_are_copied(n, device):
    x, out = torch.randn(n, device=device), torch.full([n + 2], 7.0, device=device)
    x[0] = torch.nan
    copy_triton(x, out[:n])
    assert torch.equal(out[:n].view(torch.int32), copy_ref(x).view(torch.int32)) and (out[n:] == 7).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_copy_has_memory_of_its_own(stride, device):
    x = torch.arange(12.0, device=device)[::stride]
    found = copied(x)
    assert torch.equal(found, x) and found.data_ptr() != x.data_ptr()
