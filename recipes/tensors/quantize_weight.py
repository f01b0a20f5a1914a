"""How a weight that is held quantized gets its codes: as in a step, and then into the memory of those of before."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from recipes.pending import PendingUpdates
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer, StateOfRole


def quantize_weight(
    w: Tensor,
    quantizer: Quantizer,
    source: StateOfRole | None,
    groups: range | None = None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> QuantizedTensor:
    """The copies of w [N, K] or [G, N, K], as an operation quantizes it in a step; one copy, where both agree.

    source: the state of a quantizer that keeps one, in which the amaxes are recorded for the end of the next step;
        groups: which of its scales, None for all. Raises RuntimeError where it is needed and None.
    """
    updates = PendingUpdates()
    if quantizer.keeps_state:
        if source is None:
            raise RuntimeError(
                "This weight is quantized with scales that an operation keeps, but belongs to none. Assign it to one: "
                "operation.weight = parameter."
            )
        quantizer = quantizer.bound(source, updates, None)
        quantizer = quantizer if groups is None else quantizer.for_groups(groups)
    function = quantizer.quantize_stacked if w.dim() == 3 else quantizer.quantize
    if quantizer.copies_agree:
        made = function(w, rowwise=True, columnwise=False)
        return QuantizedTensor(made.rowwise, made.rowwise, made.dtype)
    made = function(w, rowwise=rowwise, columnwise=columnwise)
    updates.take()  # the step that uses the codes ends their state's step, see `note_codes_of_state`
    return made


def overwrite(held: QuantizedTensor, new: QuantizedTensor) -> None:
    """Put the codes and scales of `new` into the memory of those that `held` has."""
    for mine, other in zip(held.tensors(), new.tensors(), strict=True):
        if mine is not None and other is not None:
            as_copied(mine).copy_(as_copied(other))
            increment_version(mine)  # torch does not where it dispatches to this


def as_copied(tensor: Tensor) -> Tensor:
    """Codes and scales of any dtype, as torch copies them everywhere. Strides are those of the tensor."""
    return tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)
