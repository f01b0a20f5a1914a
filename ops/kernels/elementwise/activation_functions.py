"""The activations as functions of Triton tiles, for kernels that are composed of them.

    FORWARD[kind](x, A, B, C) -> y              BACKWARD[kind](dy, x, A, B, C) -> dx              without a gate
    FORWARD[kind](a, b, A, B, C) -> y           BACKWARD[kind](dy, a, b, A, B, C) -> (da, db)     gated

`ops.kernels.elementwise.activation` has the formulas, and which constants A, B, C are. Tiles are float32, of one shape.

Precision: float32, an error of a few units in the last place of the factors that a result is made of. One exponential
for each sigmoid or tanh, which value and derivative share. A sigmoid is never below 2^-126, also where it should be 0.
Numbers up to 1e12 never give NaN; NaN stays NaN, also through a clamp, which is why none of them is `tl.minimum` or
`tl.maximum`: those drop it.
"""

from __future__ import annotations

from recipes.triton.gates import JITFunction, tl, triton
from recipes.triton.rounding import INTERPRET

# 2 sqrt(2 / pi), and 0.044715 times that
GELU_LINEAR = tl.constexpr(1.5957691216057308)
GELU_CUBIC = tl.constexpr(0.07135481282553024)
# Where the exponent in the tanh form of gelu is LARGEST_EXPONENT; below, gelu and its derivative are less than 1e-36.
GELU_LIMIT = tl.constexpr(-9.98)
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_EXPONENT = tl.constexpr(125.5)  # of e in float32, with room for 1 + e
QGELU_ALPHA = tl.constexpr(1.702)


# Parts


