"""The number formats of codes and scales, and the division of a tensor into blocks that share a scale.

|                    | E4M3 (FN)   | E5M2          | E2M1        | E8M0 (scales only)  |
|--------------------|-------------|---------------|-------------|---------------------|
| sign/exponent/mantissa bits, bias | 1/4/3, 7 | 1/5/2, 15 | 1/2/1, 1 | 0/8/0, 127 |
| largest            | 448 = 0x7E  | 57344 = 0x7B  | 6 = 0x7     | 2^127 = 254         |
| smallest subnormal | 2^-9        | 2^-16         | 0.5 = 0x1   | 2^-127 = 0          |
| Inf / NaN          | none / 0x7F | 0x7C / 0x7D.. | none / none | none / 255          |

Source: OCP 8-bit Floating Point Specification v1.0 (E4M3, E5M2); OCP Microscaling Formats v1.0, section 5 (E2M1, E8M0).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from recipes.arguments import as_integer, as_number


@dataclass(frozen=True)
class ElementFormat(ABC):
    """The number format of codes: name, torch dtype in which they are stored, largest finite number.

    User-defined formats are subclasses, equal by value. Raises TypeError for a dtype or a largest number that is none,
    ValueError for one that is not positive and finite.
    """

    name: str
    dtype: torch.dtype
    max: float

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(
                f"{self.name}'s dtype is {self.dtype!r}, but must be a torch.dtype. Pass that of its codes."
            )
        object.__setattr__(self, "max", as_number(f"{self.name}'s largest number", self.max))
        if not 0 < self.max < math.inf:
            raise ValueError(f"{self.name}'s largest number is {self.max}, but must be positive and finite.")

    @abstractmethod
    def encode(self, scaled: Tensor) -> Tensor:
        """Codes, in `dtype`, of scaled float32 values, rounded to nearest; large values and Inf saturate."""

    @abstractmethod
    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of codes, in a floating dtype that represents them exactly. Code 0 must decode to 0."""

    @property
    @abstractmethod
    def half_step(self) -> float:
        """Half the spacing at the largest number, relative to it: by how much more a value may round down to it."""

    @abstractmethod
    def largest_codes(self, codes: Tensor) -> Tensor:
        """The codes, with all but those of the largest magnitude replaced by 0."""


@dataclass(frozen=True)
class Float8Format(ElementFormat):
    """E4M3 or E5M2, by its torch dtype.

    A user-defined format may limit `max` to less than its dtype's largest number; scales are computed for that limit,
    and casts saturate at it. Raises ValueError for a larger `max`, one below 4 (scales could then be subnormal), and
    another dtype.
    """

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(f"{self.name} is {self.dtype}, but must be torch.float8_e4m3fn or torch.float8_e5m2.")
        largest = torch.finfo(self.dtype).max
        if not 4 <= as_number(f"{self.name}'s largest number", self.max) <= largest:
            raise ValueError(
                f"{self.name}'s largest number is {self.max}, but must be from 4 to {largest}, that of {self.dtype}."
            )

    def encode(self, scaled: Tensor) -> Tensor:
        """As in the base class; NaN stays NaN.

        Clamps first: above the largest number, torch's E4M3 cast gives NaN before torch 2.12, and its E5M2 cast Inf.
        """
        return scaled.clamp(-self.max, self.max).to(self.dtype)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype)

    @property
    def half_step(self) -> float:
        return 1 / 28 if self.dtype == torch.float8_e4m3fn else 1 / 14

    def largest_codes(self, codes: Tensor) -> Tensor:
        code = 0x7E if self.dtype == torch.float8_e4m3fn else 0x7B
        bytes_ = codes.view(torch.uint8)
        return torch.where((bytes_ & 0x7F) == code, bytes_, 0).view(codes.dtype)


E4M3 = Float8Format("E4M3", torch.float8_e4m3fn, 448.0)
E5M2 = Float8Format("E5M2", torch.float8_e5m2, 57344.0)

# Magnitudes of E2M1 codes 0 to 7; code + 8 is the negative. torch has no casts for E2M1, so codes are packed in uint8.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class PackedE2M1(ElementFormat):
    """E2M1, two codes in each byte; only NVFP4's casts produce them."""

    def encode(self, scaled: Tensor) -> Tensor:
        raise NotImplementedError("E2M1 codes are made by `recipes.casts.cast_nvfp4`. Use NVFP4Quantizer.")

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=dtype, device=codes.device)
        pairs = torch.stack((codes & 0xF, codes >> 4), -1)
        return values.index_select(0, pairs.flatten().int()).view(pairs.shape).flatten(-2)

    @property
    def half_step(self) -> float:
        return 1 / 6  # after 6 the next value would be 8

    def largest_codes(self, codes: Tensor) -> Tensor:
        low, high = codes & 0x0F, codes & 0xF0
        return torch.where((low & 0x07) == 0x07, low, 0) | torch.where((high & 0x70) == 0x70, high, 0)


E2M1 = PackedE2M1("E2M1", torch.uint8, E2M1_VALUES[-1])

# E8M0: the byte E represents the scale 2^(E - 127).
E8M0_DTYPE = torch.float8_e8m0fnu
E8M0_LARGEST = 254


class Format(Enum):
    """The element formats of a recipe in forward (inputs, weights) and in backward (gradients)."""

    # HYBRID first: once defined, the other two names shadow the module's E4M3 and E5M2 in this class body.
    HYBRID = (E4M3, E5M2)
    E4M3 = (E4M3, E4M3)
    E5M2 = (E5M2, E5M2)

    @property
    def forward(self) -> Float8Format:
        form: Float8Format = self.value[0]
        return form

    @property
    def backward(self) -> Float8Format:
        form: Float8Format = self.value[1]
        return form

    def __repr__(self) -> str:
        return f"Format.{self.name}"


