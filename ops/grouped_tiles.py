"""Which tiles the products of a GroupedLinear run with, as words for `explain()`.

The rows decide too, and are not known before a call: the words say for how many which tile is.

    128x256x64, 8 warps, 4 stages, fprop and dgrad below 96 rows a group 64x128x64, 4 warps, 3 stages,
    by the built-in rule
"""
# G groups, N out features, K in features

from functools import partial

import torch

from ops.gemm import LAYOUTS, gemm_dtype, quantizes
from ops.kernels.grouped_gemm import FEW_ROWS, allow_tf32, k_grouped_config, m_grouped_config
from ops.kernels.grouped_gemm_float8 import m_grouped_float8_config
from ops.kernels.persistent_tiles import MOST_GROUPS
from ops.kernels.tiles import in_words, tiles_in_use
from recipes.request import PlanRequest

Weights = tuple[int, int, int]  # [G, N, K]


def explain_tiles(request: PlanRequest, weights: Weights, *, accumulate: bool) -> str:
    """The tiles of the grouped path on CUDA; where torch finds no GPU, those of Hopper.

    accumulate: weight gradients are added to what is there, in float32.
    """
    gpu = torch.cuda.get_device_capability(request.device) if torch.cuda.is_available() else (9, 0)
    quantized = quantizes(request.recipe)
    if quantized and request.recipe.support(request.device) == "native":
        return _float8_rule(gpu)
    dtype = gemm_dtype(request.dtype, request.device) if quantized else request.dtype
    measured = _measured(request, dtype, weights, accumulate, gpu)
    return f"{measured}{_rule(request, dtype, weights, accumulate, gpu)}, by the built-in rule"


def _rule(
    request: PlanRequest, dtype: torch.dtype, weights: Weights, accumulate: bool, gpu: tuple[int, int]
) -> str:  # fmt: skip
    G, N, K = weights
    tf32, aligned = allow_tf32(dtype), N % 16 == K % 16 == 0
    descriptors = N * dtype.itemsize % 16 == K * dtype.itemsize % 16 == 0 and G <= MOST_GROUPS
    choose = partial(
        m_grouped_config, num_groups=G, dtype=dtype, out_dtype=request.dtype, tf32=tf32, aligned=aligned,
        descriptors=descriptors, capability=gpu,
    )  # fmt: skip
    many, few = in_words(choose(FEW_ROWS * G)), in_words(choose(0))
    sums = torch.float32 if accumulate else request.dtype
    wgrad = in_words(
        k_grouped_config(
            dtype, out_dtype=sums, tf32=tf32, aligned=aligned, descriptors=descriptors, accumulate=accumulate,
            capability=gpu,
        )
    )  # fmt: skip
    words = many if few == many else f"{many}, fprop and dgrad below {FEW_ROWS} rows a group {few}"
    return words if wgrad == many else f"{words}, for wgrad {wgrad}"


def _float8_rule(gpu: tuple[int, int]) -> str:
    wide, small = (
        in_words(m_grouped_float8_config(FEW_ROWS, 1, blockwise=blockwise, aligned=True, capability=gpu))
        for blockwise in (False, True)
    )
    if wide == small:
        return f"{wide}, by the built-in rule"
    few = f"with scales of blocks, and fprop and dgrad below {FEW_ROWS} rows a group, {small}"
    return f"{wide}, {few}, by the built-in rule"


def _measured(
    request: PlanRequest, dtype: torch.dtype, weights: Weights, accumulate: bool, gpu: tuple[int, int]
) -> str:  # fmt: skip
    """What the table in use holds for these products, with "else" at its end; or nothing."""
    table = tiles_in_use()
    if table is None or table.capability != gpu:
        return ""
    names: dict[str, list[str]] = {}  # tile and rows -> products
    for product, layout in LAYOUTS.items():
        for tile in table.tiles:
            *_, out_dtype, added, G, N, K = tile.gemm
            fits = added == (accumulate and layout == "NT") and (added or out_dtype == request.dtype)
            if fits and tile.gemm[:2] == (layout, dtype) and weights == (G, N, K):
                names.setdefault(f"{in_words(tile.config)} at {tile.rows} rows", []).append(product)
    if not names:
        return ""
    found = ", ".join(f"{' and '.join(products)} {words}" for words, products in names.items())
    return f"{found}, measured {table.environment['date']}; else "