@triton.jit
def clamp(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """x within LOW and HIGH; NaN stays NaN."""
    return tl.where(x < LOW, LOW, tl.where(x > HIGH, HIGH, x))


@triton.jit
def reciprocal(x):
    """1 / x to a unit in the last place, for x from 1 to 2^126: one instruction, and a division takes eight."""
    if INTERPRET:
        return 1 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def sides(t):
    """1 / (1 + 2^t) and 2^t / (1 + 2^t) for t up to LARGEST_EXPONENT, both to a few units in the last place, from one
    exponential."""
    e = tl.exp2(t)
    first = reciprocal(1 + e)
    return first, e * first


@triton.jit
def sigmoids(x):
    """sigmoid(x) and sigmoid(-x) = 1 - sigmoid(x)."""
    t = x * -LOG2_E
    return sides(tl.where(t > LARGEST_EXPONENT, LARGEST_EXPONENT, t))


@triton.jit
def tanh_and_slope(x):
    """tanh(x) and its derivative 1 - tanh(x)^2, both to a few units in the last place, from one exponential."""
    e = tl.exp(-2 * tl.abs(x))
    inverse = reciprocal(1 + e)
    far = (1 - e) * inverse
    far = tl.where(x < 0, -far, far)
    # Near 0, where 1 - e cancels: x + x z P(z), z = x^2; P fitted to tanh for the least relative error, 2^-28.
    is_near = tl.abs(x) < 0.6
    x = tl.where(is_near, x, 0.0)
    z = x * x
    p = -0.005895080412729041 * z + 0.02079591000884881
    p = p * z - 0.05378381355917112
    p = p * z + 0.13331923949818475
    p = p * z - 0.33333297996353256
    return tl.where(is_near, x + x * (z * p), far), 4 * e * inverse * inverse


@triton.jit
def soft_bound(x, BETA: tl.constexpr):
    """BETA tanh(x / BETA) and its derivative."""
    tanh, slope = tanh_and_slope(x * (1 / BETA))
    return BETA * tanh, slope


@triton.jit
def swish(x, ALPHA: tl.constexpr):
    """x sigmoid(ALPHA x) and its derivative."""
    scaled = ALPHA * x
    up, down = sigmoids(scaled)
    return x * up, up * tl.fma(scaled, down, 1.0)


@triton.jit
def gelu_and_slope(x):
    """gelu(x) and its derivative."""
    near = tl.where(x < GELU_LIMIT, GELU_LIMIT, x)
    square = near * near
    up, down = sides(near * tl.fma(square, -GELU_CUBIC * LOG2_E, -GELU_LINEAR * LOG2_E))
    return x * up, up * tl.fma(near * tl.fma(square, 3 * GELU_CUBIC, GELU_LINEAR), down, 1.0)


# Without a gate


@triton.jit
def gelu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return gelu_and_slope(x)[0]


@triton.jit
def dgelu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * gelu_and_slope(x)[1]


@triton.jit
def qgelu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return swish(x, QGELU_ALPHA)[0]


@triton.jit
def dqgelu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * swish(x, QGELU_ALPHA)[1]


@triton.jit
def relu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return tl.where(x < 0, 0.0, x)


@triton.jit
def drelu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return tl.where(x <= 0, 0.0, dy)


@triton.jit
def silu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return swish(x, 1.0)[0]


@triton.jit
def dsilu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * swish(x, 1.0)[1]


@triton.jit
def srelu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    positive = relu(x, A, B, C)
    return positive * positive


@triton.jit
def dsrelu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return tl.where(x <= 0, 0.0, 2 * (dy * x))


# Gated


@triton.jit
def geglu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return gelu(a, A, B, C) * b


@triton.jit
def dgeglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    value, slope = gelu_and_slope(a)
    return dy * b * slope, dy * value


@triton.jit
def glu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return sigmoids(a)[0] * b


@triton.jit
def dglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    up, down = sigmoids(a)
    return dy * b * (up * down), dy * up


@triton.jit
def qgeglu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return qgelu(a, A, B, C) * b


@triton.jit
def dqgeglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    value, slope = swish(a, QGELU_ALPHA)
    return dy * b * slope, dy * value


@triton.jit
def reglu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return relu(a, A, B, C) * b


@triton.jit
def dreglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return drelu(dy * b, a, A, B, C), dy * relu(a, A, B, C)


@triton.jit
def sreglu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return srelu(a, A, B, C) * b


@triton.jit
def dsreglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dsrelu(dy * b, a, A, B, C), dy * srelu(a, A, B, C)


@triton.jit
def swiglu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return silu(a, A, B, C) * b


@triton.jit
def dswiglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    value, slope = swish(a, 1.0)
    return dy * b * slope, dy * value


@triton.jit
def clamped_swiglu(a, b, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr):
    return swish(tl.where(a > LIMIT, LIMIT, a), ALPHA)[0] * (clamp(b, -LIMIT, LIMIT) + OFFSET)


@triton.jit
def dclamped_swiglu(dy, a, b, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr):
    value, slope = swish(tl.where(a > LIMIT, LIMIT, a), ALPHA)
    da = dy * (clamp(b, -LIMIT, LIMIT) + OFFSET) * slope
    return tl.where(a > LIMIT, 0.0, da), tl.where(tl.abs(b) > LIMIT, 0.0, dy * value)


@triton.jit
def situglu(a, b, BETA1: tl.constexpr, BETA2: tl.constexpr, C: tl.constexpr):
    return soft_bound(a, BETA1)[0] * sigmoids(a)[0] * soft_bound(b, BETA2)[0]


@triton.jit
def dsituglu(dy, a, b, BETA1: tl.constexpr, BETA2: tl.constexpr, C: tl.constexpr):
    soft_a, slope_a = soft_bound(a, BETA1)
    soft_b, slope_b = soft_bound(b, BETA2)
    up, down = sigmoids(a)
    return dy * soft_b * (up * (slope_a + soft_a * down)), dy * (soft_a * up) * slope_b


FORWARD: dict[str, JITFunction] = {
    "gelu": gelu,
    "qgelu": qgelu,
    "relu": relu,
    "silu": silu,
    "srelu": srelu,
    "geglu": geglu,
    "glu": glu,
    "qgeglu": qgeglu,
    "reglu": reglu,
    "sreglu": sreglu,
    "swiglu": swiglu,
    "clamped_swiglu": clamped_swiglu,
    "situglu": situglu,
}
BACKWARD: dict[str, JITFunction] = {
    "gelu": dgelu,
    "qgelu": dqgelu,
    "relu": drelu,
    "silu": dsilu,
    "srelu": dsrelu,
    "geglu": dgeglu,
    "glu": dglu,
    "qgeglu": dqgeglu,
    "reglu": dreglu,
    "sreglu": dsreglu,
    "swiglu": dswiglu,
    "clamped_swiglu": dclamped_swiglu,
    "situglu": dsituglu,
}
