"""The random bits of `philox.py` for Triton kernels."""

from recipes.triton.gates import tl, triton
from recipes.triton.philox import ROUNDS

PHILOX_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def philox(seed, c0, c1):
    """Four uint32 tensors: the words of `philox_ref`. seed: int64; c0, c1: uint32 tensors alike in shape."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c2 = c0 * 0  # not tl.zeros_like, which in Gluon takes a layout
    c3 = c2
    for _ in tl.static_range(PHILOX_ROUNDS):
        high0, low0 = _product(c0, 0xD2511F53)
        high2, low2 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _product(a, b: tl.constexpr):
    """High and low 32 bits of a product, by one multiplication."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)
