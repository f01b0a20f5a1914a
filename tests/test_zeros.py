"""Memory of zeros by a launch: every word and no other; what a repeated function gets in place of torch.zeros."""

import pytest
import torch

from recipes.triton.replay import Replays
from recipes.triton.zeros import BLOCK, zero_triton, zeros_launch

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


@pytest.mark.launches("zeros_kernel")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [4, BLOCK, BLOCK + 4])
def test_so_many_words_are_zero(words, device):
    x = torch.ones(words + 3, dtype=torch.int32, device=device)
    zero_triton(x, words)
    assert not x[:words].any() and x[words:].all()


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [0, 3, 16, 1000, 2**16, 2**20 + 16, 2**22, 2**22 + 8, 2**25])
def test_a_repeated_function_gets_zeros(nbytes):
    """Kept, and as temporary memory that is shared, of which a launch alone needs the address."""

    def function(x):
        kept, temporary = (torch.zeros(nbytes, dtype=torch.uint8, device=x.device) for _ in range(2))
        parts = torch.zeros(32, dtype=torch.int32, device=x.device).split([16, 16])
        zero_triton(x, 4)
        return kept, temporary.clone(), parts[1]

    replays, x = Replays(function), torch.ones(4, dtype=torch.int32, device="cuda")
    replays.zeros = zeros_launch
    for _ in range(5):
        dirty = torch.full((2**26,), 0x7F, dtype=torch.uint8, device="cuda")
        del dirty
        for made in replays(x):
            assert not made.any()
