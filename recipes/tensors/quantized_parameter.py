"""QuantizedParameter: a weight that is held as codes alone, as a parameter of a module.

It is a `QuantizedHandle` that may be written: what is put into it is quantized, into the memory of its codes. So
optimizers, `load_state_dict` and CUDA graphs change it in place, and no kernel sees anything but the codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from recipes.pending import PendingUpdates
from recipes.tensors.quantized_handle import Quantized, QuantizedHandle, held_tensors
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer, StateOfRole

_DIVIDING = frozenset((torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default))


class QuantizedParameter(QuantizedHandle):
    """A weight [N, K], or stacked weights [G, N, K], in the codes of `quantizer`; its dtype is the nominal one.

    `parameter.copy_(values)` quantizes: the values as they are, float32 master weights too, or the codes of another
    parameter of the same quantizer, bit for bit. Other changes in place (`mul_`, an optimizer's steps on the parameter
    itself) compute on the dequantized values and quantize the result, each time with a rounding: small steps are lost,
    so let the optimizer own float32 masters (`fuser.MasterWeights`). `.grad` is an ordinary tensor.

    quantized: its copies: rowwise for fprop, columnwise for dgrad; the same where a format shares its codes
    quantizer: without the state of an operation; `bind` names that, for a quantizer that keeps one (delayed scaling)
    """

    quantizer: Quantizer
    _copied = ("_is_param", "_group", "_high_precision_init_val")
    _source: StateOfRole | None = None
    _group: int | None = None
    _high_precision_init_val: Tensor | None = None

    @staticmethod
    def __new__(cls, quantized: Quantized, quantizer: Quantizer) -> Any:
        return QuantizedHandle.__new__(cls, quantized)

    def __init__(self, quantized: Quantized, quantizer: Quantizer) -> None:
        super().__init__(quantized)
        self.quantizer = quantizer

    def over(self, quantized: Quantized) -> QuantizedParameter:
        other = QuantizedParameter(quantized, self.quantizer)
        other._source, other._group = self._source, self._group
        return other

    def bind(self, source: StateOfRole, group: int | None) -> None:
        """Quantize with the scales of this state from now on; of it those of one group, or all (None)."""
        if self.quantizer.keeps_state:
            self._source, self._group = source, group

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _DIVIDING and isinstance(args[0], QuantizedParameter):
            raise NotImplementedError(
                "A weight that is held quantized cannot be divided, by torch.chunk, or by FSDP2, which would gather it "
                "in high precision. Divide its dequantize(); under FSDP2 quantize in the step, without to_quantized."
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        same = isinstance(values, QuantizedParameter) and values.quantizer == self.quantizer
        new = values.quantized if same else self._made_of(values)  # type: ignore[attr-defined]
        for mine, other in zip(self.quantized.tensors(), new.tensors(), strict=True):
            if mine is not None and other is not None:
                _bytes(mine).copy_(_bytes(other))
                increment_version(mine)  # torch does not where it dispatches to this

    @property
    def nbytes_held(self) -> int:
        """Bytes of codes and scales; `nbytes` counts the nominal dtype."""
        return sum(tensor.nbytes for tensor in held_tensors(self))

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values before they were first quantized, on the host; None if they were not kept, or cleared."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Drop these values."""
        self._high_precision_init_val = None

    def _made_of(self, values: Tensor) -> QuantizedTensor:
        values = values.dequantize() if isinstance(values, QuantizedHandle) else values
        values = values.expand(self.shape).to(self.device)
        mine = self.quantized
        return quantize_weight(
            values, self.quantizer, self._source, self._group,
            rowwise=mine.rowwise is not None, columnwise=mine.columnwise is not None,
        )  # fmt: skip

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.quantized, self.quantizer, self.requires_grad, self._attributes())


def quantize_weight(
    w: Tensor,
    quantizer: Quantizer,
    source: StateOfRole | None,
    group: int | None = None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> QuantizedTensor:
    """The copies of w [N, K] or [G, N, K], as an operation quantizes it in a step; one copy, where both agree.

    source: the state of a quantizer that keeps one, in which the amaxes are recorded for the end of the next step;
        group: which of its scales, None for all. Raises RuntimeError where it is needed and None.
    """
    updates = PendingUpdates()
    if quantizer.keeps_state:
        if source is None:
            raise RuntimeError(
                "This weight is quantized with scales that an operation keeps, but belongs to none. Assign it to one: "
                "operation.weight = parameter."
            )
        quantizer = quantizer.bound(source, updates, None)
        quantizer = quantizer if group is None else quantizer.for_group(group)
    function = quantizer.quantize_stacked if w.dim() == 3 else quantizer.quantize
    if quantizer.copies_agree:
        made = function(w, rowwise=True, columnwise=False)
        return QuantizedTensor(made.rowwise, made.rowwise, made.dtype)
    made = function(w, rowwise=rowwise, columnwise=columnwise)
    updates.take()  # the step that uses the codes ends their state's step, see `note_codes_of_state`
    return made


def _bytes(tensor: Tensor) -> Tensor:
    """Codes and scales of any dtype, as torch copies them everywhere. Strides are those of the tensor."""
    return tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)


def _rebuilt(quantized: Quantized, quantizer: Quantizer, requires_grad: bool, attributes: dict[str, Any]) -> Tensor:
    parameter = QuantizedParameter(quantized, quantizer).requires_grad_(requires_grad)
    parameter.__dict__.update(attributes)
    return parameter
