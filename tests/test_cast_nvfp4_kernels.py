"""The Triton kernels of NVFP4 against the plain torch ones, bit for bit: interpreted here, compiled on a GPU."""

import pytest
import torch

from recipes.kernels import cast_nvfp4 as nvfp4
from recipes.kernels.random import new_seed
from recipes.splits import Splits
from tests.grouped_cases import DEVICES

DEVICE = pytest.mark.parametrize("device", DEVICES)
KINDS = {
    "nearest": {},
    "rht": {"rht": True},
    "stochastic": {"rht": True, "seed": True},
    "16x16": {"two_d": True},
    "row-scaled": {"rht": True, "row_scaled": True},
}


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """The launchers launch, also on CPU tensors."""
    monkeypatch.setattr(nvfp4, "runs_triton", lambda x: True)


def bits(tensor):
    """Bytes of a tensor on the CPU, comparable with NaN in it."""
    return None if tensor is None else tensor.cpu().flatten().view(torch.uint8).tolist()


def spread(*shape, dtype):
    """Values whose blocks differ in size, some of them far below the others; a few zeros of both signs."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-9, 9, (shape[-2], 1)).float())
    x[..., ::7, ::3] *= 0.0
    return x.to(dtype)


def check(x, sizes, device, *, rht=False, row_scaled=False, two_d=False, seed=False, rowwise=True, columnwise=True):
    seed = new_seed(torch.device("cpu")) if seed else None
    on_cpu, on_device = (
        None if sizes is None else Splits.make(sizes, rows=x.shape[-2], device=place) for place in ("cpu", device)
    )
    kind = {"rht": rht, "row_scaled": row_scaled}
    copies = {"rowwise": rowwise, "columnwise": columnwise}
    expected_amaxes = nvfp4.amax_nvfp4_ref(x, on_cpu, **copies, **kind)
    amaxes = nvfp4.amax_nvfp4(x.to(device), on_device, **copies, **kind)
    for name, found, expected in zip(amaxes._fields, amaxes, expected_amaxes, strict=True):
        assert bits(found) == bits(expected), f"amax {name}"
    expected = nvfp4.cast_nvfp4_ref(x, on_cpu, expected_amaxes, two_d=two_d, seed=seed, **kind)
    on_seed = None if seed is None else seed.to(device)
    made = nvfp4.cast_nvfp4(x.to(device), on_device, amaxes, two_d=two_d, seed=on_seed, **kind)
    for name, found, wanted in zip(made._fields, made, expected, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            assert bits(found) == bits(wanted), name
    for codes, scale, length, transpose in (
        (expected.rowwise, expected.rowwise_scale, x.shape[-1], False),
        (expected.columnwise, expected.columnwise_scale, None, True),
    ):
        if codes is not None:
            length = length or scale.shape[-1] * 16
            for dtype in (torch.bfloat16, torch.float32):
                wanted = nvfp4.dequantize_nvfp4_ref(codes, scale, length, dtype, transpose=transpose)
                found = nvfp4.dequantize_nvfp4(codes.to(device), scale.to(device), length, dtype, transpose=transpose)
                assert found.shape == wanted.shape and found.dtype == dtype
                torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@DEVICE
@pytest.mark.parametrize("kind", KINDS)
def test_one_tensor(device, kind):
    check(spread(70, 136, dtype=torch.bfloat16), None, device, **KINDS[kind])
