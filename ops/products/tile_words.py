"""Words for `explain()`: for which products codes are dequantized, and which tiles those of a GroupedLinear run with.

The number of rows decides too, and is not known before a call: the words name the range of rows for each tile.

    128x256x64, 8 warps, 4 stages in Gluon, fprop and dgrad below 384 rows a group 128x256x64, 8 warps, 4 stages,
    fprop and dgrad below 96 rows a group 64x128x64, 4 warps, 3 stages, ..., by the built-in rule

fprop of a batch-invariant recipe has one tile for any number of rows.
"""
# G groups, N out features, K in features

from collections.abc import Mapping

import torch

from ops.kernels.grouped_gemm.measured_tiles import Gemm, describe, tiles_in_use
from ops.kernels.grouped_gemm.tile_rules import DECODE_ROWS, FEW_ROWS, MANY_ROWS, QUEUED_ROWS, built_in_config
from ops.kernels.grouped_gemm.tile_rules_float8 import built_in_float8_config
from ops.products.product import gemm_dtype, quantizes
from recipes.native_products import COLUMNWISE, LAYOUTS, Product, compute_capability
from recipes.recipe import OPERANDS
from recipes.request import PlanRequest
from recipes.tensors.formats import ScaleLayout

Weights = tuple[int, int, int]  # [G, N, K]


def explain_tiles(request: PlanRequest, weights: Weights, *, accumulate: bool) -> str:
    """The tiles of the grouped path on CUDA; where torch finds no GPU, those of Hopper.

    accumulate: weight gradients are added to what is there, in float32.
    """
    gpu = compute_capability(request.device)
    assert gpu is not None, "a CPU has no tiles"
    recipe, dtype = request.recipe, request.dtype
    multiplied = gemm_dtype(dtype, request.device) if quantizes(recipe) else dtype
    gemms: dict[Product, Gemm] = {
        "fprop": Gemm("TN", multiplied, dtype, False, *weights),
        "dgrad": Gemm("NN", multiplied, dtype, False, *weights),
        "wgrad": Gemm("NT", multiplied, torch.float32 if accumulate else dtype, accumulate, *weights),
    }
    scalings = {product: _float8_scaling(request, product) for product in gemms}

    def tile(product: Product, rows: int) -> str:
        if recipe.batch_invariant and product == "fprop":
            rows = MANY_ROWS
        gemm, scaling = gemms[product], scalings[product]
        if scaling is None:
            return describe(built_in_config(gemm, rows * gemm.num_groups, gpu))
        split = recipe.split_accumulator(product)
        return describe(built_in_float8_config(gemm, rows * gemm.num_groups, scaling, split, gpu))

    tiles = {product: tile(product, MANY_ROWS) for product in gemms}
    words = [tiles["fprop"], *_by_tile({product: words for product, words in tiles.items() if words != tiles["fprop"]})]
    for rows in (MANY_ROWS, QUEUED_ROWS, FEW_ROWS, DECODE_ROWS):
        below = {product: tile(product, rows - 1) for product in gemms}
        others = {product: words for product, words in below.items() if words != tiles[product]}
        words += _by_tile(others, f" below {rows} rows a group")
        tiles = below
    measurable = {product: gemm for product, gemm in gemms.items() if scalings[product] is None}
    plain = {p: gemm for p, gemm in measurable.items() if not (recipe.batch_invariant and p == "fprop")}
    return f"{_measured(plain, gpu)}{', '.join(words)}, by the built-in rule"


def explain_dequantized(request: PlanRequest) -> str:
    """For which products of a linear layer operands are dequantized, and why, behind a comma; or nothing."""
    reasons: dict[str, list[str]] = {}
    for product in LAYOUTS:
        reason = request.recipe.why_not_native(product, request.dtype, compute_capability(request.device))
        if reason is not None:
            reasons.setdefault(reason.removesuffix("."), []).append(product)
    named = {why: "all" if len(some) == len(LAYOUTS) else " and ".join(some) for why, some in reasons.items()}
    return "".join(f", dequantized for {names} products ({why})" for why, names in named.items())


def _float8_scaling(request: PlanRequest, product: Product) -> ScaleLayout | None:
    """Of the second operand; None where codes are not multiplied as they are."""
    recipe = request.recipe
    quantizer = recipe.quantizer(OPERANDS[product][1])
    columnwise = COLUMNWISE[LAYOUTS[product]][1]
    of_copy = None if quantizer is None else quantizer.of_copy(columnwise)
    refused = recipe.why_not_native(product, request.dtype, compute_capability(request.device)) is not None
    return None if of_copy is None or refused else of_copy.float8_scaling(columnwise)


def _by_tile(tiles: Mapping[Product, str], condition: str = "") -> list[str]:
    """dgrad and wgrad <tile>, for each tile."""
    products: dict[str, list[str]] = {}
    for product, words in tiles.items():
        products.setdefault(words, []).append(product)
    return [f"{' and '.join(names)}{condition} {words}" for words, names in products.items()]


def _measured(gemms: Mapping[Product, Gemm], gpu: tuple[int, int]) -> str:
    """What the table in use holds for these products, with "else" at its end; or nothing."""
    table = tiles_in_use()
    if table is None or table.capability != gpu:
        return ""
    products: dict[str, list[str]] = {}  # by tile and rows
    for name, gemm in gemms.items():
        for tile in table.tiles:
            if tile.gemm == gemm:
                products.setdefault(f"{describe(tile.config)} at {tile.rows} rows", []).append(name)
    found = [f"{' and '.join(names)} {words}" for words, names in products.items()]
    return f"{', '.join(found)}, measured {table.environment['date']}; else " if found else ""
