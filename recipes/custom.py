"""CustomRecipe: the user's own quantizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipes.recipe import Recipe, Role
from recipes.tensors.quantizer import Quantizer


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Quantizers from a user's function of the role.

    Plans are cached by the recipe's value, and two CustomRecipes are equal if their functions are. Pass a module-level
    function, or a frozen dataclass with `__call__`. A lambda created in the training loop is a new recipe in each step,
    and each is planned again.

    qfactory: called with the `Role` of each tensor to quantize; returns a quantizer, or None to leave the tensor in
    high precision. Equal roles must give equal quantizers; instances of a frozen dataclass compare equal by value.

    Quantizers that implement only `quantize` run on the split path, those with `quantize_grouped` and
    `quantize_stacked` on the grouped one. Raises TypeError if qfactory is not callable or returns no Quantizer.
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
