"""Quantizers defined by a `ScaleSpec`: the base of the built-in ones, and one for user-defined formats."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.casts.cast import cast, cast_to_values, casts_to_values, kernels_of
from recipes.casts.cast_float8 import finds_amaxes
from recipes.casts.layout import Copies, empty_copies
from recipes.tensors.formats import ScaleLayout, ScaleSpec
from recipes.tensors.gathered_rows import GatheredRows, at_source
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import QuantizedBuffers, Quantizer, check_grouped, check_stacked, check_tensor
from recipes.tensors.scaled_codes import ScaledCodes, scaled_copies
from recipes.tensors.splits import Splits
from recipes.triton.meeting import empty_meetings


class SpecQuantizer(Quantizer):
    """Quantizes tensors, stacked weights and grouped rows to the format of its `spec`."""

    @property
    @abstractmethod
    def spec(self) -> ScaleSpec:
        """The format of both copies."""

    def scale_and_amax(self, device: torch.device, num_scales: int) -> tuple[Tensor | None, Tensor | None]:
        """(given scales [n], None to compute them from amaxes; a tensor [n] that records amaxes, or None)."""
        return None, None

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_tensor(x, rowwise, columnwise)
        return QuantizedTensor(*self._copies(x, rowwise, columnwise, 1), x.dtype)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_stacked(w_GNK, rowwise, columnwise)
        return QuantizedTensor(*self._copies(w_GNK, rowwise, columnwise, len(w_GNK), stacked=True), w_GNK.dtype)

    def quantize_grouped(
        self, x_TK: Tensor | GatheredRows, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        check_grouped(x_TK, splits, rowwise, columnwise)
        copies = self._copies(x_TK, rowwise, columnwise, splits.num_groups, splits=splits)
        return GroupedTensor(None, splits, *copies, x_TK.dtype)

    @property
    def gathers(self) -> bool:
        own = type(self).dequantized_rows is not SpecQuantizer.dequantized_rows
        return not own and self.casts_by_spec() and kernels_of(self.spec) is not None

    def empty_like_quantized(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> QuantizedBuffers:
        spec = self.spec
        copies = scaled_copies(empty_copies(shape, spec, device), spec, shape)
        return QuantizedBuffers(QuantizedTensor(*copies, dtype), *self.scale_and_amax(device, 1))

    def dequantized_rows(
        self,
        x_TK: Tensor | GatheredRows,
        splits: Splits,
        dtype: torch.dtype,
        *,
        rowwise: bool,
        columnwise: bool,
        column_codes: bool,
    ) -> GroupedTensor | None:
        if not (self.casts_by_spec() and casts_to_values(self.spec)):
            return None
        check_grouped(x_TK, splits, rowwise, columnwise)
        source, row_of = at_source(x_TK)
        copies = cast_to_values(
            source, self.spec, dtype, rowwise=rowwise, columnwise=columnwise, column_codes=column_codes, splits=splits,
            row_of=row_of,
        )  # fmt: skip
        return GroupedTensor(None, splits, *scaled_copies(copies, self.spec, x_TK.shape), x_TK.dtype)

    def dequantized_stacked(
        self, w_GNK: Tensor, dtype: torch.dtype, *, rowwise: bool, columnwise: bool, column_codes: bool
    ) -> QuantizedTensor | None:
        if not (self.casts_by_spec() and casts_to_values(self.spec)):
            return None
        check_stacked(w_GNK, rowwise, columnwise)
        copies = cast_to_values(
            w_GNK, self.spec, dtype, rowwise=rowwise, columnwise=columnwise, column_codes=column_codes
        )
        return QuantizedTensor(*scaled_copies(copies, self.spec, w_GNK.shape), w_GNK.dtype)

    def empty_grouped(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        splits: Splits,
        *,
        rowwise: bool,
        columnwise: bool,
        meetings: Tensor | None = None,
        values: torch.dtype | None = None,
    ) -> QuantizedBuffers:
        """Buffers for a kernel that computes grouped rows [T, K] and quantizes them as `quantize_grouped` does.

        values: of copies that hold values in place of codes, their dtype
        meetings: those of the buffers into which the same rows were quantized before, so that their amaxes are known
        """
        spec = self.spec
        if values is None:
            copies = empty_copies(shape, spec, splits.device, rowwise=rowwise, columnwise=columnwise, splits=splits)
        else:
            row, column = (
                torch.empty(shape, dtype=values, device=splits.device) if made else None
                for made in (rowwise, columnwise)
            )
            copies = Copies(row, None, column, None)
        grouped = GroupedTensor(None, splits, *scaled_copies(copies, spec, shape), dtype)
        scale, amax = self.scale_and_amax(splits.device, splits.num_groups)
        if scale is not None or not finds_amaxes(spec):
            return QuantizedBuffers(grouped, scale, amax)
        known = meetings is not None
        meetings = empty_meetings(splits.num_groups, splits.device) if meetings is None else meetings
        return QuantizedBuffers(grouped, None, None, meetings, known)

    def casts_by_spec(self) -> bool:
        """Whether rows in groups and stacked weights are cast as the spec says: a subclass may replace that."""
        return all(
            getattr(type(self), name) is getattr(SpecQuantizer, name)
            for name in ("quantize_grouped", "quantize_stacked", "_copies")
        )

    def copy_spec(self, columnwise: bool) -> ScaleSpec | None:
        return self.spec

    def float8_scaling(self, columnwise: bool) -> ScaleLayout | None:
        return self.spec.float8_scaling

    def _copies(
        self,
        x: Tensor | GatheredRows,
        rowwise: bool,
        columnwise: bool,
        num_scales: int,
        *,
        stacked: bool = False,
        splits: Splits | None = None,
    ) -> tuple[ScaledCodes | None, ScaledCodes | None]:
        spec = self.spec
        scale, amax = self.scale_and_amax(x.device, num_scales)
        source, row_of = at_source(x)
        copies = cast(
            source, spec, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits, scale=scale,
            amax_out=amax, row_of=row_of,
        )  # fmt: skip
        return scaled_copies(copies, spec, x.shape)


@dataclass(frozen=True)
class FormatQuantizer(SpecQuantizer):
    """A quantizer to the given format. Formats that no kernel supports are cast in plain torch.

    Raises TypeError for a format that is no ScaleSpec, ValueError for one with a transform.
    """

    format: ScaleSpec

    def __post_init__(self) -> None:
        if not isinstance(self.format, ScaleSpec):
            raise TypeError(
                f"format is {self.format!r}, but must be a ScaleSpec. Pass ScaleSpec(element, block, scale_rule)."
            )
        if self.format.transform is not None:
            raise ValueError(
                f"format has the transform {self.format.transform!r}, but FormatQuantizer applies none. "
                "Leave transform=None, or write a Quantizer that applies it."
            )

    @property
    def spec(self) -> ScaleSpec:
        return self.format
