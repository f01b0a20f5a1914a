"""The Triton kernels of the norms against float64, under the interpreter and on a GPU."""
# T rows, N columns

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ops.kernels.norm import norm_triton
from ops.kernels.norm.l2_normalization import l2_normalization_ref
from ops.kernels.norm.layer_norm import layer_norm_ref
from ops.kernels.norm.norm_triton import (
    dnorm_config,
    dnorm_stages,
    dnorm_triton,
    dparameters_config,
    norm_config,
    runs_in_triton,
)
from ops.kernels.norm.rms_norm import rms_norm_ref
from tests.check_operation import DTYPES
from tests.grouped_cases import DEVICES
from tests.reference import ROUNDED_ONCE, assert_close, assert_same_bits, capture, no_host_sync

EPS = 0.3
# Sums of many rows nearly cancel here and there.
TOLERANCES = {**ROUNDED_ONCE, torch.float32: 1e-5}
# Triton 3.6's interpreter turns arrays of one element into loop bounds, which numpy >= 2.4 will refuse.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")


class Kind(NamedTuple):
    """Which of the norms, as settings of the kernels."""

    centered: bool = False
    zero_centered: bool = False
    weight: bool = True
    bias: bool = False

    def inv_count(self, N: int) -> float:
        return 1 / N if self.weight else 1.0

    def reference(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is None:
            return l2_normalization_ref(x, EPS)
        if bias is None:
            return rms_norm_ref(x, weight, EPS, zero_centered=self.zero_centered)
        return layer_norm_ref(x, weight, bias, EPS, zero_centered=self.zero_centered)


KINDS = {
    "rms": Kind(),
    "rms zero-centred": Kind(zero_centered=True),
    "layer": Kind(centered=True, bias=True),
    "layer zero-centred": Kind(centered=True, zero_centered=True, bias=True),
    "l2": Kind(weight=False),
}
SHAPES = [
    # ordinary
    pytest.param((6, 64), id="ordinary"),
    pytest.param((300, 128), id="several steps"),
    pytest.param((3, 5, 2048), id="a step for each row"),
    # odd sizes
    pytest.param((33, 70), id="odd width"),
    pytest.param((3, 2049), id="just over a step"),
    pytest.param((5, 1), id="one column"),
    pytest.param((40,), id="one row"),
    # none
    pytest.param((0, 40), id="no rows"),
    pytest.param((2, 0, 3), id="no rows of three dimensions"),
]
all_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
all_devices = pytest.mark.parametrize("device", DEVICES)
NARROW = [dtype for dtype in DTYPES if dtype.id != "fp64"]


class Operands(NamedTuple):
    x: Tensor
    dy: Tensor
    added: Tensor
    weight: Tensor | None
    bias: Tensor | None


def operands(shape: tuple[int, ...], kind: Kind, dtype: torch.dtype, device: str, seed: int = 0) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    shapes = [shape, shape, shape, shape[-1:] if kind.weight else None, shape[-1:] if kind.bias else None]
    return Operands(*(None if s is None else torch.randn(s, generator=generator).to(device, dtype) for s in shapes))


def check(given: Operands, kind: Kind, needs: tuple[str, ...] = ("dx", "dweight", "dbias"), join: bool = False) -> None:
    """y and the gradients that are needed (and possible) agree with float64 autograd of the reference."""
    x, dy, added, weight, bias = given
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected_y = kind.reference(*wide)
    leaves = [t for t in wide if t is not None]
    found = torch.autograd.grad(expected_y, leaves, dy.double())
    gradients = dict(zip(("dx", "dweight", "dbias"), found, strict=False))
    if join:
        gradients["dx"] = gradients["dx"] + added.double()
    expected = {"y": expected_y, **{n: gradients.get(n) if n in needs else None for n in ("dx", "dweight", "dbias")}}
    assert_close(run(given, kind, needs, join), expected, TOLERANCES, floor=1e-3)


def run(given: Operands, kind: Kind, needs: tuple[str, ...], join: bool = False) -> dict[str, Tensor | None]:
    x, dy, added, weight, bias = given
    scale = kind.inv_count(x.shape[-1])
    y, mean, rstd = norm_triton.norm_triton(
        x, weight, bias, EPS, scale, centered=kind.centered, zero_centered=kind.zero_centered
    )
    dx, dweight, dbias = dnorm_triton(
        dy, x, mean, rstd, weight, scale, zero_centered=kind.zero_centered, need_dx="dx" in needs,
        need_dweight="dweight" in needs and kind.weight, need_dbias="dbias" in needs and kind.bias,
        added=added if join else None,
    )  # fmt: skip
    assert y.is_contiguous() and y.dtype == x.dtype and rstd.dtype == torch.float32
    for sums in (dweight, dbias):
        assert sums is None or sums.dtype == torch.float32
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}


