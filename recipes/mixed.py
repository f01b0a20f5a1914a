"""MixedScaling: a separate recipe for each operand of each product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from recipes.casts.scale_rules import GivenScale, NVFP4Scale
from recipes.native_products import COLUMNWISE, LAYOUTS, Product
from recipes.recipe import OPERANDS, Recipe, Role
from recipes.registry import as_recipe
from recipes.tensors.formats import ALL, ElementFormat, ScaleLayout, ScaleSpec
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor, pick
from recipes.tensors.quantizer import Quantizer, check_grouped, check_stacked, check_tensor
from recipes.tensors.scaled_codes import Dequantized, Operand, ScaledCodes
from recipes.tensors.splits import Splits

DEQUANTIZED = "dequantized"
_MAY_BE_DEQUANTIZED = ("input_for_wgrad", "weight_for_dgrad")


@dataclass(frozen=True)
class MixedScaling(Recipe):
    """Which recipe quantizes which operand of which product, in the manner of torchao's Float8LinearConfig.

        fprop  y  = x w^T      input, weight
        dgrad  dx = dy w       grad_output, weight_for_dgrad
        wgrad  dw = dy^T x     grad_output_for_wgrad, input_for_wgrad

    Each field is a recipe or its name; "high_precision" leaves the operand unquantized. A recipe quantizes an operand
    as it quantizes a tensor of that role. A field that is None defaults to the one without `_for_...`.
    input_for_wgrad and weight_for_dgrad may also be "dequantized": the values of the copy that fprop multiplies, so
    that backward differentiates what forward computed. The gradient in that product stays unquantized.

    A product of FP8 codes has the accumulation (`Recipe.split_accumulator`) of its operands' recipes, split if one of
    them says so.

    Raises ValueError for a stateful recipe (delayed scaling), if only one operand of wgrad is transformed (NVFP4's
    random Hadamard transform cancels only if both are), and for a quantized gradient beside a dequantized operand.
    """

    input: Recipe | str = "high_precision"
    weight: Recipe | str = "high_precision"
    grad_output: Recipe | str = "high_precision"
    input_for_wgrad: Recipe | str | None = None
    weight_for_dgrad: Recipe | str | None = None
    grad_output_for_wgrad: Recipe | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.kw_only or (value is None and "_for_" in field.name):
                continue
            if field.name in _MAY_BE_DEQUANTIZED and value == DEQUANTIZED:
                continue
            object.__setattr__(self, field.name, as_recipe(value, field.name))
        for role in Role:
            for quantizer in self._pair(role):
                if quantizer is not None and quantizer.keeps_state:
                    raise ValueError(
                        f"The recipe for {role.value} keeps a state from step to step, which MixedScaling has no place "
                        "for. Use one without, or DelayedScaling for all operands."
                    )
        transforms = [_transform(self._pair(role)[1]) for role in (Role.GRAD_OUTPUT, Role.INPUT)]
        if transforms[0] != transforms[1]:
            raise ValueError(
                f"In wgrad the gradient is transformed by {transforms[0]} and the input by {transforms[1]}, but a "
                "transform cancels only if both operands have it. Give both the same recipe, or disable it."
            )
        of_gradient = self._pair(Role.GRAD_OUTPUT)
        for name, gradient in zip(_MAY_BE_DEQUANTIZED, reversed(of_gradient), strict=True):
            if getattr(self, name) == DEQUANTIZED and gradient is not None:
                raise ValueError(
                    f'{name} is "dequantized", but the gradient that it is multiplied with is quantized by {gradient}. '
                    'Leave that in "high_precision".'
                )

    @classmethod
    def forward_only(cls, recipe: Recipe | str, *, backward: str = "high_precision") -> MixedScaling:
        """Forward as under `recipe`; dx = dy W and dW = dy^T x of unquantized gradients.

        backward: which x and W these multiply: "high_precision", themselves, or "dequantized", the values that forward
        multiplied. Raises ValueError for another.
        """
        if backward not in ("high_precision", DEQUANTIZED):
            raise ValueError(f'backward is {backward!r}, but must be "high_precision" or "dequantized".')
        return cls(recipe, recipe, input_for_wgrad=backward, weight_for_dgrad=backward)

    def quantizer(self, role: Role) -> Quantizer | None:
        rowwise, columnwise = self._pair(role)
        if rowwise == columnwise or isinstance(columnwise, RowwiseCopy):
            return columnwise
        return MixedQuantizer(rowwise, columnwise)

    def split_accumulator(self, product: Product) -> bool:
        sides = zip(OPERANDS[product], COLUMNWISE[LAYOUTS[product]], strict=True)
        operands = [self._recipes(role)[columnwise] for role, columnwise in sides]
        return any(recipe == DEQUANTIZED or recipe.split_accumulator(product) for recipe in operands)

    def _pair(self, role: Role) -> tuple[Quantizer | None, Quantizer | None]:
        """The quantizers of the rowwise and of the columnwise copy."""
        first, other = self._recipes(role)
        rowwise = first.quantizer(role)
        if other == DEQUANTIZED:
            return rowwise, rowwise and RowwiseCopy(rowwise)
        return rowwise, other.quantizer(role)

    def _recipes(self, role: Role) -> tuple[Recipe, Any]:
        """Those of the rowwise and of the columnwise copy, which may be "dequantized"."""
        other = {
            Role.INPUT: self.input_for_wgrad,
            Role.WEIGHT: self.weight_for_dgrad,
            Role.GRAD_OUTPUT: self.grad_output_for_wgrad,
        }[role]
        first: Any = {Role.INPUT: self.input, Role.WEIGHT: self.weight, Role.GRAD_OUTPUT: self.grad_output}[role]
        first = as_recipe(first)
        return first, other if other == DEQUANTIZED else as_recipe(first if other is None else other)


def _transform(quantizer: Quantizer | None) -> str | None:
    return None if quantizer is None else quantizer.columnwise_transform


@dataclass(frozen=True)
class MixedQuantizer(Quantizer):
    """One quantizer for each copy; None leaves that copy in high precision."""

    rowwise: Quantizer | None
    columnwise: Quantizer | None

    @property
    def columnwise_transform(self) -> str | None:
        return _transform(self.columnwise)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_tensor(x, rowwise, columnwise)
        return QuantizedTensor(*self._copies(Quantizer.quantize.__name__, x, rowwise, columnwise), x.dtype)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_stacked(w_GNK, rowwise, columnwise)
        copies = self._copies(Quantizer.quantize_stacked.__name__, w_GNK, rowwise, columnwise)
        return QuantizedTensor(*copies, w_GNK.dtype)

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        check_grouped(x_TK, splits, rowwise, columnwise)
        copies = self._copies(Quantizer.quantize_grouped.__name__, x_TK, rowwise, columnwise, splits)
        return GroupedTensor(None, splits, *copies, x_TK.dtype)

    def _copies(
        self, method: str, x: Tensor, rowwise: bool, columnwise: bool, *splits: Splits
    ) -> tuple[ScaledCodes | None, ScaledCodes | None]:
        def copy(quantizer: Quantizer | None, of_columns: bool) -> ScaledCodes:
            if quantizer is None:
                return Unquantized.of(x, of_columns)
            made = getattr(quantizer, method)(x, *splits, rowwise=not of_columns, columnwise=of_columns)
            return pick(made.rowwise, made.columnwise, of_columns)

        return copy(self.rowwise, False) if rowwise else None, copy(self.columnwise, True) if columnwise else None

    def seeded(self, device: torch.device) -> MixedQuantizer:
        return MixedQuantizer(*(half and half.seeded(device) for half in (self.rowwise, self.columnwise)))

    def copy_spec(self, columnwise: bool) -> ScaleSpec | None:
        half = self.of_copy(columnwise)
        return None if half is None else half.copy_spec(columnwise)

    def of_copy(self, columnwise: bool) -> Quantizer | None:
        return self.columnwise if columnwise else self.rowwise

    def knows_groups(self) -> bool:
        return all(quantizer is None or quantizer.knows_groups() for quantizer in (self.rowwise, self.columnwise))


@dataclass(frozen=True)
class RowwiseCopy(Quantizer):
    """The rowwise copy of `quantizer`, which stands for the columnwise one too: its values are multiplied there."""

    quantizer: Quantizer

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_tensor(x, rowwise, columnwise)
        made = self.quantizer.quantize(x)
        return replace(made, columnwise=_read_along_rows(made.rowwise) if columnwise else None)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_stacked(w_GNK, rowwise, columnwise)
        made = self.quantizer.quantize_stacked(w_GNK)
        return replace(made, columnwise=_read_along_rows(made.rowwise) if columnwise else None)

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        check_grouped(x_TK, splits, rowwise, columnwise)
        made = self.quantizer.quantize_grouped(x_TK, splits)
        return replace(made, columnwise=_read_along_rows(made.rowwise, splits) if columnwise else None)

    def seeded(self, device: torch.device) -> RowwiseCopy:
        return RowwiseCopy(self.quantizer.seeded(device))

    def of_copy(self, columnwise: bool) -> Quantizer | None:
        return self if columnwise else self.quantizer

    def float8_scaling(self, columnwise: bool) -> ScaleLayout | None:
        return None if columnwise else self.quantizer.float8_scaling(False)

    def knows_groups(self) -> bool:
        return self.quantizer.knows_groups()


def _read_along_rows(copy: ScaledCodes | None, splits: Splits | None = None) -> ScaledCodes | None:
    """The copy itself. One with a factor for each row, which a product along the rows cannot leave to its end, as its
    values in float32."""
    if copy is None or not (isinstance(copy.spec.scale_rule, NVFP4Scale) and copy.spec.scale_rule.row_scaled):
        return copy
    return Dequantized(copy.dequantize(splits), None, copy.spec, copy.shape)  # type: ignore[arg-type]


@dataclass(frozen=True)
class AsItIs(ElementFormat):
    """Unquantized numbers of a floating dtype: the codes are the values."""

    def encode(self, scaled: Tensor) -> Tensor:
        return scaled.to(self.dtype)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype)

    @property
    def half_step(self) -> float:
        return 0.0

    def largest_codes(self, codes: Tensor) -> Tensor:
        return torch.where(codes.abs() == self.max, codes, 0)


@dataclass(frozen=True, eq=False)
class Unquantized(ScaledCodes):
    """A copy that is the tensor itself; scale_inv is 1."""

    @staticmethod
    def of(x: Tensor, columnwise: bool) -> Unquantized:
        element = AsItIs(str(x.dtype), x.dtype, torch.finfo(x.dtype).max)
        spec = ScaleSpec(element, (ALL, ALL), GivenScale())
        return Unquantized(x.detach(), torch.ones((), device=x.device), spec, x.shape, columnwise)

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        if splits is None:
            return Operand(self.codes, None)
        return Operand(self.codes.masked_fill((splits.group_of_row == splits.num_groups)[:, None], 0), None)

    def member(self, group: int, sizes: Sequence[int] | None = None) -> Unquantized:
        if sizes is None:
            return Unquantized.of(self.codes[group], self.columnwise)
        begin = sum(sizes[:group])
        return Unquantized.of(self.codes[begin : begin + sizes[group]], self.columnwise)

    def stacked(self, others: Sequence[ScaledCodes]) -> Unquantized:
        return Unquantized.of(torch.stack([self.codes, *(other.codes for other in others)]), self.columnwise)
