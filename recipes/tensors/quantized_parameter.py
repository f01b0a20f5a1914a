"""QuantizedParameter: a weight that is held as codes alone, as a parameter of a module.

It is a `QuantizedHandle` that may be written: what is put into it is quantized, into the memory of its codes. So
optimizers, `load_state_dict` and CUDA graphs change it in place, and no kernel sees anything but the codes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recipes.tensors.quantize_weight import overwrite, quantize_weight
from recipes.tensors.quantized_handle import Quantized, QuantizedHandle, held_tensors
from recipes.tensors.quantized_shard import Sharding, empty_shard, is_padded, shards_of
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer, StateOfRole

_aten = torch.ops.aten


class QuantizedParameter(QuantizedHandle):
    """A weight [N, K], or stacked weights [G, N, K], in the codes of `quantizer`; its dtype is the nominal one.

    `parameter.copy_(values)` quantizes: the values as they are, float32 master weights too, or the codes of another
    parameter of the same quantizer, bit for bit. Other changes in place (`mul_`, an optimizer's steps on the parameter
    itself) compute on the dequantized values and quantize the result, each time with a rounding: small steps are lost,
    so let the optimizer own float32 masters (`fuser.MasterWeights`). Codes are written as a whole: a change of a view
    (`parameter[0].copy_(values)`) and ordinary tensors as `.data` raise RuntimeError. `.grad` is an ordinary tensor.

    quantized: its copies: rowwise for fprop, columnwise for dgrad; the same where a format shares its codes
    quantizer: without the state of an operation; `bind` names that, for a quantizer that keeps one (delayed scaling)
    """

    quantized: QuantizedTensor
    quantizer: Quantizer
    _copied = ("_is_param", "_groups", "_high_precision_init_val")
    _source: StateOfRole | None = None
    _groups: range | None = None
    _high_precision_init_val: Tensor | None = None
    is_replaced = False  # in its operation, by another parameter
    moved: tuple[Callable[[Tensor], Tensor], Tensor] | None = None  # what a move of its module made of it, and by what

    @staticmethod
    def __new__(cls, quantized: Quantized, quantizer: Quantizer | None = None, **others: Any) -> Any:
        if quantizer is None or others:  # as accelerate does when it offloads, by the class of what was there
            raise TypeError(
                "A weight that is held quantized is not made of a tensor by its class, as accelerate's offload has it. "
                "Offload a model with ordinary weights, which fuser.dequantized_state_dict(model.state_dict()) has, or "
                "leave this one where it is."
            )
        return QuantizedHandle.__new__(cls, quantized)

    def __init__(self, quantized: Quantized, quantizer: Quantizer) -> None:
        super().__init__(quantized)
        self.quantizer = quantizer

    def over(self, quantized: Quantized) -> QuantizedParameter:
        return _bound(quantized, self.quantizer, self._source, self._groups)

    def bind(self, source: StateOfRole, groups: range | None) -> None:
        """Quantize with the scales of this state from now on; of it those of these groups, or all (None)."""
        if self.quantizer.keeps_state:
            self._source, self._groups = source, groups

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "fuser":  # torch.export, unless strict, traced it as an ordinary tensor
            raise RuntimeError(
                f"{func} was traced for weights in high precision, and is given one that is held quantized, which it "
                "would dequantize and quantize again. Run the model eagerly, or export one with ordinary weights, "
                "which fuser.dequantized_state_dict(model.state_dict()) has."
            )
        # What FSDP2 calls when it shards a parameter: torch.chunk, new_zeros for the padded part; and when it has
        # gathered one: as_strided.
        weight = args[0] if args else None
        if isinstance(weight, QuantizedParameter):
            if func is _aten.split.Tensor:
                return shards_of(weight.quantized, weight._sharding(args[1]), args[2] if len(args) > 2 else 0)
            if func is _aten.new_zeros.default and is_padded(weight, args[1], kwargs):
                return empty_shard(weight.quantized, weight._sharding(args[1][0]), args[1][0])
            if func is _aten.as_strided.default and (tuple(args[1]), tuple(args[2])) == (weight.shape, weight.stride()):
                return weight.over(weight.quantized)
        return super().__torch_dispatch__(func, types, args, kwargs)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        same = isinstance(values, QuantizedParameter) and values.quantizer == self.quantizer
        new = values.quantized if same else self._made_of(values)  # type: ignore[attr-defined]
        overwrite(self.quantized, new)
        self.clear_high_precision_init_val()  # they are others now

    @property
    def nbytes_held(self) -> int:
        """Bytes of codes and scales; `nbytes` counts the nominal dtype."""
        return sum(tensor.nbytes for tensor in held_tensors(self))

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values before they were first quantized, on the host; None if they were not kept, or cleared, or others
        were written since."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Drop these values."""
        self._high_precision_init_val = None

    def hand_over_attributes(self, parameter: Tensor) -> None:
        """Give the parameter that takes its place in a module what others have set on this one, such as `main_grad`;
        and to one that is held quantized the values before quantization."""
        own = {*QuantizedParameter.__annotations__, "is_replaced", "_is_param"}
        vars(parameter).update({name: value for name, value in vars(self).items() if name not in own})
        if isinstance(parameter, QuantizedParameter):
            parameter._high_precision_init_val = self._high_precision_init_val

    def _made_of(self, values: Tensor) -> QuantizedTensor:
        values = values.dequantize() if isinstance(values, QuantizedHandle) else values
        values = values.expand(self.shape).to(self.device)
        mine = self.quantized
        return quantize_weight(
            values, self.quantizer, self._source, self._groups,
            rowwise=mine.rowwise is not None, columnwise=mine.columnwise is not None,
        )  # fmt: skip

    def _sharding(self, rows: int) -> Sharding:
        """In parts of so many rows."""
        initial = self._high_precision_init_val
        return sharding_of(self.shape, rows, self.quantizer, self._source, self._groups, initial)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.quantized, self.quantizer, self.requires_grad, self._attributes())


def sharding_of(
    whole: torch.Size,
    rows: int,
    quantizer: Quantizer,
    source: StateOfRole | None,
    groups: range | None,
    initial: Tensor | None = None,
) -> Sharding:
    """How a weight of this shape is divided into parts of so many rows; the other arguments as of `Sharding`."""
    make = partial(_bound, quantizer=quantizer, source=source, groups=groups)
    return Sharding(whole, rows, quantizer, False, make, source, groups, initial=initial)


def _bound(
    quantized: Quantized, quantizer: Quantizer, source: StateOfRole | None, groups: range | None
) -> QuantizedParameter:
    parameter = QuantizedParameter(quantized, quantizer)
    parameter._source, parameter._groups = source, groups
    return parameter


def _rebuilt(quantized: Quantized, quantizer: Quantizer, requires_grad: bool, attributes: dict[str, Any]) -> Tensor:
    parameter = QuantizedParameter(quantized, quantizer).requires_grad_(requires_grad)
    parameter.__dict__.update(attributes)
    return parameter
