"""The Triton kernels of `ops.kernels.routing.router_product`, which documents and launches them."""
# T tokens, E experts, H hidden

from recipes.triton.gates import tl, triton
from recipes.triton.rounding import INTERPRET, round_to, widen

UPPER = tl.constexpr(-(2**16))  # the sign, the exponent, and 7 bits of mantissa


@triton.jit
def _upper(x):
    return (x.to(tl.int32, bitcast=True) & UPPER).to(tl.float32, bitcast=True)


@triton.jit
def _in_parts(x):
    """Three numbers of bfloat16 whose sum is float32 x, cut off after 8 bits each. (float32 under the interpreter)"""
    upper = _upper(x)
    rest = x - upper
    middle = _upper(rest)
    lower = rest - middle
    if INTERPRET:
        return upper, middle, lower
    else:
        return upper.to(tl.bfloat16), middle.to(tl.bfloat16), lower.to(tl.bfloat16)


@triton.jit
def _add_product(a, b, acc):
    """acc + a b, with a in float32 and b in bfloat16; the least first."""
    upper, middle, lower = _in_parts(a)
    acc = tl.dot(lower, b, acc)
    acc = tl.dot(middle, b, acc)
    return tl.dot(upper, b, acc)


@triton.jit(do_not_specialize=["T"])
def dgrad_kernel(
    dlogits_ptr, weight_ptr, dy_ptr, dx_ptr, T, E, H,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dx = dlogits weight + dy, rounded once. dy_ptr may be None."""
    offs_t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (offs_t < T)[:, None] & (offs_h < H)[None, :]
    at = offs_t[:, None] * H + offs_h[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for first in range(0, E, BLOCK_E):
        offs_e = first + tl.arange(0, BLOCK_E)
        mask = (offs_t < T)[:, None] & (offs_e < E)[None, :]
        dlogits = tl.load(dlogits_ptr + offs_t[:, None] * E + offs_e[None, :], mask=mask, other=0.0)
        mask = (offs_e < E)[:, None] & (offs_h < H)[None, :]
        weight = widen(tl.load(weight_ptr + offs_e[:, None] * H + offs_h[None, :], mask=mask, other=0.0))
        if weight_ptr.dtype.element_ty == tl.float32:
            upper, middle, lower = _in_parts(weight)
            acc = _add_product(dlogits, lower, acc)
            acc = _add_product(dlogits, middle, acc)
            acc = _add_product(dlogits, upper, acc)
        else:
            acc = _add_product(dlogits, weight, acc)
    if dy_ptr is not None:
        acc += widen(tl.load(dy_ptr + at, mask=inside, other=0.0)).to(tl.float32)
    tl.store(dx_ptr + at, round_to(acc, dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["numel"])
def split_kernel(x_ptr, parts_ptr, numel, E, BLOCK: tl.constexpr):
    """x [T, E] float32 -> parts [T, 3 E] bfloat16."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    upper, middle, lower = _in_parts(x)
    out = parts_ptr + at + (at // E) * (2 * E)
    tl.store(out, round_to(upper, tl.bfloat16), mask=inside)
    tl.store(out + E, round_to(middle, tl.bfloat16), mask=inside)
    tl.store(out + 2 * E, round_to(lower, tl.bfloat16), mask=inside)
