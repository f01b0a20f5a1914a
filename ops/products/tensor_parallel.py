"""Tensor and sequence parallelism of a layer with weights: which share a rank has, and what the ranks exchange.

y = x W^T + b, for W [N, K], over n ranks. Rank r has W_r and computes, with x and y as it has them:

    tensor_    sequence_
    parallel   parallel   W_r        before fprop    behind fprop        before backward    behind dgrad

    "column"   False      [N/n, K]                                                          all_reduce dx
    "column"   True       [N/n, K]   all_gather x                                           reduce_scatter dx
    "row"      False      [N, K/n]                   all_reduce y
    "row"      True       [N, K/n]                   reduce_scatter y    all_gather dy

With sequence_parallel, x of a column-parallel layer and y of a row-parallel one are a rank's share of the rows, the
first dimension. b is divided as N is: a column-parallel layer adds b_r, a row-parallel one the whole b once, `Linear`
behind the reduction, `GroupedLinear` in the product of the group's first rank.

x of a column-parallel layer is gathered once more in backward, for wgrad, where the layer keeps its own rows alone.

The collectives transfer high-precision tensors in the computing dtype. What is gathered is quantized behind the
gathering, so a scale of the whole tensor is that of the rows of all ranks, as TransformerEngine's, which reduces the
amaxes. A scale of a weight, of the x of a row-parallel layer or the dy of a column-parallel one is that of the rank's
own features; no amax is reduced, but by `DelayedScaling(reduce_amax=True)`.
"""
# n ranks, K in features, N out features

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.kernels.collectives import RankGroup, Ranks, all_gather, all_reduce, check_alike, reduce_scatter
from ops.runner.context import OperationContext
from ops.runner.in_place import writable
from recipes.arguments import check_flags

Collective = Callable[[Tensor, RankGroup], Tensor]


class Exchange(NamedTuple):
    """What is done with x before fprop, y behind it, dy before backward, dx behind dgrad; None: nothing."""

    x: Collective | None = None
    y: Collective | None = None
    dy: Collective | None = None
    dx: Collective | None = None


def _all_reduce(product: Tensor, group: RankGroup) -> Tensor:
    return all_reduce(writable(product), group, in_place=True)


_NAMES = {all_gather: "all_gather", reduce_scatter: "reduce_scatter", _all_reduce: "all_reduce"}
_EXCHANGES = {
    ("column", False): Exchange(dx=_all_reduce),
    ("column", True): Exchange(x=all_gather, dx=reduce_scatter),
    ("row", False): Exchange(y=_all_reduce),
    ("row", True): Exchange(y=reduce_scatter, dy=all_gather),
}


