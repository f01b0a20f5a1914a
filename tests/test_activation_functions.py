"""The activations as functions of Triton tiles against float64 autograd, interpreted or on a GPU, and compiled.

Run as a program, this file compiles each of them for sm_90a and prints a line of JSON; the test runs it in a
subprocess, because under the interpreter, which the other tests use, Triton compiles nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kernels.elementwise.activation import KINDS, Activation, activation_ref, constants
from ops.kernels.elementwise.activation_functions import RULES, sigmoids, tanh_and_slope
from tests.compiling import ROOT, compiling
from tests.grouped_cases import DEVICES
from tests.test_compile_sm90 import OfflineDriver

BLOCK = 1024
UNIT = 2.0**-24  # half a unit in the last place of float32, relative
SPECS = [pytest.param(Activation(kind), id=kind) for kind in KINDS] + [
    pytest.param(Activation("clamped_swiglu", limit=0.75, alpha=-0.5, glu_linear_offset=0.0), id="clamped_swiglu-odd"),
    pytest.param(Activation("situglu", beta1=3.0, beta2=12.0), id="situglu-3-12"),
]


@triton.jit
def forward_kernel(
    a_ptr, b_ptr, y_ptr, N, F: tl.constexpr, GATED: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    a = tl.load(a_ptr + offs, mask)
    if GATED:
        y = F(a, tl.load(b_ptr + offs, mask), A, B, C)
    else:
        y = F(a, A, B, C)
    tl.store(y_ptr + offs, y, mask)


@triton.jit
def backward_kernel(
    dy_ptr, a_ptr, b_ptr, da_ptr, db_ptr, N, F: tl.constexpr, GATED: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    dy = tl.load(dy_ptr + offs, mask)
    a = tl.load(a_ptr + offs, mask)
    if GATED:
        da, db = F(dy, a, tl.load(b_ptr + offs, mask), A, B, C)
        tl.store(db_ptr + offs, db, mask)
    else:
        da = F(dy, a, A, B, C)
    tl.store(da_ptr + offs, da, mask)


@triton.jit
def two_values_kernel(x_ptr, first_ptr, second_ptr, N, F: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    first, second = F(tl.load(x_ptr + offs, mask))
    tl.store(first_ptr + offs, first, mask)
    tl.store(second_ptr + offs, second, mask)


def grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), BLOCK),)


def run(spec: Activation, dy: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """y, da and (if it is gated) db."""
    y, da, db = (torch.full_like(a, torch.nan) for _ in range(3))
    forward_kernel[grid(a)](a, b, y, a.numel(), RULES[spec.kind].triton_forward, spec.gated, *constants(spec), BLOCK)
    backward_kernel[grid(a)](
        dy, a, b, da, db, a.numel(), RULES[spec.kind].triton_backward, spec.gated, *constants(spec), BLOCK
    )
    return {"y": y, "da": da, **({"db": db} if spec.gated else {})}


def exact(spec: Activation, dy: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """The same in float64 by autograd, on the CPU."""
    wide = [t.detach().cpu().double().requires_grad_() for t in ((a, b) if spec.gated else (a,))]
    y = activation_ref(torch.stack(wide, -1) if spec.gated else wide[0][:, None], spec)[:, 0]
    gradients = torch.autograd.grad(y, wide, dy.cpu().double())
    return dict(zip(("y", "da", "db"), (y.detach(), *gradients), strict=False))


def scales(spec: Activation, dy: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """The magnitudes that errors are measured by: products of the factors' least upper bounds, or nearly."""
    dy, a, b = (t.cpu().double().abs() for t in (dy, a, b))
    gate, slope, linear = a, torch.ones_like(a), b if spec.gated else torch.ones_like(b)
    match spec.kind:
        case "srelu" | "sreglu":
            gate, slope = a.square(), 2 * a
        case "glu":
            gate = torch.ones_like(a)
        case "clamped_swiglu":
            linear = b.clamp(max=spec.limit) + abs(spec.glu_linear_offset)
        case "situglu":
            gate, linear = a.clamp(max=spec.beta1), b.clamp(max=spec.beta2)
    return {"y": gate * linear, "da": dy * slope * linear, "db": dy * gate}


def check(spec: Activation, dy: Tensor, a: Tensor, b: Tensor) -> None:
    got, want, natural = run(spec, dy, a, b), exact(spec, dy, a, b), scales(spec, dy, a, b)
    assert got.keys() == want.keys()
    for name, value in got.items():
        error = (value.cpu().double() - want[name]).abs() / (natural[name] + 1e-37)
        worst = int(error.nan_to_num(nan=torch.inf).argmax())
        assert error[worst] <= 8 * UNIT, (
            f"{name}: {value[worst].item()}, expected {want[name][worst].item()} for a={a[worst].item()}, "
            f"b={b[worst].item()}, dy={dy[worst].item()}: off by {error[worst].item() / UNIT:.1f} units"
        )


