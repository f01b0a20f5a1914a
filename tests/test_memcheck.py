"""What compute-sanitizer is given to watch: it runs, and reaches every parameter."""

import pytest

from tests.memcheck import TOKENS, steps

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_every_parameter_gets_a_gradient(recipe, device):
    for gradients in steps(recipe, device, TOKENS[0]):
        assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
