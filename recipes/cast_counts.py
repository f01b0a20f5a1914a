"""count_casts: values lost by the casts of a run, by operation and role. For debugging: every cast is read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipes.recipe import Role
from recipes.tensors.formats import ScaleSpec
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.scaled_codes import ScaledCodes
from recipes.tensors.splits import Splits


@dataclass(frozen=True)
class CastCounts:
    """Counts of the casts of one operation in one role.

    elements:   numbers cast; rows that belong to no group are not counted
    saturated:  too large for the format under their scale, and clamped to its largest number; includes Inf
    flushed:    nonzero before the cast, zero after it
    non_finite: Inf or NaN before the cast
    """

    elements: int
    saturated: int
    flushed: int
    non_finite: int


class CountedCasts:
    """The counts of one `count_casts` context. Reading them synchronizes with the device."""

    def __init__(self, model: nn.Module | None) -> None:
        self._names = {} if model is None else {id(module): name for name, module in model.named_modules()}
        self._sums: dict[str, Tensor] = {}

    @property
    def counts(self) -> dict[str, CastCounts]:
        """Counts by "operation.role", in the order of the first casts."""
        return {name: CastCounts(*sums.tolist()) for name, sums in self._sums.items()}

    def report(self) -> str:
        """A table with a line for each operation and role, in percent."""
        lines = [f"{'cast':<40} {'elements':>12} {'saturated':>10} {'flushed':>10} {'non-finite':>10}"]
        for name, counts in self.counts.items():
            shares = [100 * part / max(counts.elements, 1) for part in (counts.saturated, counts.flushed)]
            lines.append(
                f"{name:<40} {counts.elements:>12} {shares[0]:>9.4f}% {shares[1]:>9.4f}% {counts.non_finite:>10}"
            )
        return "\n".join(lines)

    def watch(self, quantizer: Quantizer, operation: nn.Module, role: Role) -> Quantizer:
        """A wrapper of the quantizer that counts its casts."""
        name = self._names.get(id(operation))
        if name is None:
            kind = type(operation).__name__
            taken = sum(other.startswith(f"{kind}#") for other in self._names.values())
            name = self._names[id(operation)] = f"{kind}#{taken}"
        key = f"{name}.{role.value}"

        def note(x: Tensor, cast: QuantizedTensor | GroupedTensor) -> None:
            sums = _counts(x, cast)
            self._sums[key] = self._sums[key] + sums if key in self._sums else sums

        return _Watched(quantizer, note)


_active: list[CountedCasts] = []


@contextmanager
def count_casts(model: nn.Module | None = None) -> Iterator[CountedCasts]:
    """Count saturated, flushed and non-finite values of every cast inside, by operation and role.

        with count_casts(model) as counted:
            loss = model(x, ...)
            loss.backward()
        print(counted.report())

    model: supplies the names of the operations; without it they are named by class, in the order of their first casts.
    A tensor with both copies is counted once, by its rowwise copy. Of a transformed copy (NVFP4's Hadamard transform)
    only non-finite values are counted. Casts inside of fused element-wise chains are not counted. Weights are quantized
    and counted in each call, not reused. Raises TypeError if `model` is not a Module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}, but must be a torch.nn.Module, or None to count by class.")
    counted = CountedCasts(model)
    _active.append(counted)
    try:
        yield counted
    finally:
        _active.remove(counted)


def is_counting() -> bool:
    """Whether a `count_casts` context is open."""
    return bool(_active)


def watched(quantizer: Quantizer, operation: nn.Module, role: Role) -> Quantizer:
    """The quantizer itself, or inside of `count_casts` a wrapper that counts, for each context that is open."""
    for counted in _active:
        quantizer = counted.watch(quantizer, operation, role)
    return quantizer


def _counts(x: Tensor, cast: QuantizedTensor | GroupedTensor) -> Tensor:
    """[4] int64 on x's device: elements, saturated, flushed, non-finite."""
    splits = cast.splits if isinstance(cast, GroupedTensor) else None
    x = x.detach().to(torch.float32)
    elements = torch.full((), x.numel(), dtype=torch.int64, device=x.device)
    if splits is not None:
        x = x.masked_fill((splits.group_of_row == splits.num_groups)[:, None], 0.0)
        elements = splits.offsets[-1] * x.shape[1]
    non_finite = (~x.isfinite()).sum()
    copy = next((c for c in (cast.rowwise, cast.columnwise) if c is not None and c.transform is None), None)
    if copy is None:
        return torch.stack([elements, elements * 0, elements * 0, non_finite])
    value = copy.dequantize(splits).abs()
    flushed = ((x != 0) & (value == 0)).sum()
    # Saturated: the code is the largest one, and |x| exceeds it by more than rounding can explain.
    at_largest = _largest_alone(copy).dequantize(splits) != 0
    saturated = (at_largest & (x.isinf() | (x.abs() > value * (1 + copy.half_step)))).sum()
    return torch.stack([elements, saturated, flushed, non_finite])


def _largest_alone(copy: ScaledCodes) -> ScaledCodes:
    codes, *others = copy.tensors()
    assert codes is not None, "a template has no casts to count"
    return copy.over([copy.largest_codes(), *others])


@dataclass(frozen=True, eq=False)
class _Watched(Quantizer):
    inner: Quantizer
    note: Callable[[Tensor, QuantizedTensor | GroupedTensor], None]

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]
        return self.inner.keeps_state

    def knows_groups(self) -> bool:
        return self.inner.knows_groups()

    def copy_spec(self, columnwise: bool) -> ScaleSpec | None:
        return self.inner.copy_spec(columnwise)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        cast = self.inner.quantize(x, rowwise=rowwise, columnwise=columnwise)
        self.note(x, cast)
        return cast

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        cast = self.inner.quantize_stacked(w_GNK, rowwise=rowwise, columnwise=columnwise)
        self.note(w_GNK, cast)
        return cast

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        cast = self.inner.quantize_grouped(x_TK, splits, rowwise=rowwise, columnwise=columnwise)
        self.note(x_TK, cast)
        return cast

    def seeded(self, device: torch.device) -> Quantizer:
        return _Watched(self.inner.seeded(device), self.note)

    def for_group(self, group: int) -> Quantizer:
        return _Watched(self.inner.for_group(group), self.note)

    def for_groups(self, groups: range) -> Quantizer:
        return _Watched(self.inner.for_groups(groups), self.note)

    def snapshot(self, device: torch.device) -> Tensor | None:
        return self.inner.snapshot(device)

    def note_codes_of_state(self) -> None:
        self.inner.note_codes_of_state()

    def note_cast_with(self, snapshot: Tensor | None) -> None:
        self.inner.note_cast_with(snapshot)
