"""Quantizer: the interface that turns a tensor into codes and scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from recipes.arguments import NUMBERS
from recipes.pending import PendingUpdates
from recipes.tensors.check_quantized import METHODS, checked
from recipes.tensors.formats import Float8Format, ScaleLayout, ScaleSpec
from recipes.tensors.gathered_rows import GatheredRows
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.splits import Splits

# name -> (shape, initial value) of the float32 tensors that a quantizer keeps from step to step
StateShapes = Mapping[str, tuple[tuple[int, ...], float]]


class StateOfRole(Protocol):
    """The storage for the state of one operation's quantizer for one role."""

    @property
    def role(self) -> str: ...

    def tensors(
        self, quantizer: Quantizer, device: torch.device | None, names: Iterable[str] | None = None
    ) -> Mapping[str, Tensor]:
        """The tensors that `quantizer.state_shapes` names, or these of them, created on `device` if they do not exist
        yet."""
        ...


class QuantizedBuffers(NamedTuple):
    """Uninitialised buffers for the copies of a tensor, or of rows in n groups (n = 1 without groups).

    scale: [n] float32 to quantize with; None if the kernel computes the scales
    amax:  [n] float32, to be raised to max |x|; None if nothing is recorded
    meetings: where the kernel finds the amaxes from which the scales follow (`recipes.triton.meeting`); None with scale
    amaxes_are_known: whether they are found already
    """

    copies: QuantizedTensor | GroupedTensor
    scale: Tensor | None = None
    amax: Tensor | None = None
    meetings: Tensor | None = None
    amaxes_are_known: bool = False


