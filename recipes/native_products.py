"""Whether a product multiplies codes directly ("native") or dequantized operands ("emulated").

Both uses call `why_not_native`. Planning (`Recipe.support`, `explain()`) calls it for the formats of the recipe's
quantizers. A run calls it for the actual operands, which a caller may have quantized otherwise, with the compute
capability of the plan; it does not query the device.
"""

from __future__ import annotations

from typing import Literal

import torch

from recipes.tensors.formats import ScaleLayout

Product = Literal["fprop", "dgrad", "wgrad"]
GemmLayout = Literal["TN", "NN", "NT"]
Capability = tuple[int, int]  # compute capability of a GPU; (9, 0) is Hopper

LAYOUTS: dict[Product, GemmLayout] = {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}

# layout -> whether the first and the second operand are read columnwise; dy of NT may also lie in rows
COLUMNWISE: dict[GemmLayout, tuple[bool, bool]] = {"TN": (False, False), "NN": (False, True), "NT": (True, True)}

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_SCALED_BY: dict[ScaleLayout, str] = {
    "tensor": "one scale a tensor",
    "vector": "one scale a row",
    "row": "1x128 blocks",
    "square": "128x128 blocks",
}


def why_not_native(
    layout: GemmLayout,
    left: ScaleLayout | None,
    right: ScaleLayout | None,
    dtype: torch.dtype,
    capability: Capability | None,
    *codes: torch.dtype,
) -> str | None:
    """Why operands with these scale layouts must be dequantized before the product, as a sentence, or None.

    left, right: the operands' scale layouts; None for anything but float8 codes with such scales. dtype: the nominal
    dtype. capability: None on a CPU. codes: the dtypes of the codes, if known.
    """
    if left is None or right is None:
        return "an operand has no float8 codes with a scale a tensor, row or 128 values, aligned for tensor cores."
    multiplied = ("tensor", "tensor"), ("vector", "vector"), ("row", "row" if layout == "NT" else "square")
    if (left, right) not in multiplied:
        return f"there is no {layout} product of codes with {_SCALED_BY[left]} by codes with {_SCALED_BY[right]}."
    if dtype == torch.float64:
        return "products of float8 codes are summed in float32, which is too little for float64."
    return why_not_float8(capability, *codes)


def why_not_float8(capability: Capability | None, *codes: torch.dtype) -> str | None:
    """Why a GPU of this compute capability (None: a CPU) cannot multiply codes of these dtypes, or None."""
    if capability is None:
        return "float8 products need a CUDA device, and these operands are on none."
    if capability < (8, 9):
        major, minor = capability
        return f"float8 products need compute capability 8.9 (Ada, Hopper) or newer, and this GPU has {major}.{minor}."
    other = next((dtype for dtype in codes if dtype not in FLOAT8), None)
    if other is not None:
        return f"float8 products take codes in {FLOAT8[0]} and {FLOAT8[1]}, and an operand has {other}."
    return None


def compute_capability(device: torch.device) -> Capability | None:
    """The compute capability of this GPU; that of Hopper if torch finds no GPU, to explain plans; None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)
