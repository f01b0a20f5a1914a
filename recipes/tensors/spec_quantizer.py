"""Quantizers that a `ScaleSpec` describes: the base of the built-in ones, and one for a format of the user's own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.casts.cast import cast
from recipes.casts.layout import empty_copies
from recipes.tensors.formats import ScaleLayout, ScaleSpec
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import QuantizedBuffers, Quantizer, check_grouped, check_stacked, check_tensor
from recipes.tensors.scaled_codes import scaled_copies
from recipes.tensors.splits import Splits


class SpecQuantizer(Quantizer):
    """Casts as its `spec` says, tensors, stacked weights and grouped rows alike."""

    @property
    @abstractmethod
    def spec(self) -> ScaleSpec:
        """The format, of both copies."""

    def scale_and_amax(self, device: torch.device, num_scales: int) -> tuple[Tensor | None, Tensor | None]:
        """Scales [n] to cast with in place of those from amaxes, and where amaxes are recorded, [n]."""
        return None, None

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_tensor(x, rowwise, columnwise)
        scale, amax = self.scale_and_amax(x.device, 1)
        copies = cast(x, self.spec, rowwise=rowwise, columnwise=columnwise, scale=scale, amax_out=amax)
        return QuantizedTensor(*scaled_copies(copies, self.spec, x.shape), x.dtype)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_stacked(w_GNK, rowwise, columnwise)
        scale, amax = self.scale_and_amax(w_GNK.device, len(w_GNK))
        copies = cast(
            w_GNK, self.spec, rowwise=rowwise, columnwise=columnwise, stacked=True, scale=scale, amax_out=amax
        )
        return QuantizedTensor(*scaled_copies(copies, self.spec, w_GNK.shape), w_GNK.dtype)

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        check_grouped(x_TK, splits, rowwise, columnwise)
        scale, amax = self.scale_and_amax(x_TK.device, splits.num_groups)
        copies = cast(
            x_TK, self.spec, rowwise=rowwise, columnwise=columnwise, splits=splits, scale=scale, amax_out=amax
        )
        return GroupedTensor(None, splits, *scaled_copies(copies, self.spec, x_TK.shape), x_TK.dtype)

    def empty_like_quantized(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> QuantizedBuffers:
        copies = scaled_copies(empty_copies(shape, self.spec, device), self.spec, shape)
        return QuantizedBuffers(QuantizedTensor(*copies, dtype), *self.scale_and_amax(device, 1))

    def float8_scaling(self, columnwise: bool) -> ScaleLayout | None:
        return self.spec.float8_scaling


@dataclass(frozen=True)
class FormatQuantizer(SpecQuantizer):
    """A quantizer to any format, which is its value; torch casts those that no kernel knows."""

    format: ScaleSpec

    @property
    def spec(self) -> ScaleSpec:
        return self.format
