"""CustomRecipe: the user's own quantizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipes.recipe import Recipe, Role
from recipes.tensors.quantizer import Quantizer


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Quantizers from a function of the role.

    Plans are kept by the recipe's value, and two of these are equal if their functions are. Give a function of a
    module, or a frozen dataclass with a `__call__`. A lambda written in the training loop is another recipe in each
    step, and each gets a plan of its own.

    qfactory: called with a `Role` whenever a tensor in it is to be quantized; returns a quantizer, or None to leave the
    tensor in high precision. Equal roles must give equal quantizers: a frozen dataclass, made anew or kept, does.

    Quantizers that only have `quantize` take the split path, those with `quantize_grouped` and `quantize_stacked` the
    grouped one. Raises TypeError for something that cannot be called, or a result that is no Quantizer.
    """

    qfactory: Callable[[Role], Quantizer | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory):
            raise TypeError(f"qfactory is {self.qfactory!r}, but must be a function of a Role. Pass one.")

    def quantizer(self, role: Role) -> Quantizer | None:
        quantizer = self.qfactory(role)
        if quantizer is not None and not isinstance(quantizer, Quantizer):
            raise TypeError(f"qfactory({role}) returned {quantizer!r}, but must return a Quantizer or None.")
        return quantizer