class ScaleRule(ABC):
    """How a scale is computed from the amax of its block. Subclasses are frozen dataclasses, equal by value.

    dtype: the dtype in which scales are stored
    """

    dtype: ClassVar[torch.dtype]

    @abstractmethod
    def scales(self, amax: Tensor, element: ElementFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(float32 factors by which values are multiplied before encoding, the stored scales in `self.dtype`).

        amax: float32, of any shape; NaN in the data counts as 0. dtype: dtype of the tensor that is quantized.
        """

    @abstractmethod
    def values(self, stored: Tensor) -> Tensor:
        """The float32 factors by which decoded codes are multiplied, from the stored scales."""

    @abstractmethod
    def holding(self, dtype: torch.dtype) -> torch.dtype:
        """`dtype`, or else the smallest floating dtype that represents every product of a code and a scale."""

    def why_not_row_by_row(self) -> str | None:
        """Why the scales of a row depend on other rows although its blocks do not, as a sentence, or None."""
        return None


# One scale for: the whole tensor ("tensor"), all codes along the contracted axis ("vector"), each 128 of them ("row"),
# each 128x128 ("square").
ScaleLayout = Literal["tensor", "vector", "row", "square"]

# natural: codes and scales have the layout of the values. transposed: the columnwise codes are transposed, and scales
# are contiguous along the axis that is not contracted, as a GEMM reads both.
ColumnwiseLayout = Literal["natural", "transposed"]
_LAYOUTS = get_args(ColumnwiseLayout)

ALL = 0  # a block spans all rows or columns of the tensor or group

# Blocks for which native products exist, with float32 scales.
FLOAT8_SCALINGS: dict[tuple[int, int], ScaleLayout] = {
    (ALL, ALL): "tensor",
    (1, ALL): "vector",
    (1, 128): "row",
    (128, 128): "square",
}


@dataclass(frozen=True)
class ScaleSpec:
    """A quantized tensor format, as a value: the codes, which of them share a scale, and the memory layout of both.

    block:      rows x columns of the rowwise copy that share a scale, 1 x n or n x n; swapped for the columnwise copy
    columnwise: memory layout of the columnwise copy
    alignment:  in the columnwise copy, the rows of each group begin at multiples of this number
    transform:  the orthogonal transform that the rows of the columnwise copy are in, by name; None for none. A
                `FormatQuantizer` applies none

    Raises TypeError for a field of another type, ValueError for another block, layout or alignment.
    """

    element: ElementFormat
    block: tuple[int, int]
    scale_rule: ScaleRule
    columnwise: ColumnwiseLayout = "natural"
    alignment: int = 1
    transform: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.element, ElementFormat):
            raise TypeError(f"element is {self.element!r}, but must be an ElementFormat. Pass one, such as E4M3.")
        if not isinstance(self.scale_rule, ScaleRule):
            raise TypeError(
                f"scale_rule is {self.scale_rule!r}, but must be a ScaleRule. Pass one, such as E8M0Scale()."
            )
        if not isinstance(self.block, tuple | list) or len(self.block) != 2:
            raise TypeError(f"block is {self.block!r}, but must be two integers, rows and columns. Pass (1, 32).")
        rows, columns = as_integer("block[0]", self.block[0]), as_integer("block[1]", self.block[1])
        if rows not in (1, columns) or min(rows, columns) < 0:
            raise ValueError(f"block is {self.block}, but must be 1 x n or n x n numbers, of which n may be ALL.")
        if self.columnwise not in _LAYOUTS:
            raise ValueError(f'columnwise is {self.columnwise!r}, but must be "natural" or "transposed".')
        alignment = as_integer("alignment", self.alignment)
        if alignment < 1:
            raise ValueError(f"alignment is {alignment}, but must be positive. Pass 1 for none.")
        if not isinstance(self.transform, str | None):
            raise TypeError(
                f"transform is {self.transform!r}, but must be a string or None. Pass the transform's name."
            )
        object.__setattr__(self, "block", (rows, columns))
        object.__setattr__(self, "alignment", alignment)

    def block_of(self, columnwise: bool) -> tuple[int, int]:
        """Rows and columns that share a scale in this copy, before any transposition."""
        return self.block[::-1] if columnwise else self.block

    @property
    def float8_scaling(self) -> ScaleLayout | None:
        """The scale layout for native float8 products; None if there are none, and values are multiplied instead.

        Groups begin at multiples of 16 bytes, and where each 128 codes have a scale, at multiples of 128.
        """
        if not isinstance(self.element, Float8Format) or self.columnwise != "transposed":
            return None
        scaling = FLOAT8_SCALINGS.get(self.block) if self.scale_rule.dtype == torch.float32 else None
        return None if self.alignment % (128 if scaling == "row" else 16) else scaling

    def why_not_row_by_row(self) -> str | None:
        """Why codes of a row depend on other rows in the rowwise copy, as a sentence; None if they do not."""
        if self.is_per_tensor:
            return "x has one scale for all rows of a tensor or group."
        if self.block[0] > 1:
            return f"x has a scale for each {self.block[0]}x{self.block[1]} values, of several rows."
        return self.scale_rule.why_not_row_by_row()

    @property
    def is_per_tensor(self) -> bool:
        """Whether each tensor or group has one scale, which is applied to the result of a product."""
        return self.block == (ALL, ALL)
