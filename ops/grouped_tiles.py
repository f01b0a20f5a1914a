"""Which tiles the products of a GroupedLinear run with, as words for `explain()`.

The rows decide too, and are not known before a call: the words say for how many which tile is.

    128x256x64, 8 warps, 4 stages, fprop and dgrad below 96 rows a group 64x128x64, 4 warps, 3 stages,
    by the built-in rule
"""
# G groups, N out features, K in features

from collections.abc import Mapping

import torch

from ops.gemm import gemm_dtype, quantizes
from ops.kernels.grouped_gemm import FEW_ROWS, built_in_config
from ops.kernels.grouped_gemm_float8 import m_grouped_float8_config
from ops.kernels.tiles import Gemm, in_words, tiles_in_use
from recipes.request import PlanRequest

Weights = tuple[int, int, int]  # [G, N, K]


def explain_tiles(request: PlanRequest, weights: Weights, *, accumulate: bool) -> str:
    """The tiles of the grouped path on CUDA; where torch finds no GPU, those of Hopper.

    accumulate: weight gradients are added to what is there, in float32.
    """
    gpu = torch.cuda.get_device_capability(request.device) if torch.cuda.is_available() else (9, 0)
    quantized = quantizes(request.recipe)
    if quantized and request.recipe.support(request.device) == "native":
        return f"{_float8_rule(gpu)}, by the built-in rule"
    dtype = gemm_dtype(request.dtype, request.device) if quantized else request.dtype
    sums = torch.float32 if accumulate else request.dtype
    gemms = {
        "fprop": Gemm("TN", dtype, request.dtype, False, *weights),
        "dgrad": Gemm("NN", dtype, request.dtype, False, *weights),
        "wgrad": Gemm("NT", dtype, sums, accumulate, *weights),
    }
    return f"{_measured(gemms, gpu)}{_rule(gemms, gpu)}, by the built-in rule"


def _rule(gemms: Mapping[str, Gemm], gpu: tuple[int, int]) -> str:
    fprop, wgrad = gemms["fprop"], gemms["wgrad"]
    many, few = (in_words(built_in_config(fprop, rows * fprop.num_groups, gpu)) for rows in (FEW_ROWS, 0))
    words = many if few == many else f"{many}, fprop and dgrad below {FEW_ROWS} rows a group {few}"
    other = in_words(built_in_config(wgrad, FEW_ROWS, gpu))
    return words if other == many else f"{words}, wgrad {other}"


def _float8_rule(gpu: tuple[int, int]) -> str:
    wide, small = (
        in_words(m_grouped_float8_config(FEW_ROWS, 1, layout=layout, promote=True, descriptors=True, capability=gpu))
        for layout in ("tensor", "row")
    )
    few = f", with scales of blocks, and fprop and dgrad below {FEW_ROWS} rows a group, {small}"
    return wide if wide == small else wide + few


def _measured(gemms: Mapping[str, Gemm], gpu: tuple[int, int]) -> str:
    """What the table in use holds for these products, with "else" at its end; or nothing."""
    table = tiles_in_use()
    if table is None or table.capability != gpu:
        return ""
    products: dict[str, list[str]] = {}  # by tile and rows
    for name, gemm in gemms.items():
        for tile in table.tiles:
            if tile.gemm == gemm:
                products.setdefault(f"{in_words(tile.config)} at {tile.rows} rows", []).append(name)
    found = [f"{' and '.join(names)} {words}" for words, names in products.items()]
    return f"{', '.join(found)}, measured {table.environment['date']}; else " if found else ""