class TensorParallel:
    """How a layer is divided among the ranks of a group.

    mode: "column" divides out_features, "row" in_features
    gated: out_features are the halves [gate | linear part], each of which is divided
    in_features, out_features: of a rank's share
    """

    def __init__(
        self, mode: str, group: RankGroup, sequence_parallel: bool, gated: bool, in_features: int, out_features: int
    ) -> None:
        self.mode, self.group, self.sequence_parallel, self.gated = mode, group, sequence_parallel, gated
        self.exchange = _EXCHANGES[mode, sequence_parallel]
        n = group.size
        self.in_features = in_features // n if self.is_row else in_features
        self.out_features = out_features if self.is_row else out_features // n

    @classmethod
    def of(
        cls,
        mode: str | None,
        group: Ranks | None,
        *,
        in_features: int,
        out_features: int,
        gated: bool = False,
        sequence_parallel: bool = False,
    ) -> TensorParallel | None:
        """That of a layer's arguments, checked; None where they divide nothing.

        Raises ValueError for a mode that does not exist, a mode without a group and the reverse, a size that the ranks
        do not divide; TypeError for flags that are no bools.
        """
        check_flags(sequence_parallel=sequence_parallel, gated=gated)
        if mode is None:
            given = {"group": group is not None, "sequence_parallel": sequence_parallel, "gated": gated}
            for name in (name for name, is_given in given.items() if is_given):
                raise ValueError(
                    f"{name} is given without tensor_parallel, so nothing is divided. Give tensor_parallel='column' or "
                    f"'row' too, or leave {name} out."
                )
            return None
        if mode not in ("column", "row"):
            raise ValueError(f"tensor_parallel is {mode!r}, but must be 'column', 'row' or None.")
        if group is None:
            raise ValueError(
                f"tensor_parallel={mode!r} needs the group of ranks that divide the layer. Give group=..., a "
                "ProcessGroup or one dimension of a DeviceMesh."
            )
        if gated and mode == "row":
            raise ValueError(
                "gated=True is about the halves of out_features, which a row-parallel layer does not divide. Leave it "
                "out, or give tensor_parallel='column'."
            )
        ranks = RankGroup(group)
        name, size = ("in_features", in_features) if mode == "row" else ("out_features", out_features)
        parts = 2 * ranks.size if gated else ranks.size
        if size % parts:
            halves = ", each of which has a share of both halves" if gated else ""
            raise ValueError(
                f"{name} is {size}, but must be a multiple of {parts} for the {ranks.size} ranks of group{halves}. It "
                "is the size of the undivided layer."
            )
        return cls(mode, ranks, sequence_parallel, gated, in_features, out_features)

    @property
    def is_row(self) -> bool:
        """Whether in_features is divided, instead of out_features."""
        return self.mode == "row"

    @property
    def divides_output(self) -> RankGroup | None:
        """The group, if each rank has some of the features of y."""
        return None if self.is_row else self.group

    def share(self, whole: Tensor, *, is_bias: bool = False) -> Tensor:
        """This rank's share of a whole weight [..., N, K] or bias [..., N].

        Rank r of n has the indices [r s, (r + 1) s) of the n s of the divided dimension, with `gated` those of each
        half; of the bias of a row-parallel layer all.
        """
        n, rank = self.group.size, self.group.rank
        dim = self.divided_dim(is_bias=is_bias)
        if dim is None:
            return whole
        if self.gated:
            return torch.cat([half.chunk(n, dim)[rank] for half in whole.chunk(2, dim)], dim)
        return whole.chunk(n, dim)[rank]

    def whole(self, shares: Sequence[Tensor], *, is_bias: bool = False) -> Tensor:
        """The whole weight or bias of which the ranks have these shares, in rank order."""
        dim = self.divided_dim(is_bias=is_bias)
        if dim is None:
            return shares[0]
        if self.gated:
            gates, linear_parts = zip(*(each.chunk(2, dim) for each in shares), strict=True)
            return torch.cat([*gates, *linear_parts], dim)
        return torch.cat([*shares], dim)

    def divided_dim(self, *, is_bias: bool = False) -> int | None:
        """The dimension of a weight or bias, counted from the last one, that the ranks divide."""
        if self.is_row:
            return None if is_bias else -1
        return -1 if is_bias else -2

    def check(self, ctx: OperationContext, x: Any, why: str | None) -> None:
        """Raise before anything is exchanged, see `check_alike`; ValueError for rows that the ranks do not divide.

        why: what else is wrong with x, or None
        """
        if why is None and self.sequence_parallel:
            why = self._why_not_rows(x.shape)

        def describe() -> str:
            needs = ", ".join(["x"] * ctx.needs.input + sorted(ctx.needs.params | ctx.needs.extras)) or "nothing"
            return f"{ctx.operation}: x {list(x.shape)}, computed in {ctx.dtype}, gradients of {needs}"

        check_alike(self.group, x.device, describe, None if why is None else ValueError(why))

    def _why_not_rows(self, shape: torch.Size) -> str | None:
        if len(shape) < 2:
            return f"x has shape {list(shape)}, but sequence_parallel needs rows, too. Give x[None]."
        if self.is_row and shape[0] % self.group.size:
            return (
                f"x has {shape[0]} rows, but the {self.group.size} ranks of the group must divide them, because "
                f"sequence_parallel leaves each rank its share. Pad x to a multiple of {self.group.size} rows."
            )
        return None

    def gather_input(self, x: Tensor) -> Tensor:
        return x if self.exchange.x is None else self.exchange.x(x, self.group)

    def reduce_output(self, y: Tensor, out: Tensor | None = None) -> Tensor:
        return y if self.exchange.y is None else _in_buffer(self.exchange.y(y, self.group), out)

    def gather_grad_output(self, dy: Tensor) -> Tensor:
        return dy if self.exchange.dy is None else self.exchange.dy(dy, self.group)

    def reduce_grad_input(self, dx: Tensor, out: Tensor | None = None) -> Tensor:
        return dx if self.exchange.dx is None else _in_buffer(self.exchange.dx(dx, self.group), out)

    def sum_scale_gradients(self, dscales: Tensor) -> Tensor:
        """Of factors of rows that multiply this rank's features alone."""
        return dscales if self.is_row else all_reduce(dscales, self.group)

    def explain(self, device: torch.device) -> str:
        """What is exchanged, for `Sequential.explain()`."""
        done = [f"{_NAMES[how]} of {what}" for what, how in self.exchange._asdict().items() if how is not None]
        return f"; {self.mode}-parallel: {', '.join(done)}, {self.group.describe(device)}"

    def extra_repr(self) -> str:
        own = f", tensor_parallel={self.mode!r}, group={self.group}"
        own += ", sequence_parallel=True" if self.sequence_parallel else ""
        return own + (", gated=True" if self.gated else "")


def _in_buffer(found: Tensor, out: Tensor | None) -> Tensor:
    """The sum, in the caller's buffer `out` if there is one: it is there already, unless a mode watches."""
    return found if out is None or found is out else out.copy_(found)


def fill(
    parameter: Tensor, initialise: Callable[[Tensor], Any], parallel: TensorParallel | None, *, is_bias: bool = False
) -> None:
    """Set a weight [..., N, K], or a bias [..., N], to its share of a whole one that `initialise` fills.

    So ranks with the same random state have the shares of one layer, which has the bits of the undivided one.
    """
    dim = None if parallel is None else parallel.divided_dim(is_bias=is_bias)
    if parallel is None or dim is None:
        initialise(parameter)
        return
    shape = list(parameter.shape)
    shape[dim] *= parallel.group.size
    whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    initialise(whole)
    with torch.no_grad():
        parameter.copy_(parallel.share(whole, is_bias=is_bias))
