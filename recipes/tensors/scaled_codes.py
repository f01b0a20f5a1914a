"""ScaledCodes: one copy of a tensor, as codes and scales that lie as a `ScaleSpec` says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast import dequantize
from recipes.casts.dequantize_nvfp4 import values_nvfp4
from recipes.casts.hadamard import hadamard_ref
from recipes.casts.layout import Copies
from recipes.casts.members import Stored, as_stack, of_rows, of_stack
from recipes.casts.natural import NaturalCopy, natural_codes, natural_scales
from recipes.casts.nvfp4_alpha import alpha_from_amax, combined_alpha
from recipes.casts.scale_rules import NVFP4Scale
from recipes.tensors.formats import ALL, ScaleLayout, ScaleSpec
from recipes.tensors.splits import Splits


class Operand(NamedTuple):
    """One side of a matrix product: y = alpha_a * alpha_b * (a @ b).

    values: exact in a dtype that matrix products take
    scale: float32 `alpha`, the factor that stays outside the product; () for one tensor, [G] for groups, [T, 1] for the
           rows of x in fprop and of dy in dgrad; None for 1
    block: the rows of each group (of the one tensor) are padded with zeros to a multiple of this, so that `values` has
           as many rows as `splits.padded(block)`; only of operands whose rows are summed over (NT)
    factor: float32 [G, N, 1] or [G, 1, K] of stacked weights that are kept on a CPU, in place of whose values
            fl(values * factor) is multiplied; None for 1
    largest: of an NVFP4 copy; then `scale` is the amax of which alpha is made (`recipes.casts.nvfp4_alpha`)
    """

    values: Tensor
    scale: Tensor | None
    block: int = 1
    factor: Tensor | None = None
    largest: float | None = None

    @property
    def alpha(self) -> Tensor | None:
        """In new memory, if it is made of an amax."""
        if self.scale is None or self.largest is None:
            return self.scale
        return alpha_from_amax(self.scale, self.largest)

    def alpha_with(self, other: Operand) -> Tensor | None:
        """alpha of this operand * alpha of the other in float32, by one kernel; None if neither has one."""
        if self.scale is None or other.scale is None:
            return self.alpha if other.scale is None else other.alpha
        if self.largest is None and other.largest is None:
            return self.scale * other.scale
        return combined_alpha(self.scale, self.largest, other.scale, other.largest)


class Float8Operand(NamedTuple):
    """The same of codes that tensor cores take: float8, contiguous along the axis to be contracted; but dy of wgrad
    may lie in rows, with one scale a tensor and block 1.

    scale: float32, value = code * scale. How it lies follows from `scaling` and is said in the kernel's file.
    block: of a transposed copy, the columns of each group begin at multiples of this and are padded with zeros
    """

    codes: Tensor
    scale: Tensor
    scaling: ScaleLayout
    block: int = 1


@dataclass(frozen=True, eq=False)
class ScaledCodes:
    """One copy: `codes` and `scale_inv` as stored, with value = decode(code) * scale_rule.values(scale_inv).

    Where the rows are divided among groups, methods are given the `splits` too. How both lie: `recipes.casts.layout`,
    of NVFP4 `recipes.casts.cast_nvfp4`. Codes of a format that no `ScaleSpec` describes are a subclass with an
    `operand` of its own.

    shape: of the values, in the natural order
    columnwise: whether this is the copy that is scaled along the rows
    amax: float32, of formats with one above the scales: () for one tensor, [G] for stacked weights or grouped rows; of
          each row [T], [G, N] if it is row-scaled
    """

    codes: Tensor
    scale_inv: Tensor
    spec: ScaleSpec
    shape: torch.Size
    columnwise: bool = False
    amax: Tensor | None = None

    @property
    def tensor_fields(self) -> tuple[str, ...]:
        """The fields that hold tensors; all of them travel through `save_for_backward`."""
        has_amax = isinstance(self.spec.scale_rule, NVFP4Scale)
        return ("codes", "scale_inv", "amax") if has_amax else ("codes", "scale_inv")

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in self.tensor_fields)

    def over(self, tensors: Sequence[Tensor | None]) -> ScaledCodes:
        """The same copy over `tensors`, which come from `tensors()`. With Nones: an empty template."""
        return replace(self, **dict(zip(self.tensor_fields, tensors, strict=True)))  # type: ignore[arg-type]

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns, in the natural order, that share a scale."""
        return self.spec.block_of(self.columnwise)

    @property
    def transform(self) -> str | None:
        """The orthogonal transform that the values are in; None if they are those of the tensor."""
        return self.spec.transform if self.columnwise else None

    def largest_codes(self) -> Tensor:
        """The codes, with 0 for all but those of the largest magnitude."""
        return self.spec.element.largest_codes(self.codes)

    @property
    def half_step(self) -> float:
        """By how much of itself the largest number may lie below what is rounded to it."""
        return self.spec.element.half_step

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        """Values in `dtype`, in the natural order; another dtype in place of one that could not hold them."""
        rule = self.spec.scale_rule
        if isinstance(rule, NVFP4Scale):
            assert self.amax is not None, "an empty template has no tensors: rebuild it first"
            amax, largest = self.amax, rule.range
            if not self.columnwise:
                values = values_nvfp4(self.codes, self.scale_inv, dtype, self.shape, columnwise=False, padded=False)
                return Operand(values, amax[..., None] if rule.row_scaled else amax, largest=largest)
            padded = self.transform is not None or splits is not None
            values = values_nvfp4(self.codes, self.scale_inv, dtype, self.shape, columnwise=True, padded=padded)
            return Operand(values, amax, self.spec.alignment if padded else 1, largest=largest)
        per_tensor = self.spec.is_per_tensor
        values = dequantize(
            self.codes, self.scale_inv, self.spec, dtype if per_tensor else rule.holding(dtype),
            columnwise=self.columnwise, shape=self.shape, splits=splits,
        )  # fmt: skip
        return Operand(values, rule.values(self.scale_inv) if per_tensor else None)

    def float8_operand(self) -> Float8Operand | None:
        """The codes themselves, if a GPU with float8 products can multiply them."""
        scaling = self.spec.float8_scaling
        if scaling is None:
            return None
        # Of square blocks the columns belong to one group, and those of stacked weights are not padded.
        block = self.spec.alignment if self.columnwise and scaling != "square" else 1
        scale = self.spec.scale_rule.values(self.scale_inv)
        if scaling == "vector" and self.columnwise:  # of a tensor, stacked weights and grouped rows
            scale = scale.reshape(-1, 1, scale.shape[-1])
        return Float8Operand(self.codes, scale, scaling, block)

    def dequantize(self, splits: Splits | None = None) -> Tensor:
        """fl(code * scale_inv) in float32, without padding or transform; exactly 0 past the sum of the splits."""
        operand = self.operand(torch.float32, splits)
        alpha, block, values = operand.alpha, operand.block, operand.values.to(torch.float32)
        values = values if operand.factor is None else values * operand.factor
        if alpha is None:
            return values
        if alpha.ndim > 1:  # a factor a row
            alpha = alpha.reshape(*self.shape[:-1], 1)
        elif splits is not None:
            # Rows past the sum have codes of 0: any finite factor does.
            group = splits.padded(block).group_of_row
            alpha = alpha.index_select(0, group.clamp(max=splits.num_groups - 1))
        values = values * alpha.reshape(alpha.shape + (1,) * (values.ndim - alpha.ndim))
        if block == 1:
            return values
        if self.transform is not None:
            values = hadamard_ref(values, inverse=True)
        if splits is None:
            num_rows = self.shape[-2] if values.ndim == 3 else math.prod(self.shape[:-1])
            return values[..., :num_rows, :].reshape(self.shape)
        if not values.numel():
            return values.new_zeros(self.shape)
        inactive = splits.group_of_row == splits.num_groups
        return values.index_select(0, splits.row_in_padded(block)).masked_fill(inactive[:, None], 0.0)

    def natural(self, splits: Splits | None = None) -> NaturalCopy:
        """Codes and scales in the natural order, as they are stored: see `NaturalCopy`."""
        assert self.codes is not None, "an empty template has no tensors: rebuild it first"
        where = self.spec, self.shape, splits
        scale, block = natural_scales(self.scale_inv, *where, columnwise=self.columnwise)
        return NaturalCopy(natural_codes(self.codes, *where, columnwise=self.columnwise), scale, block, self.amax)

    def member(self, group: int, sizes: Sequence[int] | None = None) -> ScaledCodes:
        """The copy of one tensor: of weight `group` of stacked ones, or of the rows of that group.

        sizes: of all groups, on the host, where rows are divided; None for stacked weights. Bit for bit what quantizing
        it alone gives. Subclasses whose tensors do not lie as the spec says replace this, and `stacked`.

        Raises NotImplementedError, as `stacked` does, of a subclass with further `tensor_fields` that has not.
        """
        self._check_fields("member")
        stored, of_columns = Stored(self.codes, self.scale_inv, self.amax), self.columnwise
        if sizes is None:
            return self._with(of_stack(stored, self.spec, of_columns, group), self.shape[1:])
        shape = torch.Size((sizes[group], self.shape[-1]))
        return self._with(of_rows(stored, self.spec, of_columns, sizes, group), shape)

    def stacked(self, others: Sequence[ScaledCodes]) -> ScaledCodes:
        """This copy of a weight [N, K] and `others` of the same shape and format, as that of stacked weights."""
        self._check_fields("stacked")
        members = [Stored(each.codes, each.scale_inv, each.amax) for each in (self, *others)]
        stack = as_stack(members, self.spec, self.columnwise, self.shape[0])
        return self._with(stack, torch.Size((len(members), *self.shape)))

    def _check_fields(self, method: str) -> None:
        """Raise NotImplementedError if this class inherits `method`, which leaves its further tensors as they are."""
        further = [name for name in self.tensor_fields if name not in Stored._fields]
        if further and getattr(type(self), method) is getattr(ScaledCodes, method):
            raise NotImplementedError(
                f"{type(self).__name__} holds {' and '.join(further)} beside codes and scales, which cannot be divided "
                "among groups without its help. Replace `member` and `stacked` of ScaledCodes in it."
            )

    def _with(self, stored: Stored, shape: torch.Size) -> ScaledCodes:
        return replace(self, **stored._asdict(), shape=shape)


