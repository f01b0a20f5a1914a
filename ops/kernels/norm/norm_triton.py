"""The Triton kernels of RMSNorm, LayerNorm and L2Normalization, which differ only in their settings.

    mean[t] = sum_j x[t, j] / N                         centered, otherwise 0
    rstd[t] = 1 / sqrt(c sum_j (x[t, j] - mean)^2 + eps)        c = inv_count: 1 / N, or 1 (L2)
    y       = n gamma + bias                            n = (x - mean) rstd, gamma = weight, or 1 + weight

    dx      = rstd (g - c n sum_j(g n) - mean_j(g))     g = dy gamma; the last term only if centered
    dweight = sum_t dy n
    dbias   = sum_t dy

Layouts: x, y, dy, dx and added [T, N] contiguous; weight and bias [N], or None; mean and rstd [T] float32.

Precision: computed in float32, with one rounding at the end; `added` is added to dx before it. dweight and dbias are
float32: each program sums its rows, and the programs' sums are added in a fixed order. No atomics: repeating a call
gives the same bits.

Memory: rows of up to 16384 columns in forward, 8192 in backward, are read once and stay in registers. Wider rows are
read in blocks: twice (three times if centered) in forward; in backward twice for dx, and once by a separate kernel for
dweight and dbias. That kernel also runs where dx is not needed.

Graph safety: grids depend only on shapes, and the host reads nothing, so calls can be captured and replayed.
"""
# T rows, N columns (features)

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.triton.gates import tl, triton
from recipes.triton.launch import Launch, cdiv, has_work, next_power_of_2, properties
from recipes.triton.rounding import round_to, widen

# ------------------------------------------------------------------------------------------------ configurations


class NormConfig(NamedTuple):
    """Rows and columns of a step, warps of a program, and the number of programs that share the rows."""

    block_m: int
    block_n: int
    num_warps: int
    programs: int


# The widest rows that fit in registers: with 16 warps 32 values in each thread, 16 in backward, which has more arrays.
_WIDEST_FORWARD, _WIDEST_BACKWARD = 16384, 8192
# Warps that fit on a multiprocessor with 128 registers for each thread, the most that backward uses.
_WARPS_A_MULTIPROCESSOR = 16


