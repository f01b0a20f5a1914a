"""The router's products: as in float32, whatever dtypes, and the same through the kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ops.kernels.routing.router_product import dgrad_triton, gradients_of, in_parts, logits_of, split_triton
from tests.check_operation import DEVICES
from tests.grouped_cases import DEVICES as KERNEL_DEVICES

# Of norms. Sums of 2,048 products by an H200's tensor cores err by 2.5e-6; with operands rounded to TF32 by 2e-4, to
# bfloat16 by 2e-3.
TOLERANCE = 4e-6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
on_kernels = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def numbers(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Of different magnitudes."""
    return (torch.randn(*shape, device=device) * (0.5 + torch.rand(*shape, device=device))).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens, experts, hidden", [(1, 8, 64), (77, 7, 100), (513, 128, 2048), (300, 60, 72)])
@pytest.mark.parametrize("of_weight", DTYPES, ids=str)
@pytest.mark.parametrize("of_x", DTYPES, ids=str)
def test_products_err_as_those_of_float32(
    of_x: torch.dtype, of_weight: torch.dtype, tokens: int, experts: int, hidden: int, device: str
) -> None:
    x, dy = (numbers(tokens, hidden, dtype=of_x, device=device) for _ in range(2))
    weight = numbers(experts, hidden, dtype=of_weight, device=device)
    bias, dlogits = (numbers(*n, dtype=torch.float32, device=device) for n in ((experts,), (tokens, experts)))
    logits = logits_of(x, weight, bias)
    assert logits.dtype == torch.float32
    assert error(logits, x.double() @ weight.double().t() + bias.double()) < TOLERANCE
    exact = dlogits.double() @ weight.double()
    dx, dweight = gradients_of(dlogits, weight=weight, x=x, dy=None)
    assert dx is not None and dx.dtype == torch.float32
    assert error(dx, exact) < TOLERANCE
    assert dweight is not None and dweight.dtype == torch.float32
    assert error(dweight, dlogits.double().t() @ x.double()) < TOLERANCE
    dx, nothing = gradients_of(dlogits, weight=weight, x=None, dy=dy)
    exact += dy.double()
    assert nothing is None and dx is not None and dx.shape == dy.shape
    half = 0.5 * torch.finfo(dx.dtype).eps * exact.abs() + TOLERANCE * exact.norm() / exact.numel() ** 0.5 * 10
    assert ((dx.double() - exact).abs() <= half).all(), "the sum is rounded once"


@pytest.mark.launches("split_kernel")
@on_kernels
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("rows, columns", [(1, 1), (5, 7), (40, 128)])
def test_the_parts_of_a_number_are_all_of_it(rows: int, columns: int, device: str) -> None:
    x = torch.randn(rows, columns, device=device) * 2.0 ** torch.randint(-20, 20, (rows, columns), device=device)
    x[0, 0] = 1 + 2**-23
    parts = torch.full((rows, 3 * columns), float("nan"), dtype=torch.bfloat16, device=device)
    split_triton(x, parts)
    summands = parts.double().unflatten(1, (3, columns))
    assert torch.equal(summands.sum(1), x.double())
    assert (summands[:, 1].abs() <= summands[:, 0].abs() * 2**-7).all()


@pytest.mark.launches("dgrad_kernel")
@on_kernels
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("added", [torch.bfloat16, torch.float32, None], ids=str)
@pytest.mark.parametrize("tokens, experts, hidden", [(5, 3, 7), (130, 70, 136)])
def test_the_kernel_of_dx_agrees_with_torch(
    tokens: int, experts: int, hidden: int, added: torch.dtype | None, dtype: torch.dtype, device: str
) -> None:
    dlogits = numbers(tokens, experts, dtype=torch.float32, device=device)
    weight = numbers(experts, hidden, dtype=dtype, device=device)
    dy = None if added is None else numbers(tokens, hidden, dtype=added, device=device)
    dx = torch.full((tokens, hidden), float("nan"), dtype=added or torch.float32, device=device)
    given = weight if dtype == torch.bfloat16 else in_parts(weight)
    dgrad_triton(in_parts(dlogits), given, dy, dx)
    exact = dlogits.double() @ weight.double() + (0 if dy is None else dy.double())
    assert error(dx, exact) < (3e-3 if added == torch.bfloat16 else TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "product, expected",
    [
        (lambda x, w, d: logits_of(x, w, None), [torch.bfloat16, torch.float16]),
        (lambda x, w, d: gradients_of(d, weight=w, x=None, dy=x), [torch.float32, torch.bfloat16]),
        (lambda x, w, d: gradients_of(d, weight=None, x=x, dy=None), [torch.bfloat16]),
    ],
    ids=["logits", "dx", "dweight"],
)
def test_tensor_cores_multiply_what_is_said_and_nothing_else(
    product: Callable[..., object], expected: list[torch.dtype]
) -> None:
    taken: list[torch.dtype] = []

    def runs(dtype: torch.dtype) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            x, weight = torch.randn(256, 512, device="cuda", dtype=dtype), torch.randn(64, 512, device="cuda").to(dtype)
            dlogits = torch.randn(256, 64, device="cuda")
            product(x, weight, dlogits)
            torch.cuda.synchronize()
        names = [event.key for event in profile.key_averages()]
        if not any("sgemm" in name or "f32f32_f32f32" in name for name in names):
            taken.append(dtype)

    for dtype in DTYPES:
        runs(dtype)
    assert taken == expected


def test_without_tokens_there_is_nothing_to_multiply() -> None:
    x, weight, dlogits = torch.empty(0, 8), torch.randn(4, 8), torch.empty(0, 4)
    assert logits_of(x, weight, torch.ones(4)).shape == (0, 4)
    dx, dweight = gradients_of(dlogits, weight=weight, x=x, dy=x)
    assert dx is not None and dx.shape == (0, 8)
    assert dweight is not None and torch.equal(dweight, torch.zeros(4, 8))
