"""Which tile a grouped product of `grouped_gemm` runs with: a rule over shapes and dtypes, measured on an H200.

A table of measured tiles (`tiles`) comes before it.
"""
# G groups, N out features, K in features

from typing import Any

import torch
from torch import Tensor

from ops.kernels.grouped_gemm.measured_tiles import GLUON_GROUPS, Gemm, GroupedGemmConfig
from ops.kernels.grouped_gemm.persistent_schedule import MOST_GROUPS
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import properties

FEW_ROWS = 96  # a group, on average: with fewer, tiles are half as high
DECODE_ROWS = 16  # with fewer, weights take longer to read than to multiply: more of them are on their way at once
# A group, on average, for TN and NN in Gluon: on an H200 that is as fast as Triton or up to 8 % faster with 256, and NN
# is 24 to 48 % slower with 192 (`bench/results/tuning.md`).
QUEUED_ROWS = 256
# A group, on average: with fewer, what is added to float32 in Gluon is fetched, for L2 adds too slowly.
MANY_ROWS = 1280
# Bytes of memory: Hopper with more has HBM3e and reads 4.8 TB/s (H200), with less HBM3 and 3.35 to 4 (H100).
FAST_MEMORY = 100 * 2**30


def has_fast_memory(x: Tensor | None = None) -> bool:
    """Whether the GPU of x, or torch's current one, has more than FAST_MEMORY; where there is none, as an H200.

    By a queue (`m_grouped_gluon`) programs come to be at different places of their sums, and what several of them read
    is then read from memory more often. For bf16 an H200 is up to 7 % faster so, an H100 up to 50 % slower.
    """
    if not (torch.cuda.is_available() if x is None else x.is_cuda):
        return True
    device = torch.cuda.current_device() if x is None else x.get_device()
    return bool(properties(device).total_memory > FAST_MEMORY)


def m_grouped_config(
    rows: int,
    num_groups: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype,
    tf32: bool,
    aligned: bool,
    descriptors: bool,
    capability: tuple[int, int],
    gluon: bool,
    batch_invariant: bool = False,
) -> GroupedGemmConfig:
    """Tiles of the kernel for TN and NN: half as high where a group has few rows, but for any number if
    batch_invariant.

    dtype: of the operands. aligned: see `is_aligned`. descriptors: see `takes_descriptors`, of all matrices, and at
    most MOST_GROUPS; then, for 16-bit operands on Hopper, the kernels on descriptors run. gluon: whether the one in
    Gluon can run (`why_no_gluon`), on a GPU that has fast memory.
    """
    if batch_invariant:
        rows = MANY_ROWS * num_groups
    if uses_descriptors(dtype, descriptors, capability):
        if gluon and num_groups <= GLUON_GROUPS and rows >= QUEUED_ROWS * num_groups:
            return QUEUED_IN_GLUON._replace(box=64) if out_dtype.itemsize == 4 else QUEUED_IN_GLUON
        return _on_descriptors(rows, num_groups, out_dtype)
    return _fitting(_tile(64 if rows < FEW_ROWS * num_groups else 128, dtype, tf32, aligned), dtype, capability)


