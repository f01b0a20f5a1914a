"""count_casts: how much the casts of a run lose, by operation and role. For debugging: each cast is looked at again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipes.recipe import Role
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.scaled_codes import ScaledCodes
from recipes.tensors.splits import Splits


@dataclass(frozen=True)
class CastCounts:
    """What the casts of one operation in one role met.

    elements:   how many numbers were cast; rows that belong to no group do not count
    saturated:  too large for the format under their scale, so that they became its largest number; also Inf
    flushed:    not zero, but zero after the cast
    non_finite: Inf or NaN before the cast
    """

    elements: int
    saturated: int
    flushed: int
    non_finite: int


class CountedCasts:
    """The counts of what ran inside of one `count_casts`. Reading them waits for the device."""

    def __init__(self, model: nn.Module | None) -> None:
        self._names = {} if model is None else {id(module): name for name, module in model.named_modules()}
        self._sums: dict[str, Tensor] = {}

    @property
    def counts(self) -> dict[str, CastCounts]:
        """By "operation.role", in the order of the first casts."""
        return {name: CastCounts(*sums.tolist()) for name, sums in self._sums.items()}

    def report(self) -> str:
        """A line for each operation and role, the shares in percent."""
        lines = [f"{'cast':<40} {'elements':>12} {'saturated':>10} {'flushed':>10} {'non-finite':>10}"]
        for name, counts in self.counts.items():
            shares = [100 * part / max(counts.elements, 1) for part in (counts.saturated, counts.flushed)]
            lines.append(
                f"{name:<40} {counts.elements:>12} {shares[0]:>9.4f}% {shares[1]:>9.4f}% {counts.non_finite:>10}"
            )
        return "\n".join(lines)

    def watch(self, quantizer: Quantizer, operation: nn.Module, role: Role) -> Quantizer:
        """The same quantizer, with its casts counted."""
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

    model: gives the operations their names; without it they are called by class, in the order of their first casts.
    A tensor of which both copies are made is counted once, by its rowwise copy. A copy that is transformed (NVFP4's
    Hadamard transform) has only its non-finite values counted. A cast inside of a fused element-wise chain is not seen.
    Weights are cast, and counted, in each call: what was kept of them is not used. Raises TypeError for another model.
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
    """Whether a `count_casts` is open."""
    return bool(_active)


def watched(quantizer: Quantizer, operation: nn.Module, role: Role) -> Quantizer:
    """The quantizer itself, or inside of `count_casts` one that counts."""
    return _active[-1].watch(quantizer, operation, role) if _active else quantizer


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
    # A code that is the largest and lies more than the rounding to it could have moved it below x.
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
    note: Callable[[Tensor, Any], None]

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]
        return self.inner.keeps_state

    def knows_groups(self) -> bool:
        return self.inner.knows_groups()

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

    def snapshot(self, device: torch.device) -> Tensor | None:
        return self.inner.snapshot(device)

    def note_cast_with(self, snapshot: Tensor | None) -> None:
        self.inner.note_cast_with(snapshot)
