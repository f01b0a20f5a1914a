"""The Triton kernels of `ops.kernels.routing.router_product`, which documents and launches them."""
# T tokens, E experts, H hidden

from recipes.triton.gates import tl, triton
from recipes.triton.rounding import round_to, widen

UPPER = tl.constexpr(-(2**16))  # the sign, the exponent, and 7 bits of mantissa


@triton.jit
def _upper(x):
    return (x.to(tl.int32, bitcast=True) & UPPER).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T"])
def dgrad_kernel(
    dlogits_ptr, weight_ptr, dy_ptr, dx_ptr, T, E, H,
    WEIGHT_PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dx = dlogits weight + dy, rounded once. dlogits [T, 3 E] and weight [E, WEIGHT_PARTS H]: their parts in bfloat16.
    dy_ptr may be None."""
    offs_t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (offs_t < T)[:, None] & (offs_h < H)[None, :]
    out = offs_t[:, None] * H + offs_h[None, :]
    if dy_ptr is not None:  # it comes while products are summed
        dy = tl.load(dy_ptr + out, mask=inside, other=0.0)
    blocks = tl.cdiv(E, BLOCK_E)
    acc = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for step in range(3 * WEIGHT_PARTS * blocks):
        pair = 3 * WEIGHT_PARTS - 1 - step // blocks  # the least first
        offs_e = step % blocks * BLOCK_E + tl.arange(0, BLOCK_E)
        at = offs_t[:, None] * (3 * E) + (pair % 3 * E + offs_e)[None, :]
        mask = (offs_t < T)[:, None] & (offs_e < E)[None, :]
        dlogits = widen(tl.load(dlogits_ptr + at, mask=mask, other=0.0))
        at = offs_e[:, None] * (WEIGHT_PARTS * H) + (pair // 3 * H + offs_h)[None, :]
        mask = (offs_e < E)[:, None] & (offs_h < H)[None, :]
        weight = widen(tl.load(weight_ptr + at, mask=mask, other=0.0))
        acc = tl.dot(dlogits, weight, acc)
    if dy_ptr is not None:
        acc += widen(dy).to(tl.float32)
    tl.store(dx_ptr + out, round_to(acc, dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def split_kernel(x_ptr, parts_ptr, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """x [R, C] float32 -> parts [R, 3 C] bfloat16, each cut off after 8 bits: their sum is x."""
    offs_r = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (offs_r < R)[:, None] & (offs_c < C)[None, :]
    x = tl.load(x_ptr + offs_r[:, None] * C + offs_c[None, :], mask=inside, other=0.0)
    upper = _upper(x)
    rest = x - upper
    middle = _upper(rest)
    out = parts_ptr + offs_r[:, None] * (3 * C) + offs_c[None, :]
    tl.store(out, round_to(upper, tl.bfloat16), mask=inside)
    tl.store(out + C, round_to(middle, tl.bfloat16), mask=inside)
    tl.store(out + 2 * C, round_to(rest - middle, tl.bfloat16), mask=inside)