@dataclass(frozen=True, eq=False)
class Dequantized(ScaledCodes):
    """A copy that holds its values, as `operand` gives them, in place of codes, and their alpha, or the amax of which
    it is made, in place of scales.

    factored: in place of scales stands `Operand.factor`, and there is no alpha
    """

    factored: bool = False

    @staticmethod
    def of(copy: ScaledCodes, dtype: torch.dtype) -> ScaledCodes:
        """The same copy with values in `dtype`; the copy itself where these are padded.

        Of stacked weights on a CPU in bfloat16, where that holds each of them, or else their codes, which a factor for
        each row or column makes them: a product of a few rows takes as long as reading them, and those of a group are
        read into a cache. A whole weight would be read into memory, which takes longer than its values in `dtype`.
        """
        operand = copy.operand(dtype)
        if operand.block > 1:
            return copy
        values, alpha = operand.values, operand.alpha
        kind = copy.spec, copy.shape, copy.columnwise
        if values.device.type == "cpu" and values.dim() == 3:
            narrow = values.to(torch.bfloat16)
            if torch.equal(narrow.to(dtype), values):
                return Dequantized(narrow, alpha, *kind)  # type: ignore[arg-type]
            if copy.spec.block == (1, ALL) and alpha is None:
                codes, stored, *_ = copy.natural()
                narrow, factor = copy.spec.element.decode(codes, torch.bfloat16), copy.spec.scale_rule.values(stored)
                if torch.equal(narrow.to(dtype).mul_(factor), values):
                    return Dequantized(narrow.contiguous(), factor, *kind, factored=True)
        return Dequantized(values, alpha, *kind)  # type: ignore[arg-type]

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        if self.factored:
            return Operand(self.codes, None, factor=self.scale_inv)
        rule = self.spec.scale_rule
        if self.amax is not None and isinstance(rule, NVFP4Scale):
            return Operand(self.codes, self.amax, self._rows_of_a_block, largest=rule.range)
        return Operand(self.codes, self.scale_inv)

    @property
    def _rows_of_a_block(self) -> int:
        """Columnwise values are padded to a multiple of so many rows in each group, as their codes are."""
        return self.spec.alignment if self.columnwise and self.amax is not None else 1

    def member(self, group: int, sizes: Sequence[int] | None = None) -> ScaledCodes:
        """As of codes; but values lie as the tensor does, in rows, and alpha is one a group or one a row."""
        if sizes is None:
            return super().member(group)
        block = self._rows_of_a_block
        ends = list(accumulate(-(-size // block) * block for size in sizes))
        rows, alpha = slice(ends[group - 1] if group else 0, ends[group]), self.scale_inv
        if alpha is not None:
            alpha = alpha[rows] if alpha.ndim > 1 else alpha[group]
        stored = Stored(self.codes[rows], alpha, None if self.amax is None else self.amax[group])
        return self._with(stored, torch.Size((sizes[group], self.shape[-1])))

    def float8_operand(self) -> None:
        """There are no codes."""


def scaled_copies(
    copies: Copies, spec: ScaleSpec, shape: torch.Size, amaxes: tuple[Tensor | None, Tensor | None] = (None, None)
) -> tuple[ScaledCodes | None, ScaledCodes | None]:
    """The rowwise and the columnwise copy of a tensor of this shape. amaxes: theirs, of formats with one above the
    scales."""
    return (
        _scaled_copy(copies.row_codes, copies.row_scale, spec, shape, False, amaxes[0]),
        _scaled_copy(copies.column_codes, copies.column_scale, spec, shape, True, amaxes[1]),
    )


def _scaled_copy(
    codes: Tensor | None,
    scale: Tensor | None,
    spec: ScaleSpec,
    shape: torch.Size,
    columnwise: bool,
    amax: Tensor | None,
) -> ScaledCodes | None:
    if codes is None:
        return None
    if scale is None:
        return Dequantized(codes, None, spec, shape, columnwise, amax)  # type: ignore[arg-type]
    return ScaledCodes(codes, scale, spec, shape, columnwise, amax)