@pytest.mark.pairwise
@pytest.mark.launches("norm_kernel", "dnorm_kernel")
@all_devices
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", NARROW)
@all_kinds
def test_kernels_agree_with_float64(kind: Kind, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    check(operands(shape, kind, dtype, device), kind)


@pytest.mark.pairwise
@all_devices
@pytest.mark.parametrize(
    "needs", [(), ("dx",), ("dweight",), ("dbias",), ("dweight", "dbias"), ("dx", "dbias")], ids=str
)
@pytest.mark.parametrize("shape", [(300, 150), (0, 40)], ids=str)
@all_kinds
def test_only_what_is_needed_is_computed(
    kind: Kind, shape: tuple[int, ...], needs: tuple[str, ...], device: str
) -> None:
    check(operands(shape, kind, torch.bfloat16, device), kind, needs)


@pytest.fixture
def narrow_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are wide from 32 columns on: the interpreter is too slow for those that really are."""
    monkeypatch.setattr(norm_triton, "_WIDEST_FORWARD", 32)
    monkeypatch.setattr(norm_triton, "_WIDEST_BACKWARD", 32)
    wide = norm_triton.NormConfig(1, 32, num_warps=4, programs=0)
    for name in ("norm_config", "dnorm_config"):
        monkeypatch.setattr(norm_triton, name, lambda rows, *_: wide._replace(programs=rows))


@pytest.mark.pairwise
@pytest.mark.launches("dparameters_kernel")
@pytest.mark.usefixtures("narrow_registers")
@all_devices
@pytest.mark.parametrize("join", [False, True], ids=["", "added"])
@pytest.mark.parametrize("shape", [(5, 70), (3, 64), (0, 70)], ids=str)
@pytest.mark.parametrize("dtype", NARROW)
@all_kinds
def test_rows_wider_than_registers(
    kind: Kind, dtype: torch.dtype, shape: tuple[int, ...], join: bool, device: str
) -> None:
    check(operands(shape, kind, dtype, device), kind, join=join)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [8192, 8193, 16384, 16385, 40000])
@pytest.mark.parametrize("dtype", NARROW)
@all_kinds
def test_very_wide_rows(kind: Kind, dtype: torch.dtype, N: int) -> None:
    for join in (False, True):
        check(operands((37, N), kind, dtype, "cuda"), kind, join=join)


@all_devices
@pytest.mark.parametrize("dtype", NARROW)
@all_kinds
def test_added_joins_dx_before_it_is_rounded(kind: Kind, dtype: torch.dtype, device: str) -> None:
    given = operands((33, 70), kind, dtype, device)
    wide = Operands(*(None if t is None else t.float() for t in given))
    needs = ("dx", "dweight", "dbias")
    apart, together = run(wide, kind, needs, False), run(given, kind, needs, True)
    assert apart["dx"] is not None
    assert_same_bits(together, {**apart, "y": together["y"], "dx": (apart["dx"] + wide.added).to(dtype)})


@all_devices
@all_kinds
def test_strides_do_not_matter(kind: Kind, device: str) -> None:
    given = operands((33, 70), kind, torch.float32, device)
    strided = [None if t is None else torch.stack([t, t], -1)[..., 0] for t in given]
    strided[0] = given.x.t().contiguous().t()
    needs = ("dx", "dweight", "dbias")
    assert_same_bits(run(Operands(*strided), kind, needs, True), run(given, kind, needs, True))


@pytest.mark.slow
@pytest.mark.interpreter
@settings(max_examples=25)
@given(
    T=st.integers(0, 40),
    N=st.integers(1, 300),
    kind=st.sampled_from(list(KINDS.values())),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    join=st.booleans(),
    seed=st.integers(0, 99),
)
def test_kernels_agree_for_any_shape(T: int, N: int, kind: Kind, dtype: torch.dtype, join: bool, seed: int) -> None:
    check(operands((T, N), kind, dtype, "cpu", seed), kind, join=join)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NARROW)
@all_kinds
def test_large_shapes_repeat_bit_for_bit(kind: Kind, dtype: torch.dtype) -> None:
    given = operands((8192, 4096), kind, dtype, "cuda")
    needs = ("dx", "dweight", "dbias")
    first = run(given, kind, needs)
    for _ in range(3):
        assert_same_bits(run(given, kind, needs), first)
    check(given, kind)


@pytest.mark.gpu
def test_addresses_pass_two_to_the_31() -> None:
    rows, N = (2**31 + 2**20) // 4096, 4096
    x = torch.ones(rows, N, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(N)
    y, _, rstd = norm_triton.norm_triton(x, None, None, EPS, 1.0)
    dx, _, _ = dnorm_triton(x, x, None, rstd, None, 1.0)
    last, _, last_rstd = norm_triton.norm_triton(x[-1:], None, None, EPS, 1.0)
    last_dx, _, _ = dnorm_triton(x[-1:], x[-1:], None, last_rstd, None, 1.0)
    assert dx is not None
    assert_same_bits({"y": y[-1:], "dx": dx[-1:]}, {"y": last, "dx": last_dx})


@pytest.mark.gpu
@all_kinds
def test_launching_never_waits_and_may_be_replayed(kind: Kind) -> None:
    given = operands((300, 150), kind, torch.bfloat16, "cuda")
    needs = ("dx", "dweight", "dbias")
    graph, replayed = capture(lambda: run(given, kind, needs, True))
    fresh = operands((300, 150), kind, torch.bfloat16, "cuda", seed=1)
    for old, new in zip(given, fresh, strict=True):
        if old is not None:
            old.copy_(new)
    graph.replay()
    with no_host_sync():
        eager = run(given, kind, needs, True)
    assert_same_bits(replayed, eager)


# Configurations


@pytest.mark.parametrize("sms", [1, 78, 132])
@pytest.mark.parametrize("N", [1, 16, 17, 100, 2048, 2049, 4096, 8192, 8193, 16384, 16385, 100_000])
@pytest.mark.parametrize("rows", [0, 1, 100, 1_000_000])
def test_configurations_cover_all_rows_and_fit(rows: int, N: int, sms: int) -> None:
    forward, backward, parameters = norm_config(rows, N), dnorm_config(rows, N, sms), dparameters_config(rows, N, sms)
    assert forward.programs * forward.block_m >= rows
    for config in (forward, backward, parameters):
        elements = config.block_m * config.block_n
        assert elements <= 32 * 32 * config.num_warps, "32 values a thread"
        assert config.block_m & (config.block_m - 1) == 0 and config.block_n & (config.block_n - 1) == 0
        assert (config.programs > 0) == (rows > 0)
    if backward.block_n >= N:
        assert backward.programs * backward.num_warps <= 16 * sms, "all programs are resident at once"
    assert parameters.programs <= max(1, 4 * sms)


@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10, 227 << 10])  # RTX 40, A100, H100
@pytest.mark.parametrize("element_bytes", [6, 8, 12, 16])
@pytest.mark.parametrize("N", [16, 1024, 4096, 8192, 8193])
def test_what_is_loaded_ahead_fits_into_shared_memory(N: int, element_bytes: int, shared_memory: int) -> None:
    config = dnorm_config(1_000_000, N, sms=132)
    num_stages = dnorm_stages(config, N, element_bytes, shared_memory)
    ahead = (num_stages - 1) * config.block_m * config.block_n * element_bytes
    assert ahead * (16 // config.num_warps) < shared_memory, "all programs are resident at once"
    assert num_stages == 1 or N >= 1024
    if 1024 <= N <= 8192 and element_bytes <= 8 and shared_memory > 200_000:
        assert num_stages == 3


def test_kernels_run_on_a_gpu_and_not_in_float64() -> None:
    assert runs_in_triton(torch.device("cuda"), torch.bfloat16)
    assert not runs_in_triton(torch.device("cuda"), torch.float64)
    assert not runs_in_triton(torch.device("cpu"), torch.bfloat16)
