"""Random bits that depend on a seed and a place alone: Philox4x32-7 in plain torch.

A counter of four 32-bit numbers and the 64-bit seed as key give four random words of 32 bits. The Triton kernels
compute the same bits (`philox_triton.py`).

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7  # the fewest that pass all tests of the paper's battery (its table 2); each costs the GPU time
_LOW = 0xFFFFFFFF


def new_seed(device: torch.device) -> Tensor:
    """A seed [1], int64, drawn from torch's generator of the device: nothing waits for the device."""
    return torch.randint(0, 2**63 - 1, (1,), device=device)


def philox_ref(seed: Tensor, c0: Tensor, c1: Tensor) -> Tensor:
    """[..., 4] int64: four words of 32 random bits for each counter (c0, c1, 0, 0) of int64 tensors alike in shape."""
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        high0, low0 = _product(0xD2511F53, c0)
        high2, low2 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return torch.stack((c0, c1, c2, c3), -1)


def random_bits_ref(seed: Tensor, rows: int, columns: int) -> Tensor:
    """16 random bits an element, [rows, columns] int64: counter (column / 8, row), 16 of its bits a column."""
    octets = (columns + 7) // 8
    c0 = torch.arange(octets, device=seed.device).expand(rows, octets)
    c1 = torch.arange(rows, device=seed.device)[:, None].expand(rows, octets)
    words = philox_ref(seed, c0, c1)
    return torch.stack((words & 0xFFFF, words >> 16), -1).view(rows, 8 * octets)[:, :columns]


def block_bits_ref(seed: Tensor, block: Tensor, row: Tensor) -> Tensor:
    """9 random bits for each of the 16 numbers of blocks, [..., 16] int64, of the words of counter (block, row).

    Those of number i are bits 8 (i % 4) to 8 (i % 4) + 8 of word i // 4, cyclically: 16 times 9 of 128 bits. So the
    highest bit of a number's is the lowest of the next one's of the word, of the first one after the last one. Each
    number by itself is as likely to have any; whether two neighbours are rounded up has a covariance of 1/1024 at most,
    where its variance is up to 1/4.

    block, row: int64 tensors alike in shape
    """
    words = philox_ref(seed, block, row)[..., None]
    places = torch.arange(0, 32, 8, device=seed.device)
    return (((words >> places) | (words << (32 - places))) & 0x1FF).flatten(-2)


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of 32-bit numbers."""
    product = a * b  # its low 64 bits are right, whatever the sign
    return (product >> 32) & _LOW, product & _LOW
