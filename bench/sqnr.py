"""SQNR, the ratio of signal to quantization noise in dB, and the minimum that each recipe must reach."""

import math
from collections.abc import Collection

from torch import Tensor

from bench.schedule import recipe_named
from recipes import Role

# dB for the output of a grouped MLP. Measured on random numbers: bf16 49, E4M3 24 with any scaling.
HIGH_PRECISION_FLOOR = 40.0
EIGHT_BIT_FLOOR = 20.0
# E5M2 has one bit less than E4M3, which is 6 dB; E2M1 has two less.
OTHER_FLOORS = {"e5m2": 14.0, "nvfp4": 9.0, "nvfp4-nearest": 9.0}
# Some recipes round gradients to fewer bits, or stochastically.
GRADIENT_ALLOWANCE = 6.0
AT_ONCE = 2**26  # elements in float64: 512 MB, where a weight gradient as a whole can take 13 GB


class Sqnr:
    """10 log10(sum exact^2 / sum (got - exact)^2), summed in float64 over all parts added."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def add(self, got: Tensor, exact: Tensor) -> None:
        parts = (tensor.detach().flatten().split(AT_ONCE) for tensor in (got, exact))
        for got_part, exact_part in zip(*parts, strict=True):
            wide = exact_part.double()
            self.signal += wide.square().sum().item()
            self.noise += (got_part.double() - wide).square().sum().item()

    @property
    def db(self) -> float:
        """The SQNR; NaN if either side contains NaN, infinite if both are equal."""
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 else -math.inf


def sqnr_db(got: Tensor, exact: Tensor) -> float:
    """The SQNR of one tensor, in dB."""
    sqnr = Sqnr()
    sqnr.add(got, exact)
    return sqnr.db


def sqnr_floor(label: str) -> float:
    """The minimum SQNR in dB of an output under the recipe of this label."""
    recipe = recipe_named(label)
    if recipe.quantizer(Role.INPUT) is None:
        return HIGH_PRECISION_FLOOR
    return OTHER_FLOORS.get(label, OTHER_FLOORS.get(recipe.name, EIGHT_BIT_FLOOR))


def require_sqnr(
    way: str, found: dict[str, float], floor: float, outputs: Collection[str] = ("y",), against: str = "fp32"
) -> None:
    """Raise AssertionError if an output is below the floor, or a gradient more than `GRADIENT_ALLOWANCE` below it."""
    for name, db in found.items():
        limit = floor if name in outputs else floor - GRADIENT_ALLOWANCE
        assert db >= limit, f"{way}: {name} has {db:.1f} dB against {against}, but must have {limit:.0f}"
