"""Quantizer: how one tensor becomes codes and scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from recipes.arguments import as_number
from recipes.pending import PendingUpdates
from recipes.tensors.formats import Float8Format, ScaleLayout, ScaleSpec
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.splits import Splits

# name -> (shape, initial value) of the float32 tensors that a quantizer keeps from step to step
StateShapes = Mapping[str, tuple[tuple[int, ...], float]]

_CASTABLE = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
_LARGEST_EPSILON = torch.finfo(torch.float32).max


class StateOfRole(Protocol):
    """Where the state of one operation's quantizer for one role is kept."""

    @property
    def role(self) -> str: ...

    def tensors(self, quantizer: Quantizer, device: torch.device | None) -> Mapping[str, Tensor]:
        """The tensors that `quantizer.state_shapes` asks for, made on `device` if they are not there yet."""
        ...


class QuantizedBuffers(NamedTuple):
    """Both copies of a tensor, uninitialised.

    scale: [1] float32 to cast with; None if each block's own is found on the way
    amax:  [1] float32 that max |x| is to raise; None if nothing is recorded
    """

    copies: QuantizedTensor
    scale: Tensor | None = None
    amax: Tensor | None = None


class Quantizer(ABC):
    """Base of all quantizers. Subclasses are frozen dataclasses, equal by value.

    Inputs are bf16, fp16, fp32 or fp64; what is quantized is their value in float32 (fp64 is rounded to it first).
    Each copy that is asked for is cast from this input, never from the other copy. Not differentiable.

    The built-in ones raise TypeError for an x of another kind and ValueError for one without the dimensions that are
    needed, for rows that the splits were not made for, and where no copy is asked for.

    Only `quantize` must be there. A quantizer with that alone runs on the split path.

    keeps_state: whether casts depend on earlier ones, through the tensors that `state_shapes` names. They are kept on
    the operation that quantizes, as buffers.
    """

    keeps_state: ClassVar[bool] = False

    @abstractmethod
    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        """Quantize one tensor [..., K]; its rows are all axes but the last.

        There may be no rows where x itself has none. A quantizer that has this method alone gets no group without rows:
        the split path leaves those out.
        """

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

    @property
    def kernel_spec(self) -> ScaleSpec | None:
        """The format to which a kernel may quantize, tile by tile, what it has just computed, if it knows that format;
        None if all must be seen first."""
        return None

    def empty_like_quantized(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> QuantizedBuffers:
        """For such a kernel, where both copies of a tensor [..., K] that is not empty go."""
        raise NotImplementedError(f"{type(self).__name__} casts by its own kernels only: kernel_spec is None.")

    def state_shapes(self, num_scales: int) -> StateShapes:
        """What is kept for `num_scales` tensors that have a scale each, one for each group of a grouped operation."""
        return {}

    def bound(self, source: StateOfRole, updates: PendingUpdates | None, scale: Tensor | None) -> Quantizer:
        """This quantizer over an operation's state.

        updates: takes note of states that change at the end of the step; None: nothing is recorded.
        scale: a `snapshot` to cast with in place of the state's scales.
        """
        return self

    def seeded(self, device: torch.device) -> Quantizer:
        """This quantizer with the random numbers of one cast drawn, so that the groups of one buffer share them."""
        return self

    def for_group(self, group: int) -> Quantizer:
        """This quantizer for one group's tensor alone."""
        return self

    def snapshot(self, device: torch.device) -> Tensor | None:
        """What of the state a later cast must have to give the codes of this step; None without a state."""
        return None

    def note_cast_with(self, snapshot: Tensor | None) -> None:  # noqa: B027
        """Codes that were cast with this `snapshot` are used again: a recomputation is to cast with it, too."""

    @property
    def columnwise_transform(self) -> str | None:
        """The orthogonal transform of the rows that columnwise copies are in; only two of one kind cancel."""
        return None

    @property
    def copies_agree(self) -> bool:
        """Whether both copies hold the same values, and no product takes their codes as they are: one then serves both
        ways."""
        return False

    def of_copy(self, columnwise: bool) -> Quantizer | None:
        """The quantizer that makes this copy; None leaves it in high precision."""
        return self

    def float8_scaling(self, columnwise: bool) -> ScaleLayout | None:
        """How this copy's codes are scaled that a GPU with float8 products multiplies; None: its values are."""
        return None

    def knows_groups(self) -> bool:
        """Whether stacked weights and grouped rows can be quantized at once, as the grouped path needs it."""
        kind = type(self)
        return (
            kind.quantize_stacked is not Quantizer.quantize_stacked
            and kind.quantize_grouped is not Quantizer.quantize_grouped
        )


def check_tensor(x: Tensor, rowwise: bool, columnwise: bool) -> None:
    """What every `quantize` of this folder lets in: a tensor [..., K] of real numbers, and one copy or both."""
    if not isinstance(x, Tensor):
        raise TypeError(f"what is to be quantized is of type {type(x).__name__}. Pass a tensor.")
    if x.dtype not in _CASTABLE:
        raise TypeError(
            f"what is to be quantized is {x.dtype}, but must be bfloat16, float16, float32 or float64. Convert it."
        )
    if not x.dim():
        raise ValueError("what is to be quantized has no dimensions, but must be [..., K]. Pass x.view(1).")
    if not (rowwise or columnwise):
        raise ValueError("rowwise and columnwise are both False, so nothing would be made. Ask for one copy at least.")


def check_stacked(w_GNK: Tensor, rowwise: bool, columnwise: bool) -> None:
    """The same of `quantize_stacked`: weights [G, N, K]."""
    check_tensor(w_GNK, rowwise, columnwise)
    if w_GNK.dim() != 3:
        raise ValueError(f"stacked weights have shape {list(w_GNK.shape)}, but must be [G, N, K]. Stack them.")


def check_grouped(x_TK: Tensor, splits: Splits, rowwise: bool, columnwise: bool) -> None:
    """The same of `quantize_grouped`: rows [T, K], and splits that were made for as many."""
    check_tensor(x_TK, rowwise, columnwise)
    if not isinstance(splits, Splits):
        raise TypeError(
            f"splits is of type {type(splits).__name__}. Pass Splits.make(sizes, rows=len(x), device=x.device)."
        )
    if x_TK.dim() != 2:
        raise ValueError(
            f"grouped rows have shape {list(x_TK.shape)}, but must be [rows, K]. Flatten the leading ones."
        )
    if splits.rows != x_TK.shape[0]:
        raise ValueError(
            f"these Splits were made for {splits.rows} rows, but x has {x_TK.shape[0]}. "
            "Pass Splits.make(sizes, rows=...) for this x."
        )


def check_form(form: Float8Format) -> None:
    """Raise TypeError for what is no element format, such as a Format, which is a pair of them."""
    if not isinstance(form, Float8Format):
        raise TypeError(f"form is {form!r}, but must be a Float8Format. Pass E4M3 or E5M2.")


def check_amax_epsilon(epsilon: float) -> None:
    """Raise TypeError for what is no number, ValueError for what cannot be the least amax."""
    if not 0 <= as_number("amax_epsilon", epsilon) <= _LARGEST_EPSILON:
        raise ValueError(
            f"amax_epsilon is {epsilon!r}, but cannot be negative, NaN or more than float32 holds. Pass 0 for none."
        )
