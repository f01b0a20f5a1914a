"""What the tests of the grouped kernels share: splits, a naive float64 computation, and how far a result may be off."""
# T rows, G groups, K in features, N out features

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ops.kernels.grouped_gemm import tile_rules as grouped_gemm_tiles
from ops.kernels.grouped_gemm.measured_tiles import Gemm, MeasuredTile, TileTable, use_tiles
from ops.kernels.grouped_gemm.tile_rules import built_in_config
from recipes.tensors.splits import Splits

TILE = 64  # rows of the smallest tile

# Kernels run on the CPU under the interpreter, or on a GPU.
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


class Case(NamedTuple):
    """sizes of the groups, rows past their sum, in and out features (out features are even: gate and up)."""

    sizes: list[int]
    tail: int = 0
    K: int = 48
    N: int = 32


CASES = {
    # ordinary
    "three groups": Case([5, 7, 3]),
    "several tiles": Case([150, 90, 70], K=96, N=160),
    # odd sizes
    "odd features": Case([5, 7, 3], K=33, N=70),
    "one feature": Case([5, 7, 3], K=1, N=2),
    "tile - 1, tile, tile + 1": Case([TILE - 1, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1], N=130),
    "tile of features - 1": Case([9, 4], K=63, N=126),
    "tile of features + 1": Case([9, 4], K=65, N=130),
    # empty groups
    "empty groups": Case([0, 4, 0, 0, 9, 0]),
    "all empty": Case([0, 0, 0], tail=70),
    "no rows": Case([0, 0]),
    # rows of no group
    "tail": Case([5, 7, 3], tail=130),
    "tail of one row": Case([TILE, TILE], tail=1),
    # one group
    "one group": Case([100]),
    "one takes all": Case([0, 0, 200, 0]),
}
MANY_GROUPS = Case([g % 3 for g in range(257)], tail=9, K=16, N=16)


@st.composite
def cases(draw: st.DrawFn, most_rows: int, features: st.SearchStrategy[tuple[int, int]], most_groups: int = 6) -> Case:
    size = st.one_of(st.just(0), st.integers(1, most_rows), st.sampled_from([TILE - 1, TILE, TILE + 1]))
    sizes = draw(st.lists(size, min_size=1, max_size=most_groups))
    return Case(sizes, draw(st.sampled_from([0, 0, 1, 17, TILE])), *draw(features))


@contextmanager
def tiles_of_groups(rows_a_group: int, rows: int, *gemms: Gemm, gluon: bool = False) -> Iterator[None]:
    """These products of `rows` rows have Hopper's tiles for groups of so many, in Triton or Gluon: a table says so."""
    hopper = (9, 0)
    with patch.object(grouped_gemm_tiles, "why_no_gluon", lambda capability: None if gluon else "In Triton."):
        configs = [built_in_config(gemm, rows_a_group * gemm.num_groups, hopper) for gemm in gemms]
    measured = (MeasuredTile(gemm, rows, config, 0.0, 0.0) for gemm, config in zip(gemms, configs, strict=True))
    use_tiles(TileTable({}, hopper, tuple(measured)))
    try:
        yield
    finally:
        use_tiles(None)


class Operands(NamedTuple):
    """Random operands of all grouped kernels, fresh for each seed."""

    splits: Splits
    x: Tensor  # [T, K]
    w: Tensor  # [G, N, K]
    dy: Tensor  # [T, N]
    bias: Tensor  # [G, N]
    scales: Tensor  # [T]
    alpha: Tensor  # [G]


def operands(case: Case, dtype: torch.dtype, *, seed: int = 0, device: str = "cpu", integers: bool = False) -> Operands:
    """The rows of no group and their scales are NaN: a kernel that reads them shows it."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        if integers:
            return torch.randint(-3, 4, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    groups, active = len(case.sizes), sum(case.sizes)
    rows = active + case.tail
    extra_dtype = torch.promote_types(dtype, torch.float32)
    x, w, dy = random(rows, case.K), random(groups, case.N, case.K), random(rows, case.N)
    bias, scales, alpha = random(groups, case.N), random(rows, dtype=extra_dtype), random(groups, dtype=extra_dtype)
    for tensor in (x, dy, scales):
        tensor[active:] = torch.nan
    splits = Splits.make(torch.tensor(case.sizes, device=device), rows=rows, device=device)
    return Operands(splits, *(tensor.to(device) for tensor in (x, w, dy, bias, scales, alpha)))


def poisoned(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype or like.dtype, device=like.device)


class Exact(NamedTuple):
    """A result in float64, the same with absolute values everywhere, and how many terms a sum has."""

    value: Tensor
    magnitude: Tensor
    terms: int


def naive_gemm(layout: str, a: Tensor, b: Tensor, splits: Splits, *, alpha=None, bias=None, scales=None) -> Exact:
    """One product a group in float64. a, b: TN x and w; NN dy and w; NT dy and x."""
    groups, rows = splits.num_groups, splits.rows
    shapes = {
        "TN": lambda: (rows, b.shape[1]),
        "NN": lambda: (rows, b.shape[2]),
        "NT": lambda: (groups, a.shape[1], b.shape[1]),
    }
    value = torch.zeros(shapes[layout](), dtype=torch.float64, device=a.device)
    magnitude = torch.zeros_like(value)
    for result, sign in ((value, lambda t: t.double()), (magnitude, lambda t: t.double().abs())):
        for g, r in group_rows(splits):
            factor = 1 if alpha is None else sign(alpha[g])
            if layout == "NT":
                result[g] = factor * (sign(a[r]).T @ sign(b[r]))
            else:
                result[r] = factor * (sign(a[r]) @ (sign(b[g]).T if layout == "TN" else sign(b[g])))
            if bias is not None:
                result[r] += sign(bias[g]) * (1 if scales is None else sign(scales[r, None]))
    return Exact(value, magnitude, rows if layout == "NT" else a.shape[1])


def group_rows(splits: Splits) -> Iterator[tuple[int, slice]]:
    begin = 0
    for group, size in enumerate(splits.tolist()):
        yield group, slice(begin, begin + size)
        begin += size


def assert_close(name: str, actual: Tensor, exact: Exact, *, operand_dtype: torch.dtype | None = None) -> None:
    """|error| <= (terms + 3) * 2^-22 * (sum of absolute products) + half a last place of the output's dtype.

    Four times what a float32 sum in the worst order can lose; alpha, scales and bias are three more operations.
    """
    exponent = -50 if (operand_dtype or actual.dtype) == torch.float64 else -22
    limits = torch.finfo(actual.dtype)
    allowed = (exact.terms + 3) * 2.0**exponent * exact.magnitude
    allowed += (exact.value.abs() + allowed) * limits.eps / 2 + limits.smallest_normal * limits.eps / 2
    assert actual.shape == exact.value.shape, f"{name}: shape {list(actual.shape)}, not {list(exact.value.shape)}"
    if actual.numel() == 0:
        return
    error = (actual.double() - exact.value).abs()
    excess = torch.where(error.isnan(), torch.inf, error - allowed)
    worst = [int(i) for i in torch.unravel_index(excess.argmax(), excess.shape)]
    assert excess.max() <= 0, (
        f"{name}: worst at {worst}: got {actual[*worst].item()}, expected {exact.value[*worst].item()} "
        f"within {allowed[*worst].item():.3g}; max error {error.max().item():.3g}, "
        f"RMS error {error.square().mean().sqrt().item():.3g}"
    )
