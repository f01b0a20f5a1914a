"""The number formats of codes and scales, and how a tensor is divided into blocks that share a scale: values.

|                    | E4M3 (FN)   | E5M2          | E2M1        | E8M0 (scales only)  |
|--------------------|-------------|---------------|-------------|---------------------|
| sign/exponent/mantissa bits, bias | 1/4/3, 7 | 1/5/2, 15 | 1/2/1, 1 | 0/8/0, 127 |
| largest            | 448 = 0x7E  | 57344 = 0x7B  | 6 = 0x7     | 2^127 = 254         |
| smallest subnormal | 2^-9        | 2^-16         | 0.5 = 0x1   | 2^-127 = 0          |
| Inf / NaN          | none / 0x7F | 0x7C / 0x7D.. | none / none | none / 255          |

Source: OCP 8-bit Floating Point Specification v1.0 (E4M3, E5M2); OCP Microscaling Formats v1.0, section 5 (E2M1, E8M0).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class ElementFormat(ABC):
    """What codes are: a name, the torch dtype in which they are stored, the largest finite number.

    A format of one's own is a subclass, equal by value.
    """

    name: str
    dtype: torch.dtype
    max: float

    @abstractmethod
    def encode(self, scaled: Tensor) -> Tensor:
        """Codes of float32 values that are scaled already, to nearest; saturating, also from Inf."""

    @abstractmethod
    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers that codes stand for, in a floating dtype that holds them; of a code of 0 the number 0."""

    @property
    @abstractmethod
    def half_step(self) -> float:
        """By how much of itself the largest number may lie below what is rounded to it."""

    @abstractmethod
    def largest_codes(self, codes: Tensor) -> Tensor:
        """The codes, with 0 for all but those of the largest magnitude."""


@dataclass(frozen=True)
class Float8Format(ElementFormat):
    """E4M3 or E5M2, by its torch dtype.

    A format of one's own may have a smaller largest number than its dtype: scales are made for it, and casts saturate
    at it. Raises ValueError for one that is larger, or below 4 (scales may then be no normal numbers), and for another
    dtype.
    """

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(f"{self.name} is {self.dtype}, but must be torch.float8_e4m3fn or torch.float8_e5m2.")
        largest = torch.finfo(self.dtype).max
        if not 4 <= self.max <= largest:
            raise ValueError(
                f"{self.name}'s largest number is {self.max}, but must be from 4 to {largest}, that of {self.dtype}."
            )

    def encode(self, scaled: Tensor) -> Tensor:
        """As above; NaN stays NaN.

        torch's own E4M3 cast saturates from 2.12 on and gives NaN before, its E5M2 cast overflows to Inf: so clamp.
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

# The magnitudes of E2M1 codes 0 to 7; code + 8 is the negative. torch has no casts for it: codes are packed in uint8.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class PackedE2M1(ElementFormat):
    """E2M1, two codes a byte; only the casts of NVFP4 make them."""

    def encode(self, scaled: Tensor) -> Tensor:
        raise NotImplementedError("E2M1 codes are made by `recipes.casts.cast_nvfp4`. Use NVFP4Quantizer.")

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=dtype, device=codes.device)
        return values[torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2).long()]

    @property
    def half_step(self) -> float:
        return 1 / 6  # 6, and 8 would be next

    def largest_codes(self, codes: Tensor) -> Tensor:
        low, high = codes & 0x0F, codes & 0xF0
        return torch.where((low & 0x07) == 0x07, low, 0) | torch.where((high & 0x70) == 0x70, high, 0)


E2M1 = PackedE2M1("E2M1", torch.uint8, E2M1_VALUES[-1])

# Bytes of an E8M0 scale: the byte E stands for 2^(E - 127).
E8M0_DTYPE = torch.float8_e8m0fnu
E8M0_LARGEST = 254


class Format(Enum):
    """Which element format a recipe takes forward (inputs, weights) and backward (gradients)."""

    # HYBRID first: once bound, the other two names hide the formats inside this class.
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
    """How a scale follows from the largest magnitude of its block. Subclasses are frozen dataclasses, equal by value.

    dtype: in which scales are stored
    """

    dtype: ClassVar[torch.dtype]

    @abstractmethod
    def scales(self, amax: Tensor, element: ElementFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What values are multiplied by before they are encoded, float32, and what is stored of it, in `self.dtype`.

        amax: float32, of any shape; NaN counts as 0 in it. dtype: of the tensor that is quantized.
        """

    @abstractmethod
    def values(self, stored: Tensor) -> Tensor:
        """The float32 numbers that codes are multiplied by again."""

    @abstractmethod
    def holding(self, dtype: torch.dtype) -> torch.dtype:
        """`dtype`, or the smallest floating dtype in its place that holds every product of a code and a scale."""


# How float8 codes are scaled: one scale a tensor; one for each 128 codes along the axis to be contracted; for 128x128.
ScaleLayout = Literal["tensor", "row", "square"]

# natural: codes and scales lie as the values do. transposed: codes of the columnwise copy are transposed, and scales
# are contiguous along the axis that is not contracted, as a matrix product reads both.
ColumnwiseLayout = Literal["natural", "transposed"]

ALL = 0  # rows or columns of a block: as many as the tensor, or the group, has

# Of which blocks, with float32 scales, codes are multiplied as they are.
FLOAT8_SCALINGS: dict[tuple[int, int], ScaleLayout] = {(ALL, ALL): "tensor", (1, 128): "row", (128, 128): "square"}


@dataclass(frozen=True)
class ScaleSpec:
    """A number format of tensors, as a value: what codes are, which of them share a scale, and how both lie in memory.

    block:      rows x columns of the rowwise copy that share a scale, 1 x n or n x n; those of the columnwise copy are
                turned round
    columnwise: how the columnwise copy lies
    alignment:  in it the rows of each group begin at multiples of this many
    transform:  the orthogonal transform of the rows that the columnwise copy is in; None for none

    Raises ValueError for another block.
    """

    element: ElementFormat
    block: tuple[int, int]
    scale_rule: ScaleRule
    columnwise: ColumnwiseLayout = "natural"
    alignment: int = 1
    transform: str | None = None

    def __post_init__(self) -> None:
        rows, columns = self.block
        if rows not in (1, columns) or min(self.block) < 0:
            raise ValueError(f"block is {self.block}, but must be 1 x n or n x n numbers, of which n may be ALL.")

    def block_of(self, columnwise: bool) -> tuple[int, int]:
        """Rows and columns, in the natural order, that share a scale in this copy."""
        return self.block[::-1] if columnwise else self.block

    @property
    def float8_scaling(self) -> ScaleLayout | None:
        """How the codes are scaled that a GPU with float8 products multiplies; None: their values are multiplied."""
        if not isinstance(self.element, Float8Format) or self.columnwise != "transposed":
            return None
        return FLOAT8_SCALINGS.get(self.block) if self.scale_rule.dtype == torch.float32 else None

    @property
    def is_per_tensor(self) -> bool:
        """Whether the one scale of a tensor or group stays outside of its products."""
        return self.block == (ALL, ALL)
