"""Every kernel configuration, compiled for Hopper without a GPU: no spills, no serialised wgmma, memory that suffices,
barriers whose memory nothing else takes.

Run as a program, this file compiles: it puts a driver in place that has a target but no device, lets the launchers
launch, and prints what came out, a line of JSON a kernel. The tests run it in a subprocess, because under the
interpreter, which the other tests use, Triton compiles nothing.

What was compiled stays in `build/compiled/kernels`, found by Triton's key of its source, and is reported from there.

`make test-rest` compiles as many configurations as every tile and every value of an argument need; of products of
bfloat16 in Gluon as many as every two constants and each tile with each value of the other arguments need; of what is
no product of float16 as many as every tile needs; and for other generations each kernel once. `make test-exhaustive`
compiles them all.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.bench_tune import ON_DESCRIPTORS, candidates, gemm_case, gemms
from ops.kernels.elementwise import activation, chain_cast, dactivation_cast
from ops.kernels.elementwise import chain as elementwise
from ops.kernels.elementwise import chain_steps as steps
from ops.kernels.elementwise.activation import KINDS, Activation, activation_step
from ops.kernels.elementwise.share_sums import sum_shares_triton
from ops.kernels.grouped_gemm import bias_grad, float8_activation, grouped_activation
from ops.kernels.grouped_gemm import float8 as grouped_gemm_float8
from ops.kernels.grouped_gemm import high_precision as grouped_gemm
from ops.kernels.grouped_gemm.grouped_activation import grouped_activation_triton
from ops.kernels.grouped_gemm.measured_tiles import MeasuredTile, TileTable, use_tiles
from ops.kernels.grouped_gemm.tile_rules import MANY_ROWS as ADDED_BY_L2
from ops.kernels.grouped_gemm.tile_rules import (
    QUEUED_IN_GLUON,
    QUEUED_ROWS,
    activation_config,
    k_grouped_config,
    m_grouped_config,
)
from ops.kernels.grouped_gemm.tile_rules_float8 import (
    BLOCK,
    IN_ORDER_ROWS,
    WIDE_IN_GLUON,
    k_grouped_float8_config,
    m_grouped_float8_config,
)
from ops.kernels.norm import norm_triton
from ops.kernels.routing import permute, router_product, routing, symmetric
from recipes.casts import cast_blocks, cast_float8, cast_float8_rowwise, cast_nvfp4, dequantize_nvfp4
from recipes.casts.amax_history import end_step_triton
from recipes.casts.nvfp4_alpha import alpha_from_amax_triton, combined_alpha_triton
from recipes.casts.scale_rules import Float32Scale, GivenScale
from recipes.current_scaling import CurrentScalingQuantizer, per_tensor
from recipes.delayed_scaling import DelayedScaling, DelayedScalingQuantizer
from recipes.float8_block import Float8BlockQuantizer
from recipes.float8_rowwise import RowwiseScalingQuantizer
from recipes.mxfp8 import MXFP8Quantizer
from recipes.tensors.formats import E4M3, E5M2
from recipes.tensors.quantizer import QuantizedBuffers
from recipes.tensors.splits import Splits
from recipes.triton.copies import copy_triton
from recipes.triton.gates import why_no_gluon, why_not_this_release
from recipes.triton.meeting import empty_meetings
from recipes.triton.offsets import aligned_offsets_triton, clamped_offsets_triton
from recipes.triton.zeros import zero_triton
from tests.compiling import ROOT, compiling
from tests.pairwise import cover, exhaustive, rest
from tests.smoke import all_kernels

# name: (dtype, float32 products in TF32)
MODES = {
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
}
# Instead of a mode, in bf16:
TUNER = "tuner"  # what `bench tune` tries
FIRST = "first"  # of each kernel the first configuration alone, of values and of codes
PRODUCTS_IN_GLUON, CASTS_IN_GLUON = "products", "casts"  # what is written in Gluon, with some other kernels
IN_GLUON = {
    PRODUCTS_IN_GLUON: {
        *("m_grouped_gluon_kernel", "k_grouped_gluon_kernel", "k_grouped_float8_gluon_kernel"),
        "m_grouped_activation_gluon_kernel",
    },
    CASTS_IN_GLUON: {
        *("cast_nvfp4_gluon_kernel", "cast_float8_gluon_kernel", "cast_float8_vectors_gluon_kernel"),
        *("activation_gluon_kernel", "dactivation_gluon_kernel", "dactivation_amax_gluon_kernel"),
        *("dactivation_blocks_gluon_kernel", "dactivation_vectors_gluon_kernel"),
        "dactivation_vector_amaxes_gluon_kernel",
    },
}
HOW_MANY = pytest.mark.parametrize("every", [rest(False, id="some"), exhaustive(True, id="every")])
TILE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
GROUPS, MANY_GROUPS = 4, 128
MANY_ROWS, FEW_ROWS, DECODE_ROWS = 1024, 128, 8
ALIGNED, ODD, HALF_TILES = (256, 512), (250, 510), (384, 640)  # in and out features
NORM_WIDTHS = (*(2**n for n in range(16)), 4095, 100_000)
LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of shared memory
# Where the compiler puts something in shared memory, and so many barriers.
PLACE, BARRIERS = re.compile(r"allocation\.offset = (\d+)"), re.compile(r"local_alloc .*memdesc<(\d+)x1xi64")
# At most, stored and loaded, by programs that wait in few registers: dSiTUGLU of fp16. dSwiGLU is faster so.
SPILLED_AT_MEETINGS = 192
# At most, stored and loaded, by FC1 of codes that is stored beside its activation's codes: once a tile, or less often.
SPILLED_WITH_CODES = 0 if triton.__version__.startswith("3.8") else 36
# Of one of Hopper's multiprocessors, and what each of its programs has besides its own.
SHARED_BY_PROGRAMS, BESIDES = 228 << 10, 1 << 10


def launch_grouped_gemm(rows: int, features: tuple[int, int], dtype: torch.dtype, tf32: bool) -> None:
    K, N = features
    x, dy, w = (torch.empty(shape, dtype=dtype) for shape in ((rows, K), (rows, N), (GROUPS, N, K)))
    offsets = torch.zeros(GROUPS + 1, dtype=torch.int64)
    for aligned in (None, torch.empty_like(offsets)):
        clamped_offsets_triton(torch.empty(GROUPS, dtype=torch.int64), offsets, aligned, rows, 128)
    aligned_offsets_triton(offsets, torch.empty_like(offsets), 128)
    zero_triton(torch.empty(4, dtype=torch.int32), 4)
    copy_triton(torch.empty(GROUPS), torch.empty(GROUPS))
    bias, scales, alpha = torch.empty(GROUPS, N, dtype=dtype), torch.empty(rows), torch.empty(GROUPS)
    no_descriptors = [tensor[:1].expand(rows, -1) for tensor in (dy, x)]
    if rows == MANY_ROWS and features == ALIGNED and dtype.itemsize == 2:
        launch_queued(dtype)
    dx = torch.empty_like(x)
    grouped_gemm.m_grouped_triton(no_descriptors[0], w, offsets, None, None, alpha, dx, False, tf32)
    for accumulate in (False, True):
        grouped_gemm.grouped_gemm_nt_triton(*no_descriptors, offsets, alpha, torch.empty_like(w), tf32, accumulate)
    for gluon in (contextlib.nullcontext(), without_gluon()):
        with gluon:
            launch_outputs_and_dgrads(rows, features, dtype, tf32)
            launch_wgrads(rows, features, dtype, tf32)
    for row_of in (None, torch.empty(rows, dtype=torch.int64)):
        bias_grad.grouped_bias_grad_triton(dy, row_of, offsets, scales, torch.empty_like(bias))


def launch_queued(dtype: torch.dtype) -> None:
    """TN and NN of few and many groups that have many rows, and of columns that end in half a tile."""
    few, many = ((GROUPS, ALIGNED),), ((512, ALIGNED), (512, HALF_TILES))
    for groups, (K, N) in (*few, *many) if dtype == torch.bfloat16 else many[1:]:  # float16 takes the same registers
        rows = groups * QUEUED_ROWS
        x, dy, w = (torch.empty(shape, dtype=dtype) for shape in ((rows, K), (rows, N), (groups, N, K)))
        offsets, alpha = torch.zeros(groups + 1, dtype=torch.int64), torch.empty(groups)
        bias, scales = torch.empty(groups, N, dtype=dtype), torch.empty(rows)
        for out_dtype in (dtype, torch.float32):
            y, dx = torch.empty(rows, N, dtype=out_dtype), torch.empty(rows, K, dtype=out_dtype)
            for extras in ((None, None, None), (bias, scales, alpha)):
                grouped_gemm.m_grouped_triton(x, w, offsets, *extras, y, True, False)
            grouped_gemm.m_grouped_triton(dy, w, offsets, None, None, alpha, dx, False, False)
        if (
            dtype == torch.bfloat16
            and N % QUEUED_IN_GLUON.block_n == 0
            and not why_no_gluon(grouped_gemm.capability(x))
        ):
            launch_both_stored(x, w, offsets, scales)


def launch_both_stored(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor) -> None:
    """FC1 and SwiGLU in one kernel that stores both, or act alone."""
    both, act = x.new_empty(len(x), w.shape[1]), x.new_empty(len(x), w.shape[1] // 2)
    for given in (None, scales):
        step = activation_step(Activation("swiglu"), given is not None)
        for h in (both, None):
            grouped_activation.m_grouped_activation_gluon(x, w, offsets, given, h, act, QUEUED_IN_GLUON, step)


def launch_outputs_and_dgrads(rows: int, features: tuple[int, int], dtype: torch.dtype, tf32: bool) -> None:
    """TN and NN of tensors that descriptors may describe."""
    K, N = features
    x, dy, w = (torch.empty(shape, dtype=dtype) for shape in ((rows, K), (rows, N), (GROUPS, N, K)))
    offsets, alpha = torch.zeros(GROUPS + 1, dtype=torch.int64), torch.empty(GROUPS)
    bias, scales = torch.empty(GROUPS, N, dtype=dtype), torch.empty(rows)
    grouped_gemm.m_grouped_triton(x, w, offsets, None, None, None, torch.empty_like(dy), True, tf32)
    for out_dtype in (dtype, torch.float32):
        y, dx = torch.empty(rows, N, dtype=out_dtype), torch.empty(rows, K, dtype=out_dtype)
        grouped_gemm.m_grouped_triton(x, w, offsets, bias, scales, alpha, y, True, tf32)
        grouped_gemm.m_grouped_triton(dy, w, offsets, None, None, alpha, dx, False, tf32)


def launch_wgrads(rows: int, features: tuple[int, int], dtype: torch.dtype, tf32: bool) -> None:
    """NT of tensors that descriptors may describe."""
    K, N = features
    dy, x, w = (torch.empty(shape, dtype=dtype) for shape in ((rows, N), (rows, K), (GROUPS, N, K)))
    offsets, alpha = torch.zeros(GROUPS + 1, dtype=torch.int64), torch.empty(GROUPS)
    for out_dtype, accumulate in ((dtype, False), (dtype, True), (torch.float32, False), (torch.float32, True)):
        dw = torch.empty(w.shape, dtype=out_dtype)
        grouped_gemm.grouped_gemm_nt_triton(dy, x, offsets, alpha, dw, tf32, accumulate)
    if rows == MANY_ROWS:  # float32 that is written, fetched and added to, and added to by L2: ranks take registers
        for groups in (GROUPS, 64, 256, 512) if features == ALIGNED and dtype == torch.bfloat16 else (GROUPS,):
            for rows_a_group, accumulate in ((1, False), (1, True), (ADDED_BY_L2, True)):
                long = [torch.empty(groups * rows_a_group, width, dtype=dtype) for width in (N, K)]
                dw = torch.empty(groups, N, K)
                grouped_gemm.grouped_gemm_nt_triton(*long, offsets, alpha, dw, tf32, accumulate)
    if features == ALIGNED:  # so many groups are not ranked by size
        grouped_gemm.grouped_gemm_nt_triton(dy, x, offsets, alpha, torch.empty(1100, N, K, dtype=dtype), tf32)


def launch_few_rows(dtype: torch.dtype, kinds: Iterable[str]) -> None:
    """TN and NN of few rows a group, and products that end in an activation, of few, of some and of many."""
    K, N = ALIGNED
    w, offsets = torch.empty(GROUPS, N, K, dtype=dtype), torch.zeros(GROUPS + 1, dtype=torch.int64)
    bias, alpha = torch.empty(GROUPS, N, dtype=dtype), torch.empty(GROUPS)
    for rows in (DECODE_ROWS, FEW_ROWS, MANY_ROWS):
        x, y, scales = torch.empty(rows, K, dtype=dtype), torch.empty(rows, N, dtype=dtype), torch.empty(rows)
        if rows < MANY_ROWS:
            for extras in ((None, None, None), (bias, scales, alpha)):
                grouped_gemm.m_grouped_triton(x, w, offsets, *extras, y, True, False)
            grouped_gemm.m_grouped_triton(y, w, offsets, None, None, alpha, x, False, False)
        for kind, interleave in [*((kind, None) for kind in kinds), ("clamped_swiglu", 1), ("situglu", 32)]:
            spec = Activation(kind, glu_interleave_size=interleave)
            act = torch.empty(rows, N // 2 if spec.gated else N, dtype=dtype)
            for extras in ((None, None), (bias, scales)):
                grouped_activation_triton(x, w, offsets, spec, *extras, act)


@contextlib.contextmanager
def without_gluon() -> Iterator[None]:
    """In which launchers think that this is another release of Triton."""
    refused = {"why_no_gluon": lambda capability: "They are written in another Gluon."}
    with patch.multiple(grouped_gemm, **refused), patch.multiple(grouped_gemm_float8, **refused):
        yield


def launch_candidates() -> None:
    """The products of a linear with each tile that `bench tune` tries for them."""
    for gemm in gemms((GROUPS, *reversed(ALIGNED))).values():
        case = gemm_case(gemm, MANY_ROWS, "cpu")
        a, b, offsets, out = case.left, case.right, case.splits.offsets, case.out
        for tile in candidates(gemm, MANY_ROWS, (9, 0)):
            use_tiles(TileTable({}, (9, 0), (MeasuredTile(gemm, MANY_ROWS, tile, 0.0, 0.0),)))
            if gemm.product == "NT":
                grouped_gemm.grouped_gemm_nt_triton(a, b, offsets, None, out, False, gemm.accumulate)
            else:
                transposed = gemm.product == "TN"
                grouped_gemm.m_grouped_triton(a, b, offsets, None, None, None, out, transposed, False)


def launch_grouped_gemm_float8(
    rows: int, features: tuple[int, int], out_dtype: torch.dtype, groups: int = GROUPS
) -> None:
    """Per tensor and of rows, with fast and with split accumulation; 1x128 with 128x128; 1x128 with 1x128."""
    K, N = features
    steps, columns = -(-K // 128), -(-rows // 128) * 128
    offsets, bias, scales = torch.zeros(groups + 1, dtype=torch.int64), torch.empty(groups, N), torch.empty(rows)
    one, row, whole = torch.empty(groups), torch.empty(steps, rows), torch.empty(1, rows)
    square, column = torch.empty(groups, -(-N // 128), steps), torch.empty(groups, steps, N)
    vector = torch.empty(groups, 1, N)
    every_pair = out_dtype == torch.bfloat16 and rows == MANY_ROWS and features == ALIGNED
    for a, b in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))[: 3 if every_pair else 1]:
        x, w = torch.empty(rows, K, dtype=a.dtype), torch.empty(groups, N, K, dtype=b.dtype)
        y, dw = torch.empty(rows, N, dtype=out_dtype), torch.empty(groups, N, K, dtype=out_dtype)
        launch_tn = grouped_gemm_float8.grouped_gemm_tn_float8_triton
        launch_tn(x, one, w, one, offsets, None, None, y, False)
        launch_tn(x, whole, w, vector, offsets, bias, scales, y, False)
        if rows == MANY_ROWS and features == ALIGNED:
            both_e4m3 = a == b == E4M3  # E5M2 is as wide
            launch_float8_gluon(a.dtype, b.dtype, out_dtype, (GROUPS, 256, 512) if both_e4m3 else (GROUPS,))
        if rows == FEW_ROWS:  # only the fast accumulation of a few rows has tiles of its own
            continue
        for x_scale, w_scale, split in (
            (one, one, False),
            (one, one, True),
            (whole, vector, False),
            (whole, vector, True),
            (row, square, False),
            (row, column, False),
        ):
            for extras, with_or_without in product(
                ((None, None), (bias, scales)), (contextlib.nullcontext, without_gluon)
            ):
                with with_or_without():
                    launch_tn(x, x_scale, w, w_scale, offsets, *extras, y, split)
        K_out = K if features[1] == ALIGNED[1] else ODD[0]
        dy_T, x_T = torch.empty(N, columns, dtype=a.dtype), torch.empty(K_out, columns, dtype=b.dtype)
        blocks, dw = (torch.empty(columns // 128, N), torch.empty(columns // 128, K_out)), dw[..., :K_out].contiguous()
        vectors = vector, torch.empty(groups, 1, K_out)
        kinds = ((one, one), False), ((one, one), True), (vectors, False), (vectors, True), (blocks, False)
        for with_or_without in (contextlib.nullcontext, without_gluon):
            with with_or_without():
                for (dy_scale, x_scale), split in kinds:
                    for out, add in ((dw, False), (dw, True), (dw.float(), False), (dw.float(), True)):
                        launch_nt = grouped_gemm_float8.grouped_gemm_nt_float8_triton
                        launch_nt(dy_T, dy_scale, x_T, x_scale, offsets, out, split, add)


def launch_cast_at_once(groups: int) -> None:
    """FC1 of codes and SwiGLU in one kernel that stores both, or act's codes alone."""
    rows, (K, N) = groups * FEW_ROWS, (2 * ALIGNED[0], ALIGNED[1])
    x, w, act = (torch.empty(shape, dtype=E4M3.dtype) for shape in ((rows, K), (groups, N, K), (rows, N // 2)))
    one, offsets, h = torch.empty(groups), torch.zeros(groups + 1, dtype=torch.int64), torch.empty(rows, N).bfloat16()
    for scales, amax, stored in product((None, torch.empty(rows)), (None, one), (h, None)):
        cast = chain_cast.Cast(act, one, None, None, per_tensor(E4M3, GivenScale()), one, amax, offsets)
        step = activation_step(Activation("swiglu"), scales is not None)
        float8_activation.m_grouped_activation_gluon(
            x, w, offsets, scales, stored, act, WIDE_IN_GLUON, step, x_scale=one, w_scale=one, cast=cast
        )


def launch_float8_gluon(
    a: torch.dtype, b: torch.dtype, out_dtype: torch.dtype, of_groups: Sequence[int] = (GROUPS, 256, 512)
) -> None:
    """TN of groups that have many rows, per tensor, of rows and of 1x128 with 128x128, fast and split; and NT."""
    width, half_tiles = 256, 384
    for groups in of_groups:
        one, offsets = torch.empty(groups), torch.zeros(groups + 1, dtype=torch.int64)
        w, square = torch.empty(groups, width, width, dtype=b), torch.empty(groups, 2, 2)
        vector = torch.empty(groups, 1, width)
        for rows in (groups * FEW_ROWS, groups * IN_ORDER_ROWS):  # by a queue, and of blocks in order
            bias, scales = torch.empty(groups, width), torch.empty(rows)
            x, y = torch.empty(rows, width, dtype=a), torch.empty(rows, width, dtype=out_dtype)
            for extras in ((None, None), (bias, None), (bias, scales)):
                for x_scale, w_scale, split in (
                    (one, one, False),
                    (one, one, True),
                    (torch.empty(1, rows), vector, True),
                    (torch.empty(2, rows), square, False),
                ):
                    arguments = x, x_scale, w, w_scale, offsets, *extras, y, split
                    grouped_gemm_float8.grouped_gemm_tn_float8_triton(*arguments)
        if a == b == E4M3.dtype and out_dtype == torch.bfloat16 and not why_no_gluon(grouped_gemm.capability(x)):
            launch_cast_at_once(groups)
        w, bias = torch.empty(groups, half_tiles, width, dtype=b), torch.empty(groups, half_tiles)
        y = torch.empty(rows, half_tiles, dtype=out_dtype)
        vectors = torch.empty(1, rows), torch.empty(groups, 1, half_tiles)
        for given, split in (((one, one), False), ((one, one), True), (vectors, True)):
            arguments = x, given[0], w, given[1], offsets, bias, scales, y, split
            grouped_gemm_float8.grouped_gemm_tn_float8_triton(*arguments)
        dy_T, x_T, row = (
            torch.empty(width, rows, dtype=a),
            torch.empty(width, rows, dtype=b),
            torch.empty(rows // 128, width),
        )
        for dtype, add in ((out_dtype, False), (torch.float32, False), (torch.float32, True)):
            dw = torch.empty(groups, width, width, dtype=dtype)
            launch_nt = grouped_gemm_float8.grouped_gemm_nt_float8_triton
            for scale, split in ((one, False), (one, True), (vector, False), (vector, True), (row, False)):
                launch_nt(dy_T, scale, x_T, scale, offsets, dw, split, add)
            if not why_no_gluon(grouped_gemm.capability(x)):
                launch_nt(dy_T.view(rows, width), one, x_T, one, offsets, dw, True, add, row_offsets=offsets)
        dy_T, x_T = (torch.empty(width, groups * ADDED_BY_L2, dtype=dtype) for dtype in (a, b))
        row, dw = torch.empty(groups * ADDED_BY_L2 // 128, width), torch.empty(groups, width, width)
        grouped_gemm_float8.grouped_gemm_nt_float8_triton(dy_T, row, x_T, row, offsets, dw, False, True)


def launch_norms(rows: int, N: int, dtype: torch.dtype) -> None:
    x, weight = torch.empty(rows, N, dtype=dtype), torch.empty(N, dtype=dtype)
    for w, bias in ((weight, None), (weight, weight), (None, None)):  # RMSNorm, LayerNorm, L2Normalization
        _, mean, rstd = norm_triton.norm_triton(x, w, bias, 1e-5, 1 / N, centered=bias is not None)
        needs = {"need_dweight": w is not None, "need_dbias": bias is not None}
        norm_triton.dnorm_triton(x, x, mean, rstd, w, 1 / N, **needs)
        norm_triton.dnorm_triton(x, x, mean, rstd, w, 1 / N, **needs, need_dx=False)
        if w is not None and bias is None:
            norm_triton.dnorm_triton(x, x, mean, rstd, w, 1 / N, **needs, added=x)


def launch_permute(rows: int, features: int, dtype: torch.dtype) -> None:
    """Moves along maps of few and many slots, and the making of the map for few and many experts."""
    for topk in (1, 8, 32):
        row_of_slot = torch.empty(rows, topk, dtype=torch.int64)
        x, y = torch.empty(rows, features, dtype=dtype), torch.empty(rows * topk, features, dtype=dtype)
        permute.dispatch_triton(x, row_of_slot, y)
        permute.combine_triton(y, row_of_slot, x)
        permute.combine_triton(y, row_of_slot, x, y[:, 0].contiguous(), torch.empty(rows, topk, dtype=dtype))
        permute.gather_triton(x, row_of_slot.flatten(), y)
    slots = row_of_slot.flatten()
    for num_experts in (1, 128, permute.MOST_EXPERTS):
        sizes = slots.new_empty(num_experts)
        permute.make_routing_map_triton(row_of_slot, row_of_slot, slots, slots, sizes)
        permute.make_routing_map_triton(row_of_slot, row_of_slot, slots, None, sizes, y[:, 0], y[:, 0])


def launch_symmetric(rows: int, features: int, dtype: torch.dtype) -> None:
    """Transfers of few and many slots, of rows alone and with scales."""
    for topk in (1, 8, 32):
        indices = torch.empty(rows, topk, dtype=torch.int64)
        counts, place, scales = torch.empty(128, dtype=torch.int64), indices.int(), torch.empty(rows, topk)
        x, memory = torch.empty(rows, features, dtype=dtype), SimpleNamespace(addresses=counts)
        regions = {"num_ranks": 8, "origins_at": 1024, "scales_at": 2048, "members_at": 3072, "rows_at": 4096}
        origins, totals = place[:, 0].contiguous(), counts[:2]
        shared: dict[str, Any] = {"memory": memory, "origins": origins, "members": place, **regions}
        buffers: Any = SimpleNamespace(capacity=rows, rows=lambda dtype, H, x=x: x.to(dtype), **shared)
        symmetric.put_counts(counts, 1, 8, 3, counts, 128)
        symmetric.layout(counts.expand(8, -1).contiguous(), counts[:8], 3, rows, counts[:1])
        symmetric.locate(indices, indices, counts, totals, rows)
        for given in (scales, None):
            symmetric.push(x, given, place, place, buffers)
            symmetric.pull(x, given, place, buffers)
        symmetric.pull(None, scales, place, buffers)
        of_rows = scales[:, 0].contiguous()
        symmetric.expand(x, place, origins, x, (totals, of_rows, origins, of_rows))
        symmetric.expand(x.view(torch.uint8), place, origins, x.view(torch.uint8))
        symmetric.expand(x, place, origins, x)
        symmetric.sum_members(x, place, origins, x)
        for sent in {dtype, torch.promote_types(dtype, torch.float32)}:
            symmetric.pull_sums(x, sent, place, buffers)


def launch_routing(rows: int) -> None:
    """Routes of few and many experts and slots, with one of the gradients and with both."""
    for num_experts, topk in ((1, 1), (60, 4), (128, 8), (512, 512)):
        logits, probs = torch.empty(rows, num_experts), torch.empty(rows, topk)
        indices, fractions = torch.empty(rows, topk, dtype=torch.int64), torch.empty(num_experts)
        config = routing.route_config(num_experts, topk)
        for normalized in (True, False):
            routing.route_triton(logits, probs, indices, logits, logits, logits, config, normalized)
            routing.balance_triton(torch.empty(2, 5, num_experts), indices, fractions, fractions, rows, topk)
            for dprobs, dloss in ((probs, None), (None, fractions[0]), (probs, fractions[0])):
                about = (probs, indices, logits, fractions, logits, 1.5, normalized)
                routing.droute_triton(dprobs, dloss, *about)


def launch_router_products(rows: int) -> None:
    """dx of few and many experts, and of both dtypes of weights; dlogits in parts."""
    for num_experts, hidden in ((8, 64), (128, 2048), (512, 2880)):
        dlogits = router_product.in_parts(torch.empty(rows, num_experts))
        for parts in (1, 3):
            weight, dx = (
                torch.empty(n, hidden * p, dtype=torch.bfloat16) for n, p in ((num_experts, parts), (rows, 1))
            )
            for dy in (dx, None):
                router_product.dgrad_triton(dlogits, weight, dy, dx)


def launch_chains(rows: int, features: int, dtype: torch.dtype) -> None:
    """Each activation between a bias, and a scale, a dropout and an added tensor; alone with a factor a row; cast."""
    x, dy = torch.empty(rows, features, dtype=dtype), torch.empty(rows, features, dtype=dtype)
    wide, factors = torch.empty(rows, 2 * features, dtype=dtype), torch.empty(rows)
    seed = torch.zeros(1, dtype=torch.int64)
    behind = [steps.scale_step(0.5), steps.dropout_step(0.1), steps.ADD_ELEMENT]
    for kind in KINDS:
        spec = Activation(kind, glu_interleave_size=32 if kind == "situglu" else None)
        given = wide if spec.gated else x
        chain = [steps.ADD_COLUMN, activation_step(spec, False), *behind]
        operands = [torch.empty(given.shape[1], dtype=dtype), None, None, seed, dy]
        elementwise.elementwise(given, chain, operands)
        elementwise.delementwise(dy, given, chain, operands, need_operands=(True, False, False, False, False))
        scaled = [activation_step(spec, True)]
        elementwise.elementwise(given, scaled, [factors])
        elementwise.delementwise(dy, given, scaled, [factors], need_operands=(True,), need_y=True)
    sum_shares_triton(torch.empty(9, rows), factors)
    for form in (E4M3, E5M2):
        chain, operands = [steps.ADD_COLUMN, activation_step(Activation("gelu"), False)], [x[0], None]
        for quantizer in (MXFP8Quantizer(form), DelayedScalingQuantizer(form, DelayedScaling())):
            room = quantizer.empty_like_quantized(x.shape, dtype, x.device)
            cast = chain_cast.cast_into(room._replace(amax=torch.empty(1)))
            elementwise.elementwise_cast(x, cast, chain, operands)
            elementwise.delementwise(dy, x, chain, operands, need_operands=(True, False), cast=cast)


def launch_activation_casts(rows: int, features: int, dtype: torch.dtype) -> None:
    """Each activation of rows in groups with a factor a row, cast; dh both ways and by rows. One whose scales follow
    from amaxes."""
    dact, wide = torch.empty(rows, features, dtype=dtype), torch.empty(rows, 2 * features, dtype=dtype)
    splits = Splits.make([rows // GROUPS] * GROUPS, rows=rows, device="cpu")
    factors = torch.empty(rows)
    given = DelayedScalingQuantizer(E4M3, DelayedScaling(), scale=torch.empty(GROUPS))
    for kind, interleave in [*((kind, None) for kind in KINDS), ("clamped_swiglu", 1)]:
        spec = Activation(kind, glu_interleave_size=interleave)
        h, amax = wide if spec.gated else dact, torch.empty(GROUPS)

        def room(shape: torch.Size, rowwise: bool, columnwise: bool, amax: torch.Tensor = amax) -> QuantizedBuffers:
            made = given.empty_grouped(shape, dtype, splits, rowwise=rowwise, columnwise=columnwise)
            return made._replace(amax=amax)

        activation.activation_cast(h, spec, factors, room(dact.shape, True, False))
        for columnwise in (True, False):
            activation.dactivation(
                dact, h, spec, factors, need_dh=False, need_dscales=True,
                dh_into=room(h.shape, True, columnwise), act_into=room(dact.shape, False, True),
            )  # fmt: skip
    launch_meetings(dact, wide, splits, factors)
    if dtype == torch.bfloat16 and dactivation_cast.runs_gluon(dact.device):
        launch_dactivations(dact, wide, splits, factors)
    of_blocks, held = MXFP8Quantizer(E4M3), torch.float32 if dtype == torch.float32 else torch.bfloat16
    into = partial(of_blocks.empty_grouped, dtype=dtype, splits=splits, values=held)
    for kind in KINDS:
        spec = Activation(kind)
        h = wide if spec.gated else dact
        activation.activation_cast(h, spec, factors, into(dact.shape, rowwise=True, columnwise=False))
        activation.dactivation(
            dact, h, spec, factors, need_dh=False, need_dscales=True,
            dh_into=into(h.shape, rowwise=True, columnwise=True),
            act_into=into(dact.shape, rowwise=False, columnwise=True),
        )  # fmt: skip
    for rows_of in (Float8BlockQuantizer(E4M3), RowwiseScalingQuantizer(E4M3)):
        into = rows_of.empty_grouped(dact.shape, dtype, splits, rowwise=True, columnwise=False)
        activation.activation_cast(wide, Activation("swiglu"), factors, into)


def launch_dactivations(dact: torch.Tensor, h: torch.Tensor, splits: Splits, factors: torch.Tensor) -> None:
    """What is quantized in backward by kernels in Gluon: by rows, columns and both, with and without values."""
    blocks, vectors = Float8BlockQuantizer(E4M3), [RowwiseScalingQuantizer(form) for form in (E4M3, E5M2)]
    quantizers = blocks, *vectors, CurrentScalingQuantizer(E4M3), CurrentScalingQuantizer(E5M2)
    for quantizer, (row, column) in product(quantizers, ((True, True), (True, False), (False, True))):
        room = partial(quantizer.empty_grouped, dtype=dact.dtype, splits=splits)
        known = {} if quantizer in (blocks, *vectors) else {"meetings": empty_meetings(GROUPS, dact.device)}
        kinds: list[tuple[str, int, bool, torch.Tensor | None]] = [
            ("swiglu", MANY_ROWS, False, factors), ("situglu", 0, True, factors), ("geglu", MANY_ROWS, True, factors)
        ]  # fmt: skip
        if row and column:
            kinds += [("swiglu", MANY_ROWS, False, None), ("swiglu", 0, False, None)]
        for kind, most, need_dh, given in kinds:
            if dact.shape[1] % 128 and quantizer is blocks:
                continue
            with meetings_of(most):
                activation.dactivation(
                    dact, h, Activation(kind), given, need_dh=need_dh, need_dscales=given is not None,
                    dh_into=room(h.shape, rowwise=row, columnwise=column),
                    act_into=room(dact.shape, rowwise=False, columnwise=True, **known),
                )  # fmt: skip


def meetings_of(rows: int) -> contextlib.AbstractContextManager:
    """Groups of up to so many rows meet, and share programs if there are some."""
    found = {"most_rows": lambda *about: rows, "most_programs": lambda *about: rows}
    return patch.multiple(cast_float8, **found)


def launch_meetings(dact: torch.Tensor, wide: torch.Tensor, splits: Splits, factors: torch.Tensor) -> None:
    """Activations whose scales follow from amaxes: of groups that meet, and of a kernel that knows or finds them."""
    quantizer = CurrentScalingQuantizer(E4M3)
    room = partial(quantizer.empty_grouped, dtype=dact.dtype, splits=splits)
    every = [(kind, True) for kind in activation._FORWARD if dact.dtype.itemsize == 2]
    for kind, meets in [*every, ("swiglu", False)]:
        spec = Activation(kind)
        h = wide if spec.gated else dact
        with meetings_of(MANY_ROWS if meets else 0):
            into = room(dact.shape, rowwise=True, columnwise=False)
            activation.activation_cast(h, spec, factors, into)
            for columnwise, meetings in product((True, False), (None, into.meetings)):
                activation.dactivation(
                    dact, h, spec, factors, need_dh=False, need_dscales=True,
                    dh_into=room(h.shape, rowwise=True, columnwise=columnwise),
                    act_into=room(dact.shape, rowwise=False, columnwise=True, meetings=meetings),
                )  # fmt: skip


def launch_block_casts(rows: int, features: tuple[int, int], dtype: torch.dtype) -> None:
    """Casts of rows, groups and weights in all kinds of blocks, and dequantization of each copy."""
    x, w = torch.empty(rows, features[0], dtype=dtype), torch.empty(GROUPS, *features, dtype=dtype)
    splits = Splits.make([rows // GROUPS] * GROUPS, rows=rows, device="cpu")
    for block_dim, power_2 in product((1, 2), (True, False)):
        how = Float8BlockQuantizer(E4M3, block_dim, power_2).spec
        for rowwise, columnwise in ((True, False), (False, True)):
            cast_blocks.cast_blocks_on_triton(x, how, rowwise=rowwise, columnwise=columnwise)
        row_of = torch.empty(rows, dtype=torch.int64)
        cast_blocks.cast_blocks_on_triton(x, how, rowwise=True, columnwise=True, splits=splits, row_of=row_of)
        for of_splits in (None, splits):
            copies = cast_blocks.cast_blocks_on_triton(x, how, rowwise=True, columnwise=True, splits=of_splits)
            back, about = cast_blocks.dequantize_blocks_on_triton, {"shape": x.shape, "splits": of_splits}
            back(*copies[:2], how, dtype, columnwise=False, **about)
            back(*copies[2:], how, dtype, columnwise=True, **about)
    how = Float8BlockQuantizer(E5M2, 2, True).spec
    cast_blocks.cast_blocks_on_triton(w, how, rowwise=True, columnwise=True, stacked=True)


def launch_casts(rows: int, features: tuple[int, int], dtype: torch.dtype) -> None:
    """MXFP8 and per-tensor FP8, both ways, of single tensors, stacked weights and grouped rows."""
    x, w = torch.empty(rows, features[1], dtype=dtype), torch.empty(GROUPS, *features, dtype=dtype)
    splits = Splits.make([rows // GROUPS] * GROUPS, rows=rows, device="cpu")
    scale, amax = torch.empty(GROUPS), torch.empty(GROUPS)
    for most_recent in (True, False):
        end_step_triton((torch.empty(1024, GROUPS),) * 3, (scale,) * 3, E4M3.max, most_recent)
    for form, kind in product((E4M3, E5M2), ({}, {"stacked": True}, {"splits": splits})):
        given, both = w if "stacked" in kind else x, {"rowwise": True, "columnwise": True}
        for how in (MXFP8Quantizer(form).spec, MXFP8Quantizer(form, "floor", square=True).spec):
            copies = cast_blocks.cast_blocks_on_triton(given, how, **both, **kind)
        back, about = cast_blocks.dequantize_blocks_on_triton, {"shape": given.shape, "splits": kind.get("splits")}
        back(*copies[:2], how, dtype, columnwise=False, **about)
        back(*copies[2:], how, dtype, columnwise=True, **about)
        if "splits" in kind:  # values in place of codes, of both copies and of the rowwise one; of gathered rows, too
            rows_of = (None, torch.empty(rows, dtype=torch.int64))
            for row_of, (row, column) in product(rows_of, ((dtype, dtype), (dtype, None), (None, None))):
                values = {"row_of": row_of, "row_values": row, "column_values": column}
                cast_blocks.cast_blocks_on_triton(x, MXFP8Quantizer(form).spec, **both, **kind, **values)
        cast = cast_float8.cast_float8_on_triton
        current = per_tensor(form, Float32Scale())
        copies = cast(given, current, **both, **kind)
        if "splits" in kind:
            cast_float8.cast_from_meetings(x, copies, current, empty_meetings(GROUPS, x.device), splits, 1)
            for copies_of in (both, {"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}):
                cast(given, current, **copies_of, **kind, row_of=torch.empty(rows, dtype=torch.int64))
        if dtype.itemsize == 2:
            with meetings_of(MANY_ROWS):
                for copies_of in (both, {"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}):
                    cast(given, current, **copies_of, **kind)
        how = per_tensor(form, GivenScale())
        cast(given, how, **both, **kind, scale=scale if kind else scale[:1], amax_out=amax)
        if "splits" in kind:
            row_of = torch.empty(rows, dtype=torch.int64)
            cast(given, how, **both, **kind, scale=scale, amax_out=amax, row_of=row_of)
        cast_float8.dequantize_float8_on_triton(*copies[:2], how, dtype, columnwise=False, **about)
        cast_float8.dequantize_float8_on_triton(*copies[2:], how, dtype, columnwise=True, **about)


def launch_rowwise_casts(rows: int, features: int, dtype: torch.dtype) -> None:
    """FP8 with a scale a row and column: both copies of grouped rows, of stacked weights, and whole rows alone."""
    x, w = torch.empty(rows, features, dtype=dtype), torch.empty(GROUPS, features, features, dtype=dtype)
    splits = Splits.make([rows // GROUPS] * GROUPS, rows=rows, device="cpu")
    cast, back = (getattr(cast_float8_rowwise, f"{verb}_float8_rowwise_on_triton") for verb in ("cast", "dequantize"))
    for form, power_2 in ((E4M3, False), (E4M3, True), (E5M2, False)):
        how = RowwiseScalingQuantizer(form, power_2).spec
        for given, kind in ((x, {"splits": splits}), (w, {"stacked": True})):
            copies = cast(given, how, rowwise=True, columnwise=True, **kind)
            about = {"shape": given.shape, "splits": kind.get("splits")}
            back(*copies[:2], how, dtype, columnwise=False, **about)
            back(*copies[2:], how, dtype, columnwise=True, **about)
            cast(given, how, rowwise=False, columnwise=True, **kind)
            if dtype == torch.bfloat16:
                for rowwise in (True, False):
                    with meetings_of(rows):
                        cast(given, how, rowwise=rowwise, columnwise=True, **kind)
        row_of = torch.empty(rows, dtype=torch.int64)
        for rowwise, columnwise in ((True, True), (True, False)):
            cast(x, how, rowwise=rowwise, columnwise=columnwise, splits=splits, row_of=row_of)
        for columns in (features, 2048, 7168, 16384):
            cast(torch.empty(rows, columns, dtype=dtype), how, rowwise=True, columnwise=False, splits=splits)


NVFP4_KINDS = {
    "plain": {},
    "rht": {"rht": True},
    "rht-float32": {"rht": True, "round_rht": False},
    "stochastic": {"rht": True, "seed": torch.zeros(1, dtype=torch.int64)},
    "stochastic-float32": {"rht": True, "seed": torch.zeros(1, dtype=torch.int64), "round_rht": False},
    "random": {"seed": torch.zeros(1, dtype=torch.int64)},
    "square": {"two_d": True},
    "row-scaled": {"rht": True, "row_scaled": True},
}


def launch_nvfp4(rows: int, features: int, dtype: torch.dtype, kinds: Iterable[str]) -> None:
    """Casts of groups, both copies at once; for the transform each one of a tensor alone; for 16x16 blocks those of a
    stack. In Gluon also of one tensor, of few groups, and of so many that they are looked at in turn, and the values of
    groups. Dequantization."""
    x, splits = torch.empty(rows, features, dtype=dtype), Splits.make([rows] + 40 * [0], rows=rows, device="cpu")
    few, many = (Splits.make([rows] + more * [0], rows=rows, device="cpu") for more in (19, 130))
    in_gluon = dtype == torch.bfloat16 and features == ALIGNED[0] and not why_no_gluon(grouped_gemm.capability(x))
    for kind, gluon in product(kinds, {False, in_gluon}):
        cast_nvfp4.runs_gluon = lambda x, gluon=gluon: gluon
        how = {"rht": False, "row_scaled": False, "two_d": False, "seed": None, "round_rht": True} | NVFP4_KINDS[kind]
        about = {"rht": how["rht"], "row_scaled": how["row_scaled"], "round_rht": how["round_rht"]}
        alone = [(None, True, False), (None, False, True)] if kind == "rht" else []
        alone += [(None, True, True), (few, True, True), (many, True, True)] if gluon else []
        for of_splits, rowwise, columnwise in [(splits, True, True), *alone]:
            amaxes = cast_nvfp4.amax_nvfp4(x, of_splits, rowwise=rowwise, columnwise=columnwise, **about)
            cast_nvfp4.cast_nvfp4(x, of_splits, amaxes, **how)
            if gluon and of_splits is not None and kind not in ("row-scaled", "square"):
                of_values = {name: how[name] for name in ("rht", "seed", "round_rht")}
                for column_codes in (True, False):
                    cast_nvfp4.cast_rows_to_values_nvfp4(x, of_splits, amaxes, column_codes=column_codes, **of_values)
        if kind == "square":
            stack = x.view(2, rows // 2, features)
            amaxes = cast_nvfp4.amax_nvfp4(stack, None, rowwise=True, columnwise=True, **about)
            cast_nvfp4.cast_nvfp4(stack, None, amaxes, **how)
    alpha_from_amax_triton(amaxes.rowwise)
    of_rows = amaxes.rowwise.reshape(-1)
    combined_alpha_triton(of_rows, 2688.0, of_rows[0], 2688.0)
    combined_alpha_triton(of_rows, 2688.0, of_rows, None)
    made = cast_nvfp4.empty_codes(x, None, rowwise=True, columnwise=True)
    for codes, scale, transpose in ((made[0], made[1], False), (made[2], made[3], True)):
        dequantize_nvfp4.dequantize_nvfp4(codes, scale, rows if transpose else features, dtype, transpose=transpose)


def launch_all(mode: str, all_rows: Iterable[int], all_features: Iterable[tuple[int, int]]) -> None:
    dtype, tf32 = MODES[mode]
    for rows, features in product(all_rows, all_features):
        launch_grouped_gemm(rows, features, dtype, tf32)
        if not tf32 and grouped_gemm_float8.capability(None) >= (8, 9):
            # The launcher aligns rows of codes; rows of the output stay odd.
            launch_grouped_gemm_float8(rows, (ALIGNED[0], features[1]), dtype)
            if (rows, features) == (MANY_ROWS, ALIGNED):  # what a program keeps of so many groups needs registers too
                launch_grouped_gemm_float8(128 * MANY_GROUPS, ALIGNED, dtype, MANY_GROUPS)
    if dtype.itemsize == 2 and grouped_gemm.capability(None) == (9, 0):
        launch_few_rows(dtype, KINDS if mode == "bf16" else ("swiglu", "srelu"))
    for N in () if tf32 else NORM_WIDTHS:
        launch_norms(MANY_ROWS, N, dtype)
    for columns in () if tf32 else (ODD[0], 7168):
        launch_permute(MANY_ROWS, columns, dtype)
        launch_symmetric(MANY_ROWS, columns, dtype)
    if mode in ("bf16", "fp32"):
        launch_routing(MANY_ROWS)
        launch_router_products(MANY_ROWS)
    if not tf32:
        launch_chains(MANY_ROWS, ALIGNED[0], dtype)
        launch_activation_casts(MANY_ROWS, ALIGNED[0], dtype)
    if mode == "bf16" and ODD in all_features:  # masked tiles; in fp16 ptxas spills 8 bytes of one of these kernels
        launch_chains(MANY_ROWS, ODD[0], dtype)
    if mode in ("bf16", "fp32"):  # fp16 needs neither more registers nor other instructions than bf16
        for features in all_features:
            launch_casts(MANY_ROWS, features, dtype)
            launch_block_casts(MANY_ROWS, features, dtype)
            launch_rowwise_casts(MANY_ROWS, features[0], dtype)
            # A cast to NVFP4 takes seconds to compile: all kinds of it once, else those with the longest code.
            kinds = NVFP4_KINDS if features == ALIGNED and ODD in all_features else ("stochastic", "square")
            launch_nvfp4(MANY_ROWS, features[0], dtype, kinds)
            if features == ALIGNED:  # wide enough for tiles of 512 columns
                launch_nvfp4(MANY_ROWS, features[1], dtype, kinds)


def shipped_configs(mode: str) -> dict[tuple, int]:
    """(kernel, its tile) of everything that the config functions return for sm_90: programs a multiprocessor."""
    dtype, tf32 = MODES[mode]
    configs = {}
    for rows, aligned in product((0, 1, 100, 1_000, 10_000, 1_000_000), (True, False)):
        about = {"tf32": tf32, "aligned": aligned, "capability": (9, 0)}
        for descriptors, out_dtype in product({False, aligned}, (dtype, torch.float32)):
            both = about | {"descriptors": descriptors, "out_dtype": out_dtype}
            chosen = []
            for gluon in {False, why_not_this_release() is None}:
                ways = both | {"gluon": gluon}
                chosen += [("m", m_grouped_config(rows, G, dtype, **ways)) for G in (1, 8, 257)]
                chosen += [("k", k_grouped_config(rows, 8, dtype, **ways, accumulate=add)) for add in (False, True)]
            for axis, config in chosen:
                if config.gluon:
                    configs[f"{axis}_grouped_gluon_kernel", *config[:3], config.num_warps // 2, None] = 1
                    continue
                kernel = f"{axis}_grouped_{'persistent_' if config.programs else ''}kernel"
                configs[kernel, *config[:5]] = max(config.programs, 1)
    for rows, gated in product((1, 200, 1_000_000) if dtype.itemsize == 2 else (), (False, True)):
        config = activation_config(rows, 8, gated)
        configs["m_grouped_activation_kernel", *config[:5]] = config.programs
    kinds = (("tensor", False), ("tensor", True), ("vector", False), ("vector", True), ("square", True), ("row", True))
    for descriptors, (layout, promote) in product(() if tf32 else (True, False), kinds):
        about = {"descriptors": descriptors, "promote": promote, "out_dtype": dtype, "capability": (9, 0)}
        choose_m, choose_k = m_grouped_float8_config, k_grouped_float8_config
        in_gluon = {False, why_not_this_release() is None}
        about["layout"] = layout
        chosen = [("m", choose_m(rows, 8, gluon=gluon, **about)) for rows, gluon in product((100, 1_000_000), in_gluon)]
        for out_dtype, add in product((dtype, torch.float32), (False, True) if layout != "square" else ()):
            both = about | {"out_dtype": out_dtype, "accumulate": add}
            chosen += [
                ("k", choose_k(rows, 8, gluon=gluon, **both)) for rows, gluon in product((100, 1_000_000), in_gluon)
            ]
        for axis, config in chosen:
            if getattr(config, "gluon", False):
                kernel = "m_grouped_gluon_kernel" if axis == "m" else "k_grouped_float8_gluon_kernel"
                configs[kernel, *config[:3], 4, None] = 1
                continue
            kernel = f"{axis}_grouped_{'float8_persistent_' if config.programs else ''}kernel"
            configs[kernel, *config[:5]] = max(config.programs, 1)
    norms = {
        "norm_kernel": norm_triton.norm_config,
        "dnorm_kernel": lambda rows, N: norm_triton.dnorm_config(rows, N, 132),
        "dparameters_kernel": lambda rows, N: norm_triton.dparameters_config(rows, N, 132),
    }
    for (kernel, choose), rows, N in product(() if tf32 else norms.items(), (1, 1_000_000), range(1, 20_000, 7)):
        block_m, block_n, num_warps, *_ = choose(rows, N)
        configs[kernel, block_m, block_n, None, num_warps, None] = 1
    return configs


def multiplies_codes(kernel: str, block_k: int | None) -> bool:
    """Whether it is a grouped product of codes: steps of values are shorter."""
    return "grouped" in kernel and block_k == BLOCK


class OfflineDriver:
    """As much of a driver as compiling needs."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def arguments(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Hashable]:
    """What Triton compiles for, by the names of the arguments and options; the tile is one value, the first."""
    bound, specialized, options = kernel.device_caches[0][-1](*args, **kwargs)
    values = {name: str(value) for name, value in (*options.items(), *zip(bound, specialized, strict=True))}
    return {"tile": tuple(values.pop(name, None) for name in TILE), **dict(sorted(values.items()))}


def covered(launch: Callable[[], None], mode: str) -> set[tuple[str, tuple]]:
    """Of what it launches, as (kernel, its arguments), as much as every value needs; of products of bf16 in Gluon
    as much as each tile with each value of the other arguments and every two constants need; of what is no
    product of fp16, which needs neither more registers nor other instructions than bf16, as much as every tile needs.
    """
    launched: dict[str, dict[tuple, dict]] = defaultdict(dict)

    def only_note(kernel, *args, grid, warmup, **kwargs):
        row, called = arguments(kernel, args, kwargs), kernel.fn.__name__
        met: dict[Hashable, Hashable] = row
        if "grouped" in called and "gluon" in called and mode in ("bf16", PRODUCTS_IN_GLUON):
            met = {
                (name, other): (value, another)
                for (name, value), (other, another) in combinations(row.items(), 2)
                if name == "tile" or ("constexpr" in value and "constexpr" in another)
            }
        elif "grouped" not in called and mode == "fp16":
            met = {"tile": row["tile"]}
        launched[called][tuple(row.items())] = met

    with patch.object(JITFunction, "run", only_note):
        launch()
    return {(kernel, [*rows][place]) for kernel, rows in launched.items() for place in cover([*rows.values()], 1)}


def compile_all(mode: str, arch: int, every: bool) -> None:
    """Launches everything, or what `covered` chooses of it, and prints what ptxas says of each kernel."""
    triton.runtime.driver.set_active(OfflineDriver(arch))
    triton.knobs.nvidia.dump_ptxas_log = True
    for module in (grouped_gemm, grouped_gemm_float8):
        module.capability = lambda x: divmod(arch, 10)
    cast_float8.casts_natively = elementwise.casts_natively = lambda device: arch >= 89
    cast_float8.most_rows = cast_float8.most_programs = lambda *about: 0
    norm_triton.shared_memory = lambda x: LIMITS[arch]
    cast_nvfp4.runs_triton = dequantize_nvfp4.runs_triton = lambda x: True
    cast_nvfp4.converts_to_float8 = lambda x: arch >= 89
    elementwise.runs_triton = activation.runs_triton = lambda *tensors, dtypes=(): True
    dactivation_cast.runs_triton = elementwise.runs_triton
    cast_float8.runs_gluon = dactivation_cast.runs_gluon = lambda device: why_no_gluon(divmod(arch, 10)) is None
    launch = partial(launch_mode, mode, arch)
    wanted = None if every else covered(launch, mode)
    run, reported = JITFunction.run, set()

    def only_compile(kernel, *args, grid, warmup, **kwargs):
        name = kernel.fn.__name__
        kind = name, multiplies_codes(name, kwargs.get("BLOCK_K"))
        if mode == FIRST and kind in reported:
            return
        if wanted is not None and (name, tuple(arguments(kernel, args, kwargs).items())) not in wanted:
            return

        def compiled_with_log():
            with contextlib.redirect_stdout(io.StringIO()) as output:
                compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
            return compiled, output.getvalue(), Path(os.environ["TRITON_CACHE_DIR"], f"{compiled.hash}.json")

        compiled, log, file = compiled_with_log()
        if not log and not file.exists():  # another process compiles it, or was ended before it reported
            kernel.device_caches[0][0].clear()
            triton.knobs.compilation.always_compile = True
            compiled, log, file = compiled_with_log()
            triton.knobs.compilation.always_compile = False
        if log:  # nothing is logged for what was compiled before
            report = {
                "kernel": name,
                "config": [kwargs.get(key) for key in TILE],
                "registers": sum(map(int, re.findall(r"Used (\d+) registers", log))),
                "meets": "meeting" in (kwargs.get("CAST"), kwargs.get("GIVEN")),
                "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
                "shared_bytes": compiled.metadata.shared,
                "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
                "adds": compiled.asm["ptx"].count("cp.reduce.async.bulk.tensor"),
                "warnings": re.findall(r".*\(?C75\d\d\)?.*", log),
                "shared_barriers": shared_barriers(compiled.asm["ttgir"]) if name.endswith("gluon_kernel") else [],
            }
            file.write_text(json.dumps(report))
        if compiled.hash not in reported:
            print(file.read_text())
        reported.update((kind, compiled.hash))

    with patch.object(JITFunction, "run", only_compile):
        launch()


def may_spill(report: dict) -> int:
    """How many bytes, stored and loaded, the kernel of a report may spill."""
    if (report["kernel"], report["config"][2]) == ("m_grouped_activation_gluon_kernel", WIDE_IN_GLUON.block_k):
        return SPILLED_WITH_CODES
    return SPILLED_AT_MEETINGS if report.get("meets") else 0


def shared_barriers(ttgir: str) -> list[str]:
    """What else the compiler puts into the memory of barriers of copies (`recipes.triton.barriers_gluon`)."""
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        context = ir.context()
        ir.load_dialects(context)
        nvidia.load_dialects(context)
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 80)
    manager.run(module, "shared memory")
    placed = [(int(found[1]), found.string) for found in map(PLACE.search, str(module).splitlines()) if found]
    barriers = {at + i for at, line in placed for count in BARRIERS.findall(line) for i in range(8 * int(count))}
    assert barriers or "init_barrier" not in ttgir
    return [line for at, line in placed if at in barriers and not BARRIERS.search(line)]


def launch_mode(mode: str, arch: int) -> None:
    if mode == TUNER:
        launch_candidates()
    elif mode == PRODUCTS_IN_GLUON:
        launch_queued(torch.bfloat16)
        launch_wgrads(MANY_ROWS, ALIGNED, torch.bfloat16, False)
        launch_float8_gluon(E4M3.dtype, E4M3.dtype, torch.bfloat16)
    elif mode == CASTS_IN_GLUON:
        launch_nvfp4(MANY_ROWS, ALIGNED[0], torch.bfloat16, ("stochastic", "square"))
        dact, h = (torch.empty(MANY_ROWS, features, dtype=torch.bfloat16) for features in (256, 512))
        splits = Splits.make([MANY_ROWS // GROUPS] * GROUPS, rows=MANY_ROWS, device="cpu")
        launch_dactivations(dact, h, splits, torch.empty(MANY_ROWS))
        with meetings_of(MANY_ROWS):
            for copies in ((True, True), (True, False), (False, True)):
                made = dict(zip(("rowwise", "columnwise"), copies, strict=True))
                into = CurrentScalingQuantizer(E4M3).empty_grouped(dact.shape, dact.dtype, splits, **made)
                for factors in (torch.empty(MANY_ROWS), None):
                    activation.activation_cast(h, Activation("swiglu"), factors, into)
                cast_float8.cast_float8_on_triton(h, per_tensor(E4M3, Float32Scale()), splits=splits, **made)
                if made["columnwise"]:
                    vectors = RowwiseScalingQuantizer(E4M3).spec
                    cast_float8_rowwise.cast_float8_rowwise_on_triton(h, vectors, splits=splits, **made)
    elif mode == FIRST:
        launch_all("bf16", (MANY_ROWS, FEW_ROWS), (ALIGNED, ODD))
    elif arch == 90:
        launch_all(mode, (MANY_ROWS, FEW_ROWS), (ALIGNED, ODD))
    else:
        launch_all(mode, (MANY_ROWS,), (ALIGNED,))


def compiled(mode: str, arch: int, every: bool = True) -> list[dict]:
    command = [sys.executable, __file__, mode, str(arch), *(["every"] if every else [])]
    done = subprocess.run(command, env=compiling("kernels"), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(1800)
@HOW_MANY
@pytest.mark.parametrize("mode", MODES)
def test_configurations_compile_for_hopper(mode, every):
    reports = compiled(mode, 90, every)
    shipped = shipped_configs(mode)
    missing = shipped.keys() - {(report["kernel"], *report["config"]) for report in reports}
    assert not missing, f"configurations that were not compiled: {sorted(missing)}"
    spilled = [report for report in reports if report["spilled_bytes"] > may_spill(report)]
    assert not spilled, "\n".join(map(str, spilled))
    for report in reports:
        assert report["shared_bytes"] <= LIMITS[90], report
        programs = shipped.get((report["kernel"], *report["config"]), 1)
        assert (report["shared_bytes"] + BESIDES) * programs <= SHARED_BY_PROGRAMS, f"not {programs} at once: {report}"
        if "gemm" in report["kernel"] or "grouped" in report["kernel"]:
            codes = multiplies_codes(report["kernel"], report["config"][2])
            assert bool(report["wgmma"]) == (mode != "fp32" or codes), report
        elif mode == "bf16":
            assert bool(report["wgmma"]) == ("dgrad" in report["kernel"]), report
        assert not report["warnings"] and not report["shared_barriers"], report
    kernels = {report["kernel"] for report in reports}
    assert mode != "bf16" or kernels >= all_kernels()
    in_gluon = mode == "bf16" and why_not_this_release() is None
    assert ("cast_nvfp4_gluon_kernel" in kernels) == in_gluon
    gluon = "k_grouped_gluon_kernel"
    if (every or mode == "bf16") and any(gluon in key for key in shipped):  # written, and added to by L2
        assert {bool(report["adds"]) for report in reports if report["kernel"] == gluon} == {False, True}


@pytest.mark.rest
def test_what_the_tuner_tries_compiles_for_hopper():
    reports = compiled(TUNER, 90)
    for report in reports:
        assert report["shared_bytes"] <= LIMITS[90], report
        assert report["wgmma"] and not report["spilled_bytes"] and not report["warnings"], report
    for kernel in ("m_grouped_persistent_kernel", "k_grouped_persistent_kernel"):
        tried = {tuple(report["config"]) for report in reports if report["kernel"] == kernel}
        assert tried == {tile[:5] for tile in ON_DESCRIPTORS}


@pytest.mark.triton
@pytest.mark.skipif(triton.__version__.startswith("3.6."), reason="They are among the configurations of bf16.")
@pytest.mark.timeout(1800)
@HOW_MANY
@pytest.mark.parametrize("mode", IN_GLUON)
def test_kernels_in_gluon_compile_for_hopper_with_another_release(mode, every):
    reports = compiled(mode, 90, every)
    assert IN_GLUON[mode] <= {report["kernel"] for report in reports}
    for report in reports:
        spilled = may_spill(report | {"meets": False})
        assert report["shared_bytes"] <= LIMITS[90] and report["spilled_bytes"] <= spilled, report
        assert not report["warnings"] and not report["shared_barriers"], report


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", [rest(FIRST), exhaustive("bf16")])
@pytest.mark.parametrize("arch", [80, 100], ids=["ampere", "blackwell"])
def test_kernels_compile_for_other_generations(arch, mode):
    for report in compiled(mode, arch):
        assert report["shared_bytes"] <= LIMITS[arch], report


if __name__ == "__main__":
    compile_all(sys.argv[1], int(sys.argv[2]), every="every" in sys.argv[3:])