@lru_cache(maxsize=1024)  # here and below: Triton's integer helpers would cost the host 5 us in each call
def norm_config(rows: int, N: int) -> NormConfig:
    """Forward: steps of about 2048 elements, or of one row if that is longer; one program for each step."""
    if N > _WIDEST_FORWARD:
        return NormConfig(1, 4096, num_warps=8, programs=rows)
    block_n = max(16, next_power_of_2(N))
    block_m = min(64, max(1, 2048 // block_n))  # 128 rows would spill their addresses
    return NormConfig(block_m, block_n, min(16, max(4, block_n // 512)), programs=cdiv(rows, block_m))


@lru_cache(maxsize=1024)
def dnorm_config(rows: int, N: int, sms: int) -> NormConfig:
    """Backward: steps as in forward, divided among as many programs as fit on `sms` multiprocessors at once."""
    if N > _WIDEST_BACKWARD:
        return NormConfig(1, 4096, num_warps=8, programs=rows)
    forward = norm_config(rows, N)
    return forward._replace(programs=min(forward.programs, sms * _WARPS_A_MULTIPROCESSOR // forward.num_warps))


@lru_cache(maxsize=1024)
def dnorm_stages(config: NormConfig, N: int, element_bytes: int, shared_memory: int) -> int:
    """The number of pipeline stages of backward, whose loads are prefetched into shared memory.

    element_bytes: bytes that a step loads for each element. shared_memory: bytes of a multiprocessor, divided among its
    resident programs. Rows of less than 1024 columns gain nothing by it (measured on an H200).
    """
    if config.block_n < max(N, 1024):
        return 1
    share = shared_memory * config.num_warps // _WARPS_A_MULTIPROCESSOR - 1024  # 1 KiB is left for reductions
    return max(1, min(3, 1 + share // (config.block_m * config.block_n * element_bytes)))


@lru_cache(maxsize=1024)
def dparameters_config(rows: int, N: int, sms: int) -> NormConfig:
    """dweight and dbias alone: steps of 16 x 128 elements; `programs` share the rows of each 128 columns."""
    block_m, block_n, num_warps = 16, 128, 4
    programs = max(1, sms * _WARPS_A_MULTIPROCESSOR // num_warps // max(1, cdiv(N, block_n)))
    return NormConfig(block_m, block_n, num_warps, min(cdiv(rows, block_m), programs))


def runs_in_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run: on a GPU, except in float64, because they compute in float32."""
    return device.type == "cuda" and dtype != torch.float64


# ------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def load_block(ptr, offs_t, mask_t, offs_n, N):
    """[BLOCK_M, BLOCK_N] in float32, zero outside."""
    mask = mask_t[:, None] & (offs_n < N)[None, :]
    return widen(tl.load(ptr + offs_t[:, None] * N + offs_n[None, :], mask=mask, other=0.0)).to(tl.float32)


@triton.jit
def store_block(ptr, block, offs_t, mask_t, offs_n, N):
    """Rounded to what ptr points at."""
    mask = mask_t[:, None] & (offs_n < N)[None, :]
    tl.store(ptr + offs_t[:, None] * N + offs_n[None, :], round_to(block, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(ptr, offs_n, N):
    """[1, BLOCK_N] in float32, zero outside."""
    return widen(tl.load(ptr + offs_n, mask=offs_n < N, other=0.0)).to(tl.float32)[None, :]


@triton.jit
def weighted(block, weight_ptr, offs_n, N, ZERO_CENTERED: tl.constexpr):
    """block times gamma."""
    if weight_ptr is not None:
        gamma = load_vector(weight_ptr, offs_n, N)
        if ZERO_CENTERED:
            gamma += 1.0
        block *= gamma
    return block


@triton.jit
def distance(x, mean, offs_n, N, CENTERED: tl.constexpr):
    """x - mean, zero outside."""
    if CENTERED:
        x = tl.where((offs_n < N)[None, :], x - mean[:, None], 0.0)
    return x


@triton.jit
def finished(x, mean, rstd, weight_ptr, bias_ptr, offs_n, N, CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """y of a block of x."""
    y = weighted(distance(x, mean, offs_n, N, CENTERED) * rstd[:, None], weight_ptr, offs_n, N, ZERO_CENTERED)
    if bias_ptr is not None:
        y += load_vector(bias_ptr, offs_n, N)
    return y


@triton.jit(do_not_specialize=["rows"])  # one program for all numbers of rows: one order of sums
def norm_kernel(
    x_ptr,
    weight_ptr,  # or None
    bias_ptr,  # or None
    y_ptr,
    mean_ptr,  # None unless centered
    rstd_ptr,
    rows,
    N,
    eps,
    inv_count,
    CENTERED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WHOLE: tl.constexpr,  # BLOCK_N >= N
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y, mean and rstd of BLOCK_M rows a program."""
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_t = offs_t < rows
    offs_n = tl.arange(0, BLOCK_N)
    mean = tl.zeros((BLOCK_M,), tl.float32)
    if WHOLE:
        x = load_block(x_ptr, offs_t, mask_t, offs_n, N)
        if CENTERED:
            mean = tl.sum(x, axis=1) * inv_count
        apart = distance(x, mean, offs_n, N, CENTERED)
        squares = tl.sum(apart * apart, axis=1)
    else:
        if CENTERED:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for n in range(0, N, BLOCK_N):
                acc += load_block(x_ptr, offs_t, mask_t, n + offs_n, N)
            mean = tl.sum(acc, axis=1) * inv_count
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for n in range(0, N, BLOCK_N):
            apart = distance(load_block(x_ptr, offs_t, mask_t, n + offs_n, N), mean, n + offs_n, N, CENTERED)
            acc += apart * apart
        squares = tl.sum(acc, axis=1)

    rstd = 1.0 / tl.sqrt(squares * inv_count + eps)
    tl.store(rstd_ptr + offs_t, rstd, mask=mask_t)
    if CENTERED:
        tl.store(mean_ptr + offs_t, mean, mask=mask_t)

    if WHOLE:
        y = finished(x, mean, rstd, weight_ptr, bias_ptr, offs_n, N, CENTERED, ZERO_CENTERED)
        store_block(y_ptr, y, offs_t, mask_t, offs_n, N)
    else:
        for n in range(0, N, BLOCK_N):
            x = load_block(x_ptr, offs_t, mask_t, n + offs_n, N)
            y = finished(x, mean, rstd, weight_ptr, bias_ptr, n + offs_n, N, CENTERED, ZERO_CENTERED)
            store_block(y_ptr, y, offs_t, mask_t, n + offs_n, N)


@triton.jit
def load_statistics(mean_ptr, rstd_ptr, offs_t, mask_t):
    """mean (or rstd once more, unused, where there is none) and rstd of the rows; zero outside."""
    rstd = tl.load(rstd_ptr + offs_t, mask=mask_t, other=0.0)
    mean = rstd
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + offs_t, mask=mask_t, other=0.0)
    return mean, rstd


@triton.jit
def dx_of(g, normed, sum_gn, sum_g, rstd, inv_count, CENTERED: tl.constexpr):
    """dx of a block from the sums over whole rows."""
    g -= normed * (sum_gn * inv_count)[:, None]
    if CENTERED:
        g -= (sum_g * inv_count)[:, None]
    return g * rstd[:, None]


@triton.jit
def dnorm_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,  # or None
    mean_ptr,  # None unless centered
    rstd_ptr,
    added_ptr,  # or None
    dx_ptr,
    dweight_ptr,  # [programs, N] float32, rows partial_stride apart, or None
    dbias_ptr,  # the same
    rows,
    N,
    partial_stride,
    inv_count,
    CENTERED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WHOLE: tl.constexpr,  # BLOCK_N >= N; dweight_ptr and dbias_ptr are None otherwise
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx of every step = program, program + programs, ..., and the sums of dweight and dbias over these rows."""
    program = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    sum_g = tl.zeros((BLOCK_M,), tl.float32)
    if WHOLE:
        dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(program, tl.cdiv(rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
            offs_t = step * BLOCK_M + tl.arange(0, BLOCK_M)
            mask_t = offs_t < rows
            dy = load_block(dy_ptr, offs_t, mask_t, offs_n, N)
            x = load_block(x_ptr, offs_t, mask_t, offs_n, N)
            if added_ptr is not None:
                added = load_block(added_ptr, offs_t, mask_t, offs_n, N)
            mean, rstd = load_statistics(mean_ptr, rstd_ptr, offs_t, mask_t)
            normed = distance(x, mean, offs_n, N, CENTERED) * rstd[:, None]
            if dweight_ptr is not None:
                dweight += dy * normed
            if dbias_ptr is not None:
                dbias += dy
            g = weighted(dy, weight_ptr, offs_n, N, ZERO_CENTERED)
            if CENTERED:
                sum_g = tl.sum(g, axis=1)
            dx = dx_of(g, normed, tl.sum(g * normed, axis=1), sum_g, rstd, inv_count, CENTERED)
            if added_ptr is not None:
                dx += added
            store_block(dx_ptr, dx, offs_t, mask_t, offs_n, N)
        if dweight_ptr is not None:
            dweight_ptr += program * partial_stride
            tl.store(dweight_ptr + offs_n, tl.sum(dweight, axis=0), mask=offs_n < N)
        if dbias_ptr is not None:
            dbias_ptr += program * partial_stride
            tl.store(dbias_ptr + offs_n, tl.sum(dbias, axis=0), mask=offs_n < N)
    else:
        offs_t = program * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_t = offs_t < rows
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, offs_t, mask_t)
        acc_gn = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for n in range(0, N, BLOCK_N):
            dy = load_block(dy_ptr, offs_t, mask_t, n + offs_n, N)
            x = load_block(x_ptr, offs_t, mask_t, n + offs_n, N)
            g = weighted(dy, weight_ptr, n + offs_n, N, ZERO_CENTERED)
            acc_gn += g * distance(x, mean, n + offs_n, N, CENTERED)
            if CENTERED:
                acc_g += g
        sum_gn = tl.sum(acc_gn, axis=1) * rstd
        if CENTERED:
            sum_g = tl.sum(acc_g, axis=1)
        for n in range(0, N, BLOCK_N):
            dy = load_block(dy_ptr, offs_t, mask_t, n + offs_n, N)
            x = load_block(x_ptr, offs_t, mask_t, n + offs_n, N)
            g = weighted(dy, weight_ptr, n + offs_n, N, ZERO_CENTERED)
            normed = distance(x, mean, n + offs_n, N, CENTERED) * rstd[:, None]
            dx = dx_of(g, normed, sum_gn, sum_g, rstd, inv_count, CENTERED)
            if added_ptr is not None:
                dx += load_block(added_ptr, offs_t, mask_t, n + offs_n, N)
            store_block(dx_ptr, dx, offs_t, mask_t, n + offs_n, N)


@triton.jit
def dparameters_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,  # None unless centered
    rstd_ptr,
    dweight_ptr,  # [programs, N] float32, rows partial_stride apart, or None
    dbias_ptr,  # the same
    rows,
    N,
    partial_stride,
    CENTERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dweight and dbias of BLOCK_N columns, over the rows of every step = program, program + programs, ..."""
    program = tl.program_id(1).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(program, tl.cdiv(rows, BLOCK_M), tl.num_programs(1)):
        offs_t = step * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_t = offs_t < rows
        dy = load_block(dy_ptr, offs_t, mask_t, offs_n, N)
        if dweight_ptr is not None:
            mean, rstd = load_statistics(mean_ptr, rstd_ptr, offs_t, mask_t)
            x = load_block(x_ptr, offs_t, mask_t, offs_n, N)
            dweight += dy * distance(x, mean, offs_n, N, CENTERED) * rstd[:, None]
        if dbias_ptr is not None:
            dbias += dy
    if dweight_ptr is not None:
        tl.store(dweight_ptr + program * partial_stride + offs_n, tl.sum(dweight, axis=0), mask=offs_n < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + program * partial_stride + offs_n, tl.sum(dbias, axis=0), mask=offs_n < N)


# ----------------------------------------------------------------------------------------------------- launchers


_norm, _dnorm, _dparameters = Launch(norm_kernel), Launch(dnorm_kernel), Launch(dparameters_kernel)


def norm_triton(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    inv_count: float,
    *,
    centered: bool = False,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The formula above for x [..., N] of any strides, weight and bias [N] or None.

    Returns (y [..., N] in x's dtype, contiguous, mean [..., 1] or None, rstd [..., 1], both float32).
    """
    x = x.contiguous()
    N = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    y = torch.empty_like(x)
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centered else None
    if not has_work(x):
        return y, mean, rstd
    if x.data_ptr() % 16:
        x = x.clone()  # where x lies would decide how a thread reads it, and so the order of sums
    config = norm_config(rows, N)
    _norm(
        x, config.programs, x, _contiguous(weight), _contiguous(bias), y, mean, rstd, rows, N, eps, inv_count,
        CENTERED=centered, ZERO_CENTERED=zero_centered, WHOLE=config.block_n >= N,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return y, mean, rstd


def dnorm_triton(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    inv_count: float,
    *,
    zero_centered: bool = False,
    need_dx: bool = True,
    need_dweight: bool = False,
    need_dbias: bool = False,
    added: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `norm_triton`. mean, rstd: as returned by it; centered if mean is not None.

    dy, x: [..., N] of any strides. added: [..., N] in x's dtype, added to dx before its rounding.

    Returns (dx [..., N] in x's dtype, contiguous, dweight [N] and dbias [N] in float32), None for what is not needed.
    """
    dy, x = dy.contiguous(), x.contiguous()
    N = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    sms = multiprocessors(x)
    config = dnorm_config(rows, N, sms)
    whole = config.block_n >= N
    together = need_dx and whole
    dx = torch.empty_like(x) if need_dx else None
    loaded = [tensor for tensor in (dy, x, weight, added) if tensor is not None]
    num_stages = dnorm_stages(config, N, sum(tensor.element_size() for tensor in loaded), shared_memory(x))
    apart = dparameters_config(rows, N, sms)
    programs = config.programs if together else apart.programs
    partials = torch.empty(programs, need_dweight + need_dbias, N, dtype=torch.float32, device=x.device)
    dweight_parts = partials[:, 0] if need_dweight else None
    dbias_parts = partials[:, -1] if need_dbias else None
    if x.numel() and need_dx:
        _dnorm(
            x, config.programs, dy, x, _contiguous(weight), mean, rstd, _contiguous(added), dx,
            dweight_parts if together else None, dbias_parts if together else None,
            rows, N, partials.stride(0), inv_count,
            CENTERED=mean is not None, ZERO_CENTERED=zero_centered, WHOLE=whole,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=num_stages, num_warps=config.num_warps,
            # Without FMAs dx has the same bits with `added` as without, until they are summed.
            enable_fp_fusion=False,
        )  # fmt: skip
    if x.numel() and not together and (need_dweight or need_dbias):
        _dparameters(
            x, (cdiv(N, apart.block_n), apart.programs), dy, x, mean, rstd, dweight_parts, dbias_parts,
            rows, N, partials.stride(0),
            CENTERED=mean is not None, BLOCK_M=apart.block_m, BLOCK_N=apart.block_n, num_warps=apart.num_warps,
        )  # fmt: skip
    if not (need_dweight or need_dbias):
        return dx, None, None
    sums = partials.sum(0)
    return dx, sums[0] if need_dweight else None, sums[-1] if need_dbias else None


def multiprocessors(x: Tensor) -> int:
    """The number of multiprocessors of x's GPU; 132, as on an H200, for a CPU tensor (under Triton's interpreter)."""
    return properties(x.get_device()).multi_processor_count if x.is_cuda else 132


def shared_memory(x: Tensor) -> int:
    """The bytes of shared memory that a program may use on x's GPU; 163 KiB, as on an A100, for a CPU tensor."""
    return properties(x.get_device()).shared_memory_per_block_optin if x.is_cuda else 163 << 10


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
