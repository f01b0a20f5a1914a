"""Quantizer: how one tensor becomes codes and scales."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from recipes.grouped_tensor import GroupedTensor
from recipes.quantized_tensor import QuantizedTensor
from recipes.splits import Splits


class Quantizer(ABC):
    """Base of all quantizers. Subclasses are frozen dataclasses, equal by value.

    Inputs are bf16, fp16, fp32 or fp64; what is quantized is their value in float32 (fp64 is rounded to it first).
    Each copy that is asked for is cast from this input, never from the other copy. Not differentiable.

    Only `quantize` must be there. A quantizer with that alone runs on the split path.
    """

    @abstractmethod
    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        """Quantize one tensor [..., K]; its rows are all axes but the last."""

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        """Quantize weights [G, N, K], each group by itself: rowwise along K, columnwise along N."""
        raise NotImplementedError(f"{type(self).__name__} quantizes single tensors only. Quantize group by group.")

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        """Quantize the rows of each group as if it stood alone, bit for bit, without reading the device.

        Rows past the sum get codes of 0, whatever stands there.
        """
        raise NotImplementedError(f"{type(self).__name__} quantizes single tensors only. Quantize group by group.")

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> QuantizedTensor | None:
        """Uninitialised codes and scales of both copies, for a kernel that casts what it has just computed.

        None if this quantizer has to see the whole tensor first, or has no such kernel.
        """
        return None

    def knows_groups(self) -> bool:
        """Whether stacked weights and grouped rows can be quantized at once, as the grouped path needs it."""
        kind = type(self)
        return (
            kind.quantize_stacked is not Quantizer.quantize_stacked
            and kind.quantize_grouped is not Quantizer.quantize_grouped
        )