def random(count: int, spread: float, device: str) -> list[Tensor]:
    """dy, a, b."""
    dy, a, b = torch.randn(3, count)
    return [t.to(device) for t in (dy, a * spread, b * spread)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", [1e-30, 1e-3, 0.3, 1.0, 5.0, 40.0, 1e4], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_values_and_gradients_agree_with_float64(spec: Activation, spread: float, device: str) -> None:
    check(spec, *random(3001, spread, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS)
def test_kinks_limits_and_large_numbers(spec: Activation, device: str) -> None:
    below, beyond = (torch.nextafter(torch.tensor(0.75), torch.tensor(to)).item() for to in (0.0, 1.0))
    special = [0.0, 0.6, below, 0.75, beyond, 4.0, 7.0, 25.0, 30.0, 89.0, 1e4, 1e12]
    values = torch.tensor([sign * x for x in special for sign in (1, -1)], device=device)
    a, b = torch.cartesian_prod(values, values[values.abs() <= 1e4]).unbind(1)
    check(spec, torch.ones_like(a), a.contiguous(), b.contiguous())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS)
def test_infinity_gives_what_the_formula_gives(spec: Activation, device: str) -> None:
    """Where the formula in float64 is NaN (infinity times zero), anything may come."""
    values = torch.tensor([torch.inf, -torch.inf, 0.5, -0.5], device=device)
    a, b = torch.cartesian_prod(values, values).unbind(1)
    a, b = a.contiguous(), b.contiguous()
    with np.errstate(invalid="ignore"):  # the interpreter computes with numpy, which warns of it
        got = run(spec, torch.ones_like(a), a, b)
    want = exact(spec, torch.ones_like(a), a, b)
    for name, value in got.items():
        known = ~want[name].isnan()
        torch.testing.assert_close(value.cpu()[known].double(), want[name][known], rtol=8 * UNIT, atol=2.0**-110)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS)
def test_nan_stays_nan(spec: Activation, device: str) -> None:
    _, a, b = random(5, 1.0, device)
    a[1] = b[2] = torch.nan
    spoilt = [1, 2] if spec.gated else [1]
    y = run(spec, torch.ones_like(a), a, b)["y"]
    assert y.isnan().nonzero().flatten().tolist() == spoilt
    dy = torch.ones_like(a)
    dy[3] = torch.nan
    a.abs_().clamp_(max=0.5)  # where relu hands the gradient on, and the clamps do
    b.clamp_(-0.5, 0.5)
    for name, gradient in run(spec, dy, a, b).items():
        assert name == "y" or gradient[3].isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_parts_are_accurate_relative_to_themselves(device: str) -> None:
    """tanh near 0 and far, and both sides of the sigmoid, whose logarithms carry the error of their argument."""
    tiny = torch.tensor([0.0, 1e-38, 1e-30, 1e-8, 1e-4, 0.5999999, 0.6, 0.6000001, 9.0, 20.0, 1e4, torch.inf])
    x = torch.cat([tiny, *(torch.rand(5000) * width for width in (1e-3, 0.6, 1.0, 10.0, 40.0))])
    x = torch.cat([x, -x]).to(device)
    wide = x.cpu().double()
    for function, expected in (
        (tanh_and_slope, (wide.tanh(), 1 / wide.cosh().square())),
        (sigmoids, (wide.sigmoid(), (-wide).sigmoid())),
    ):
        found = [torch.full_like(x, torch.nan) for _ in range(2)]
        two_values_kernel[grid(x)](x, *found, x.numel(), function, BLOCK)
        for value, want in zip(found, expected, strict=True):
            error = (value.cpu().double() - want).abs()
            growth = (4 if function is tanh_and_slope else 2) * wide.abs().clamp(max=200)  # of exp(-2x), exp(-x)
            if want is expected[0] and function is tanh_and_slope:
                growth = torch.zeros_like(wide)
            assert (error <= (6 + growth) * UNIT * want.abs() + 1e-37).all(), (
                f"{function}: {(error / (want.abs() + 1e-37) / UNIT).max().item()} units"
            )


# Compiled

# How many exponentials a tile's element takes, forward and backward.
EXPONENTIALS = {**dict.fromkeys(KINDS, 1), **dict.fromkeys(("relu", "reglu", "srelu", "sreglu"), 0), "situglu": 3}


def compile_all() -> None:
    triton.runtime.driver.set_active(OfflineDriver(90))
    pointer = torch.float32
    for kind in KINDS:
        spec = Activation(kind)
        about: dict[str, Any] = dict(GATED=spec.gated, **dict(zip("ABC", constants(spec), strict=True)), BLOCK=128)
        kernels = {
            "forward": forward_kernel.warmup(*[pointer] * 3, 1024, F=RULES[kind].triton_forward, **about, grid=(8,)),
            "backward": backward_kernel.warmup(*[pointer] * 5, 1024, F=RULES[kind].triton_backward, **about, grid=(8,)),
        }
        for way, kernel in kernels.items():
            # 128 threads: each has one element, so an instruction is there as often as it is executed.
            print(json.dumps({"kind": kind, "way": way, "exponentials": kernel.asm["ptx"].count("ex2.approx")}))


@pytest.mark.slow
def test_all_of_them_compile_for_hopper_with_few_exponentials(tmp_path: Any) -> None:
    done = subprocess.run([sys.executable, __file__], env=compiling(tmp_path), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    found = {(report["kind"], report["way"]): report["exponentials"] for report in reports}
    assert found == {(kind, way): EXPONENTIALS[kind] for kind in KINDS for way in ("forward", "backward")}


if __name__ == "__main__":
    compile_all()
