"""The end of a step of delayed scaling: the kernel against torch, bit for bit, for histories of any length."""

import pytest
import torch

from recipes.kernels.amax_history import end_step, end_step_ref, end_step_triton

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning"),
]

LARGEST = 448.0 / 8


def state(length: int, num_scales: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A history with zeros, subnormal and huge numbers, Inf and NaN in any slot, and scales."""
    history = torch.randn(length, num_scales).abs() * 2.0 ** torch.randint(-140, 120, (length, num_scales))
    for special in (0.0, float("inf"), float("nan"), 2.0**-149):
        history[torch.rand(length, num_scales) < 0.5 / max(length, 4)] = special
    history[0, torch.rand(num_scales) < 0.2] = 0.0
    return history.to(device), torch.rand(num_scales).add(0.5).to(device)


def check(length: int, num_scales: int, most_recent: bool, device: str) -> None:
    history, scale = state(length, num_scales, device)
    theirs = history.clone(), scale.clone()
    end_step_triton(history, scale, LARGEST, most_recent)
    end_step_ref(*theirs, LARGEST, "most_recent" if most_recent else "max")
    torch.testing.assert_close(history, theirs[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scale, theirs[1], rtol=0, atol=0)


@pytest.mark.interpreter
@pytest.mark.parametrize("most_recent", [False, True], ids=["max", "most_recent"])
@pytest.mark.parametrize("num_scales", [1, 16, 33])
@pytest.mark.parametrize("length", [1, 2, 3, 256, 257, 700])
def test_kernel_equals_the_reference_interpreted(length, num_scales, most_recent):
    check(length, num_scales, most_recent, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("most_recent", [False, True], ids=["max", "most_recent"])
@pytest.mark.parametrize("num_scales", [1, 16, 33, 256])
@pytest.mark.parametrize("length", [1, 2, 16, 257, 1024, 1500])
def test_kernel_equals_the_reference(length, num_scales, most_recent):
    for _ in range(5):
        check(length, num_scales, most_recent, "cuda")


def test_a_function_decides_in_place_of_the_formulas():
    history, scale = torch.tensor([[2.0], [6.0]]), torch.ones(1)
    end_step(history, scale, LARGEST, lambda h: h.mean(0))
    assert scale.item() == LARGEST / 4 and history.tolist() == [[0.0], [2.0]]
