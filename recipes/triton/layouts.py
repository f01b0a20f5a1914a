"""Layouts of tensors that were met before, compared by one call of torch's: `how` takes ten times as long for a key.

torch guards what it compiles by that call. Where torch has none, or a tensor is given twice, there is nothing to
compare with, and `how` decides alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_address: Any = Tensor.data_ptr


class Layouts:
    """How some tensors lie, each of them another one, which it does not keep: class, dtype, device, shape, strides,
    address modulo 16 bytes, whether they require gradients and were made under inference mode, and whether their
    numbers are those in memory (`ops.runner.input.is_stored`).
    """

    __slots__ = ("_behind_16", "_lie_alike")

    def __init__(self, tensors: Sequence[Tensor], addresses: Sequence[int]) -> None:
        shapes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        self._lie_alike = _guards and _guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
        self._behind_16 = [address % 16 for address in addresses]

    def addresses(self, tensors: Sequence[Any]) -> list[int] | None:
        """Those of tensors that lie like these; None for others, and for one that is given twice."""
        if self._lie_alike is None or len(tensors) != len(self._behind_16) or not self._lie_alike(*tensors):
            return None
        addresses = list(map(_address, tensors))
        return addresses if [address % 16 for address in addresses] == self._behind_16 else None
