"""The number formats of codes and scales: facts, no arithmetic.

|                    | E4M3 (FN)   | E5M2          | E2M1        | E8M0 (scales only)  |
|--------------------|-------------|---------------|-------------|---------------------|
| sign/exponent/mantissa bits, bias | 1/4/3, 7 | 1/5/2, 15 | 1/2/1, 1 | 0/8/0, 127 |
| largest            | 448 = 0x7E  | 57344 = 0x7B  | 6 = 0x7     | 2^127 = 254         |
| smallest subnormal | 2^-9        | 2^-16         | 0.5 = 0x1   | 2^-127 = 0          |
| Inf / NaN          | none / 0x7F | 0x7C / 0x7D.. | none / none | none / 255          |

Source: OCP 8-bit Floating Point Specification v1.0 (E4M3, E5M2); OCP Microscaling Formats v1.0, section 5 (E2M1, E8M0).
"""

from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True)
class Float8Format:
    """One element format: its name, its torch dtype, its largest finite number.

    A format of one's own may have a smaller largest number than its dtype: scales are made for it, and casts saturate
    at it. Raises ValueError for one that is larger, or below 4 (scales may then be no normal numbers), and for another
    dtype.
    """

    name: str
    dtype: torch.dtype
    max: float

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(f"{self.name} is {self.dtype}, but must be torch.float8_e4m3fn or torch.float8_e5m2.")
        largest = torch.finfo(self.dtype).max
        if not 4 <= self.max <= largest:
            raise ValueError(
                f"{self.name}'s largest number is {self.max}, but must be from 4 to {largest}, that of {self.dtype}."
            )


E4M3 = Float8Format("E4M3", torch.float8_e4m3fn, 448.0)
E5M2 = Float8Format("E5M2", torch.float8_e5m2, 57344.0)

# The magnitudes of E2M1 codes 0 to 7; code + 8 is the negative. torch has no casts for it: codes are packed in uint8.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

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