class Quantizer(ABC):
    """Base of all quantizers. Subclasses are frozen dataclasses, equal by value.

    Inputs are bf16, fp16, fp32 or fp64, and are quantized from their float32 values (fp64 is first rounded to float32).
    Each requested copy is cast from the input, never from the other copy. Not differentiable.

    The built-in quantizers raise TypeError for an x of another type or dtype, and ValueError for an x with too few
    dimensions, for splits made for another number of rows, and if no copy is requested.

    Only `quantize` is required. A quantizer that implements nothing else runs on the split path. What the methods of
    other packages' quantizers return is checked in each call (`recipes.tensors.check_quantized`).

    keeps_state: whether casts depend on earlier ones through the tensors that `state_shapes` names. These are buffers
    of the operation that quantizes.
    """

    keeps_state: ClassVar[bool] = False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for name in METHODS:
            method = vars(cls).get(name)
            if method is not None and method.__module__.partition(".")[0] != "recipes":
                setattr(cls, name, checked(method))

    @abstractmethod
    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        """Quantize one tensor [..., K]; its rows are all axes but the last.

        x may have zero rows only if the operation's input has none: the split path skips empty groups.
        """

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        """Quantize stacked weights [G, N, K], each group separately: rowwise along K, columnwise along N."""
        raise NotImplementedError(
            f"{type(self).__name__} quantizes single tensors only. Quantize group by group: replace "
            "`quantize_stacked`, or make GroupedLinear with stacked=False."
        )

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        """Quantize the rows of each group, bit for bit as if each were quantized alone, without synchronizing.

        Rows past the sum get codes of 0, regardless of their values.
        """
        raise NotImplementedError(f"{type(self).__name__} quantizes single tensors only. Quantize group by group.")

    @property
    def gathers(self) -> bool:
        """Whether `quantize_grouped` and `dequantized_rows` take `GatheredRows` too, and read these rows where they
        lie; else they are copied before."""
        return False

    def dequantized_rows(
        self,
        x_TK: Tensor,
        splits: Splits,
        dtype: torch.dtype,
        *,
        rowwise: bool,
        columnwise: bool,
        column_codes: bool,
    ) -> GroupedTensor | None:
        """As `quantize_grouped` on a GPU, with the values of the copies in place of their codes, in one pass; None
        where no kernel does so.

        dtype: of the values, which holds them. column_codes: the columnwise copy is codes nevertheless.
        """
        return None

    def dequantized_stacked(
        self, w_GNK: Tensor, dtype: torch.dtype, *, rowwise: bool, columnwise: bool, column_codes: bool
    ) -> QuantizedTensor | None:
        """The same for `quantize_stacked`."""
        return None

    @property
    def kernel_spec(self) -> ScaleSpec | None:
        """The format to which a kernel may quantize its result tile by tile, if it supports the format; None if the
        scales depend on the complete tensor."""
        return None

    def empty_like_quantized(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> QuantizedBuffers:
        """Buffers for such a kernel: both copies of a non-empty tensor [..., K]."""
        raise NotImplementedError(f"{type(self).__name__} casts by its own kernels only: kernel_spec is None.")

    def state_shapes(self, num_scales: int) -> StateShapes:
        """The state tensors for `num_scales` scales, one for each group of a grouped operation."""
        return {}

    def bound(self, source: StateOfRole | None, updates: PendingUpdates | None, scale: Tensor | None) -> Quantizer:
        """This quantizer bound to an operation's state, or to none with a `scale`.

        updates: collects states that change at the end of the step; None: nothing is recorded.
        scale: a `snapshot` to quantize with instead of the state's scales.
        """
        return self

    def seeded(self, device: torch.device) -> Quantizer:
        """This quantizer with the seed of one cast already drawn, so that all groups of one buffer share it."""
        return self

    def for_group(self, group: int) -> Quantizer:
        """This quantizer, for the tensor of a single group."""
        return self

    def for_groups(self, groups: range) -> Quantizer:
        """This quantizer, for the stacked weights, or the one weight, of these groups. Raises NotImplementedError for
        several groups of a quantizer that keeps a state and does not say which part of it is theirs."""
        if len(groups) == 1:
            return self.for_group(groups[0])
        if self.keeps_state:
            raise NotImplementedError(
                f"{type(self).__name__} keeps a state, but not for_groups: which part of it {groups} have. Define it."
            )
        return self

    def snapshot(self, device: torch.device) -> Tensor | None:
        """The part of the state with which a later cast gives the same codes as in this step; None if stateless."""
        return None

    def note_cast_with(self, snapshot: Tensor | None) -> None:  # noqa: B027
        """Record that codes quantized with this `snapshot` are reused, so that a recomputation uses it too."""

    def note_codes_of_state(self) -> None:  # noqa: B027
        """Record that codes are used which were cast with this state before, so that the amax recorded at their cast
        enters the state at the end of this step."""

    @property
    def columnwise_transform(self) -> str | None:
        """The orthogonal transform of the rows in columnwise copies; it cancels only if both operands have the same."""
        return None

    @property
    def copies_agree(self) -> bool:
        """Whether both copies have the same values and no native product reads their codes: one copy is then enough."""
        return False

    def copy_spec(self, columnwise: bool) -> ScaleSpec | None:
        """The format of this copy, by which codes of a caller's are known to be those that it would make; None where no
        `ScaleSpec` describes it."""
        return None

    def of_copy(self, columnwise: bool) -> Quantizer | None:
        """The quantizer of this copy; None leaves the copy in high precision."""
        return self

    def float8_scaling(self, columnwise: bool) -> ScaleLayout | None:
        """This copy's scale layout for native float8 products; None if values are multiplied instead."""
        return None

    def knows_groups(self) -> bool:
        """Whether it implements `quantize_stacked` and `quantize_grouped`, which the grouped path needs."""
        kind = type(self)
        return (
            kind.quantize_stacked is not Quantizer.quantize_stacked
            and kind.quantize_grouped is not Quantizer.quantize_grouped
        )


def check_tensor(x: Tensor, rowwise: bool, columnwise: bool) -> None:
    """Check the arguments of `quantize`: a tensor [..., K] of a castable dtype, and at least one copy."""
    if not isinstance(x, Tensor):
        raise TypeError(f"what is to be quantized is of type {type(x).__name__}. Pass a tensor.")
    if x.dtype not in NUMBERS:
        raise TypeError(
            f"what is to be quantized is {x.dtype}, but must be bfloat16, float16, float32 or float64. Convert it."
        )
    if not x.dim():
        raise ValueError("what is to be quantized has no dimensions, but must be [..., K]. Pass x.view(1).")
    if not (rowwise or columnwise):
        raise ValueError("rowwise and columnwise are both False, so nothing would be made. Ask for one copy at least.")


def check_stacked(w_GNK: Tensor, rowwise: bool, columnwise: bool) -> None:
    """Check the arguments of `quantize_stacked`: weights [G, N, K]."""
    check_tensor(w_GNK, rowwise, columnwise)
    if w_GNK.dim() != 3:
        raise ValueError(f"stacked weights have shape {list(w_GNK.shape)}, but must be [G, N, K]. Stack them.")


def check_grouped(x_TK: Tensor | GatheredRows, splits: Splits, rowwise: bool, columnwise: bool) -> None:
    """Check the arguments of `quantize_grouped`: rows [T, K], and splits made for T rows."""
    check_tensor(x_TK.source if isinstance(x_TK, GatheredRows) else x_TK, rowwise, columnwise)
    if not isinstance(splits, Splits):
        raise TypeError(
            f"splits is of type {type(splits).__name__}. Pass Splits.make(sizes, rows=len(x), device=x.device)."
        )
    if len(x_TK.shape) != 2:
        raise ValueError(
            f"grouped rows have shape {list(x_TK.shape)}, but must be [rows, K]. Flatten the leading ones."
        )
    if splits.rows != x_TK.shape[0]:
        raise ValueError(
            f"these Splits were made for {splits.rows} rows, but x has {x_TK.shape[0]}. "
            "Pass Splits.make(sizes, rows=...) for this x."
        )


def check_form(form: Float8Format) -> None:
    """Raise TypeError unless `form` is a Float8Format (a Format, which is a pair of them, is not)."""
    if not isinstance(form, Float8Format):
        raise TypeError(f"form is {form!r}, but must be a Float8Format. Pass E4M3 or E5M2.")
