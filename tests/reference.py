"""What the tests of grouped operations share: naive float64 references, cases of splits, and one comparison.

The references are differentiable by autograd, loop over groups in Python, and know nothing of the code under test.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# T rows, G groups, K in features, N out features

# Largest error, relative to the largest magnitude of the expected tensor, of a value that is rounded once to the
# dtype: half a spacing for the 16-bit ones (2^-9, 2^-12, doubled for the operands' own sums), and the float32 error of
# sums of a few hundred products.
ROUNDED_ONCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
# The same for a chain of operations, each of which rounds what it hands on.
ROUNDED_OFTEN: Mapping[torch.dtype, float] = {
    torch.float64: 1e-11,
    torch.float32: 3e-5,
    torch.float16: 2.0**-7,
    torch.bfloat16: 2.0**-4,
}

Tensors = Mapping[str, Tensor | None]


def assert_close(
    actual: Tensors,
    expected: Tensors,
    tolerances: Mapping[torch.dtype, float] = ROUNDED_ONCE,
    *,
    computed_in: torch.dtype | None = None,
    floor: float = 0.0,
) -> None:
    """Every tensor near the one expected of the same name; None only where None is expected.

    computed_in: whose tolerance holds, if not that of each tensor's own dtype.
    floor: the least magnitude that the tolerance is relative to; sums of a few numbers may cancel by chance.
    """
    assert actual.keys() == expected.keys()
    for name, got in actual.items():
        want = expected[name]
        if got is None or want is None:
            assert got is want, f"{name} is {'missing' if got is None else 'there, though nothing wants it'}"
            continue
        assert got.shape == want.shape, f"{name} is {list(got.shape)}, expected {list(want.shape)}"
        if got.numel() == 0:
            continue
        error = (got.detach().cpu().double() - want.detach().cpu().double()).abs().nan_to_num(nan=float("inf"))
        scale = max(want.detach().double().abs().max().item(), floor, 1e-30)
        allowed = tolerances[computed_in or got.dtype]
        worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        assert error.max().item() <= allowed * scale, (
            f"{name}: off by {error.max().item():.3e} at {worst} (RMS {error.square().mean().sqrt().item():.3e}), "
            f"allowed {allowed:.1e} of {scale:.3e}"
        )


def assert_same_bits(actual: Tensors, expected: Tensors) -> None:
    """Every tensor equal, bit for bit but for the sign of zero."""
    assert actual.keys() == expected.keys()
    for name, got in actual.items():
        want = expected[name]
        if got is None or want is None:
            assert got is want, f"{name} is {'missing' if got is None else 'there, though nothing wants it'}"
            continue
        assert got.dtype == want.dtype, f"{name} is {got.dtype}, expected {want.dtype}"
        assert got.shape == want.shape, f"{name} is {list(got.shape)}, expected {list(want.shape)}"
        differ = (got != want) & ~(got.isnan() & want.isnan())
        assert not differ.any(), (
            f"{name}: {int(differ.sum())} of {differ.numel()} elements differ, the first at "
            f"{differ.nonzero()[0].tolist()}: {got[differ][0].item()!r}, expected {want[differ][0].item()!r}"
        )


def grouped_linear(
    x_TK: Tensor,
    w_GNK: Tensor,
    sizes: Sequence[int],
    bias_GN: Tensor | None = None,
    scales_T: Tensor | None = None,
) -> Tensor:
    """[T, N]: each group's rows times its weight, zero past the sum of the sizes."""
    y = []
    begin = 0
    for group, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        y_g = x_TK[rows] @ w_GNK[group].T
        if bias_GN is not None:
            y_g = y_g + (bias_GN[group] if scales_T is None else scales_T[rows, None] * bias_GN[group])
        y.append(y_g)
        begin += size
    y.append(x_TK.new_zeros(x_TK.shape[0] - begin, w_GNK.shape[1]))
    return torch.cat(y)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """`torch.clamp`, with a gradient at the limits too, as torch's was up to 2.13."""
    return torch.where(x < low, low, torch.where(x > high, high, x))


def gated(h: Tensor, kind: str, interleave: int | None = None) -> Tensor:
    """The activation of that name, without scales.

    swiglu, clamped_swiglu (limit 7, alpha 1.702, offset 1), situglu (beta1 4, beta2 25), srelu.
    """
    if kind == "srelu":
        return F.relu(h).square()
    if interleave is None:
        a, b = h.chunk(2, -1)
    else:
        blocks = h.reshape(*h.shape[:-1], h.shape[-1] // (2 * interleave), 2, interleave)
        a, b = blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)
    if kind == "swiglu":
        return F.silu(a) * b
    if kind == "situglu":
        return 4.0 * torch.tanh(a / 4.0) * torch.sigmoid(a) * 25.0 * torch.tanh(b / 25.0)
    a, b = clamp(a, -math.inf, 7.0), clamp(b, -7.0, 7.0)
    return a * torch.sigmoid(1.702 * a) * (b + 1)


def leaves(tensors: Mapping[str, Tensor | None], dtype: torch.dtype | None = None) -> dict[str, Tensor | None]:
    """Fresh leaves of the same values, which require grad where the originals do; in `dtype` if it is given."""
    return {
        name: None if t is None else t.detach().clone().to(dtype or t.dtype).requires_grad_(t.requires_grad)
        for name, t in tensors.items()
    }


def gradients(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The .grad of each, by "gradient of <name>"."""
    return {f"gradient of {name}": None if t is None else t.grad for name, t in tensors.items()}


def random_sizes(generator: torch.Generator, groups: int, rows: int) -> list[int]:
    """Sizes that sum to `rows`, about half of them zero."""
    weights = torch.rand(groups, generator=generator) * (torch.rand(groups, generator=generator) > 0.5)
    weights[int(torch.randint(groups, (), generator=generator))] += 0.1
    chosen = torch.multinomial(weights, rows, replacement=True, generator=generator) if rows else torch.empty(0).long()
    return torch.bincount(chosen, minlength=groups).tolist()


def set_parameters(module: torch.nn.Module, values: Mapping[str, Any]) -> None:
    """Copy values into the parameters of these names."""
    with torch.no_grad():
        for name, value in values.items():
            module.get_parameter(name).copy_(value)


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Whatever waits for the CUDA device raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns once that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `step`, warmed up on a side stream, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