def activation_config(rows: int, num_groups: int, gated: bool) -> GroupedGemmConfig:
    """Tiles of the kernel that stores the activation of a TN product, in columns of the activation: those of the
    product, of which a gated activation makes half as many columns."""
    tile = _on_descriptors(rows, num_groups, torch.bfloat16)
    return tile._replace(block_n=tile.block_n // 2) if gated else tile


def k_grouped_config(
    rows: int,
    num_groups: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype,
    tf32: bool,
    aligned: bool,
    descriptors: bool,
    accumulate: bool,
    capability: tuple[int, int],
    gluon: bool,
) -> GroupedGemmConfig:
    """Tiles of the kernel for NT. As above. accumulate: what is there needs registers and shared memory too.

    gluon: whether its kernel can run (`why_no_gluon`). Float32 has a fourth stage if little of a tile is in shared
    memory at once.
    """
    if uses_descriptors(dtype, descriptors, capability):
        to_float32 = out_dtype == torch.float32
        if gluon and num_groups <= GLUON_GROUPS and (not accumulate or to_float32):
            if accumulate and rows < MANY_ROWS * num_groups:
                return IN_GLUON._replace(num_stages=6, fetches=True)
            return IN_GLUON._replace(box=64) if to_float32 else IN_GLUON  # as many bytes at once
        if accumulate or out_dtype != torch.float32:
            return _persistent(torch.float32 if accumulate else out_dtype)
        return _persistent(dtype)._replace(box=64)
    return _fitting(_tile(64 if accumulate else 128, dtype, tf32, aligned), dtype, capability)


def built_in_config(gemm: Gemm, rows: int, capability: tuple[int, int]) -> GroupedGemmConfig:
    """The tiles of these two rules for contiguous tensors."""
    product, dtype, out_dtype, accumulate, G, N, K = gemm
    about: dict[str, Any] = {
        "out_dtype": out_dtype,
        "tf32": allow_tf32(dtype),
        "aligned": N % 16 == K % 16 == 0,
        "descriptors": N * dtype.itemsize % 16 == K * dtype.itemsize % 16 == 0 and G <= MOST_GROUPS,
        "capability": capability,
    }
    gluon = why_no_gluon(capability) is None
    if product == "NT":
        return k_grouped_config(rows, G, dtype, accumulate=accumulate, gluon=gluon, **about)
    return m_grouped_config(rows, G, dtype, gluon=gluon and has_fast_memory(), **about)


def uses_descriptors(dtype: torch.dtype, descriptors: bool, capability: tuple[int, int]) -> bool:
    """Whether the kernels on descriptors run. Only Hopper has their tiles; float32 would be transposed in registers."""
    return capability == (9, 0) and descriptors and dtype.itemsize == 2


def _on_descriptors(rows: int, num_groups: int, out_dtype: torch.dtype) -> GroupedGemmConfig:
    if rows < DECODE_ROWS * num_groups and out_dtype.itemsize == 2:
        return PERSISTENT_DECODE
    return PERSISTENT_SMALL if rows < FEW_ROWS * num_groups else _persistent(out_dtype)


def _persistent(out_dtype: torch.dtype) -> GroupedGemmConfig:
    """Two groups of four warps share the 256 columns. A stage takes 48 KiB, half a tile that is stored 32 or 64."""
    return GroupedGemmConfig(128, 256, 64, num_warps=8, num_stages=4 if out_dtype.itemsize == 2 else 3, programs=1)


QUEUED_IN_GLUON = GroupedGemmConfig(128, 256, 64, num_warps=8, num_stages=4, programs=1, gluon=True)
# Short steps and many of them (`bench/results/tuning.md`).
IN_GLUON = GroupedGemmConfig(128, 256, 32, num_warps=8, num_stages=8, programs=1, gluon=True)
# Reading weights takes longer than multiplying: 96 KiB of them are in flight on each multiprocessor, and 26 KiB would
# cover the latency (4.8 TB/s times 700 ns, over 132). Of x the rows of a group alone are read. Others beside it:
# `bench decode --sweep`, `bench/results/tuning.md`.
PERSISTENT_DECODE = GroupedGemmConfig(64, 128, 64, num_warps=4, num_stages=4, programs=2)
PERSISTENT_SMALL = GroupedGemmConfig(64, 128, 64, num_warps=4, num_stages=3, programs=2)


def _tile(block_m: int, dtype: torch.dtype, tf32: bool, aligned: bool) -> GroupedGemmConfig:
    if not aligned or (dtype == torch.float32 and not tf32):
        # Element by element, or without tensor cores: registers bound the tile.
        return GroupedGemmConfig(64, 64, 32, num_warps=4, num_stages=2)
    # Four warps: with eight, ptxas serialises the tensor core instructions of a grid that is not persistent (C7515).
    # Three stages of a 128 x 128 tile take 96 KiB, so that two programs share a multiprocessor of Hopper.
    return GroupedGemmConfig(block_m, 128, 128 // dtype.itemsize, num_warps=4, num_stages=3)


def _fitting(config: GroupedGemmConfig, dtype: torch.dtype, capability: tuple[int, int]) -> GroupedGemmConfig:
    return config.fitting(config.block_m + config.block_n, dtype, capability)


def allow_tf32(dtype: torch.dtype) -> bool:
    """Whether a product in this dtype may be computed in TF32: it is float32, and torch allows it."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
