"""How scales follow from amaxes: the rules of the built-in formats, as values, in plain torch.

All steps in float32. Sources: TransformerEngine (read at d0067d0) for float32 scales and E8M0 rounded up; OCP
Microscaling Formats v1.0 for E8M0 rounded down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from recipes.arguments import as_number, check_flags
from recipes.tensors.formats import E8M0_DTYPE, E8M0_LARGEST, ElementFormat, ScaleRule

FLOAT32_MAX = torch.finfo(torch.float32).max
_CLEAR_MANTISSA = -(1 << 23)  # sign and exponent bits of a float32, as an int32

Rounding = Literal["round_up", "floor"]
_ROUNDINGS = get_args(Rounding)


@dataclass(frozen=True)
class Float32Scale(ScaleRule):
    """scale = fl(max / max(amax, amax_epsilon)), stored as fl(1 / scale).

    1 if amax is 0 or Inf. Where the quotient is Inf: the largest float32, or that of the input's dtype.

    power_2: scales are rounded down to powers of two
    input_range: where the quotient is Inf, the largest number of the input's dtype (float32's of float64)

    Raises TypeError for a flag that is no bool, and as `check_amax_epsilon`.
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    power_2: bool = False
    amax_epsilon: float = 0.0
    input_range: bool = False

    def __post_init__(self) -> None:
        check_flags(power_2=self.power_2, input_range=self.input_range)
        check_amax_epsilon(self.amax_epsilon)

    def scales(self, amax: Tensor, element: ElementFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        amax = amax.clamp(min=self.amax_epsilon)
        # Not `element.max / amax`: torch turns a scalar numerator into a reciprocal and a product, which rounds twice.
        scale = torch.full_like(amax, element.max) / amax
        scale = scale.masked_fill(scale.isinf(), self.largest(dtype)).masked_fill((amax == 0) | amax.isinf(), 1.0)
        if self.power_2:
            scale = (scale.view(torch.int32) & _CLEAR_MANTISSA).view(torch.float32)
        return scale, reciprocal(scale)

    def largest(self, dtype: torch.dtype) -> float:
        """What stands for a scale of Inf."""
        return torch.finfo(dtype).max if self.input_range and dtype != torch.float64 else FLOAT32_MAX

    def values(self, stored: Tensor) -> Tensor:
        return stored

    def holding(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.float16, torch.bfloat16):
            return dtype
        return torch.bfloat16 if self.power_2 else torch.float32


@dataclass(frozen=True)
class GivenScale(Float32Scale):
    """A float32 scale that is known before (delayed scaling); without one: as of the amax."""


@dataclass(frozen=True)
class E8M0Scale(ScaleRule):
    """A power of two, stored as the byte E of 2^(E - 127); codes are of x * 2^(127 - E).

    round_up  E = smallest byte with 2^(E - 127) >= fl(amax * fl(1 / max)), at most 254: no value saturates
    floor     E = max(0, floor(log2 amax) - emax + 127), the rule of OCP: the largest values of a block may

    Raises ValueError for another rounding.
    """

    dtype: ClassVar[torch.dtype] = torch.uint8

    rounding: Rounding = "round_up"

    def __post_init__(self) -> None:
        check_rounding("rounding", self.rounding)

    def scales(self, amax: Tensor, element: ElementFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.rounding == "floor":
            largest_exponent = math.frexp(element.max)[1] - 1  # emax: 8 of E4M3, 15 of E5M2
            stored = ((amax.view(torch.int32) >> 23) - largest_exponent).clamp(min=0).to(torch.uint8)
        else:
            bits = (amax * (1.0 / element.max)).view(torch.int32)
            exponent, mantissa = bits >> 23, bits & 0x7FFFFF
            # Byte 0 is 2^-127, in float32 a subnormal with this mantissa: smaller numbers round up to it, not to 1.
            above = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
            stored = (exponent + above).clamp(max=E8M0_LARGEST).to(torch.uint8)
        return self.values(E8M0_LARGEST - stored), stored

    def values(self, stored: Tensor) -> Tensor:
        return stored.view(E8M0_DTYPE).to(torch.float32)

    def holding(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if dtype == torch.float16 else dtype  # float16 has not the range of 2^E


@dataclass(frozen=True)
class FourOverSix:
    """Of each block's two scales, with which its largest number becomes 6 or 4, that with the smaller error is taken.

    error: "MAE", the sum of the magnitudes of the block's errors, or "MSE", of their squares
    bound: the scale of a block with the tensor's largest number, if that becomes 6: 256, of which half as much again is
        an E4M3 number too, or 448, with which blocks near that number have one scale alone
    """

    error: Literal["MAE", "MSE"] = "MAE"
    bound: Literal[256, 448] = 256

    def __post_init__(self) -> None:
        if self.error not in ("MAE", "MSE"):
            raise ValueError(f'the error of four over six is {self.error!r}, but must be "MAE" or "MSE".')
        if self.bound not in (256, 448):
            raise ValueError(f"the bound of four over six is {self.bound!r}, but must be 256 or 448.")


@dataclass(frozen=True)
class NVFP4Scale(ScaleRule):
    """One E4M3 scale a block under one float32 amax a tensor, or a row: `recipes.casts.cast_nvfp4`.

    row_scaled: one amax for each row of the rowwise copy
    four_over_six: two scales of each block are tried; None: one

    Raises TypeError for a field of another type.
    """

    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    row_scaled: bool = False
    four_over_six: FourOverSix | None = None

    def __post_init__(self) -> None:
        check_flags(row_scaled=self.row_scaled)
        if not isinstance(self.four_over_six, FourOverSix | None):
            raise TypeError(f"four_over_six is {self.four_over_six!r}, but must be a FourOverSix or None. Pass one.")

    @property
    def range(self) -> float:
        """The largest number that a code and its block's scale make of the largest one of the tensor."""
        return 6.0 * (448 if self.four_over_six is None else self.four_over_six.bound)

    def why_not_row_by_row(self) -> str | None:
        if self.row_scaled:
            return None
        return "x has one amax for all rows of a tensor or group (with row_scaled_activation=True each row has one)."

    def scales(self, amax: Tensor, element: ElementFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("these scales need two amaxes. Use `recipes.casts.cast_nvfp4`.")

    def values(self, stored: Tensor) -> Tensor:
        return stored.to(torch.float32)

    def holding(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


def check_rounding(name: str, rounding: Rounding) -> None:
    """Raise ValueError for a rounding of E8M0 scales that does not exist. name: of the field that holds it."""
    if rounding not in _ROUNDINGS:
        raise ValueError(f'{name} is {rounding!r}, but must be "round_up" or "floor".')


def check_amax_epsilon(epsilon: float) -> None:
    """Raise TypeError unless epsilon is a number, ValueError unless it is in [0, largest float32]."""
    if not 0 <= as_number("amax_epsilon", epsilon) <= FLOAT32_MAX:
        raise ValueError(
            f"amax_epsilon is {epsilon!r}, but cannot be negative, NaN or more than float32 holds. Pass 0 for none."
        )


def reciprocal(scale: Tensor) -> Tensor:
    """fl(1 / scale)."""
    return torch.ones_like(scale) / scale
