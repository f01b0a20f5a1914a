"""Where grouped products run: on one buffer with sizes on the device, or group by group with sizes on the host.

capability: that of the GPU for which the plan was made, None of a CPU: it decides, with how codes are scaled, whether
they are multiplied as they are (`recipes.native_products`).

Both paths have the same verbs, so `GroupedLinear` and the fused grouped MLP are written once over them:

    operand(x, splits, quantizer, ...)   x, dy: quantized where the recipe says so
    weight(w, quantizer, ...)            the weights of all groups
    fprop  y_g  = x_g  w_g^T + b_g       (TN)
    dgrad  dx_g = dy_g w_g               (NN)
    wgrad  dw_g = dy_g^T x_g             (NT)

`GroupedPath` never reads the device from the host, so a CUDA graph of it can be replayed with other split sizes.
`SplitPath` reads the split sizes and loops over the groups that have rows. It is for quantizers that take single
tensors only, for dtypes without a grouped kernel, and as the independent check of the other path.
"""
# T rows, G groups, K in features, N out features

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ops.kernels.elementwise.activation import Activation, activation_cast
from ops.kernels.elementwise.chain import Step
from ops.kernels.elementwise.chain_cast import cast_kind, why_no_cast
from ops.kernels.elementwise.dactivation_cast import casts_alone, fits_gluon
from ops.kernels.grouped_gemm.bias_grad import grouped_bias_grad
from ops.kernels.grouped_gemm.float8_activation import grouped_gemm_activation_cast
from ops.kernels.grouped_gemm.grouped_activation import grouped_activation, grouped_gemm_activation
from ops.kernels.grouped_gemm.grouped_gemm import Operands, k_grouped, m_grouped, without_row_factors
from ops.kernels.grouped_gemm.operands import accumulator_like
from ops.kernels.grouped_gemm.tile_rules_float8 import nt_reads_rows
from ops.kernels.routing.permute import gather
from ops.products.product import (
    Matrix,
    float8_operands,
    for_wgrad,
    gemm,
    gemm_dtype,
    operands,
    quantized,
    wgrad,
    why_not_reused,
    with_missing,
)
from ops.runner.context import at_tensor
from ops.runner.in_place import writable
from recipes.casts.cast import casts_to_values
from recipes.casts.cast_float8 import finds_amaxes
from recipes.native_products import LAYOUTS, Capability, GemmLayout, Product, compute_capability, why_not_native
from recipes.recipe import HighPrecision, Recipe, Role
from recipes.request import PlanRequest
from recipes.tensors.gathered_rows import GatheredRows
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_handle import Quantized
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import QuantizedBuffers, Quantizer
from recipes.tensors.spec_quantizer import SpecQuantizer
from recipes.tensors.splits import Splits


class SplitTensors(NamedTuple):
    """One tensor a group, each quantized by itself where the recipe says so. `rows` counts the tail too."""

    members: tuple[Any, ...]  # Tensor (perhaps of a group without rows) | QuantizedTensor; None in an empty template
    sizes: tuple[int, ...]
    rows: int

    def tensors(self) -> list[Tensor | None]:
        return [tensor for member in self.members for tensor in _tensors(member)]

    def rebuild(self, tensors: Sequence[Tensor | None]) -> SplitTensors:
        remaining = iter(tensors)
        members = []
        for member in self.members:
            mine = [next(remaining) for _ in _tensors(member)]
            members.append(member.rebuild(mine) if isinstance(member, QuantizedTensor) else mine[0])
        return self._replace(members=tuple(members))


def _tensors(member: Tensor | QuantizedTensor | None) -> Sequence[Tensor | None]:
    return member.tensors() if isinstance(member, QuantizedTensor) else (member,)


class GroupedPath:
    """One buffer for all groups; split sizes and offsets stay on the device. No host synchronisation."""

    name = "grouped"

    def __init__(self, recipe: Recipe | None = None, *, capability: Capability | None) -> None:
        self.recipe = recipe or HighPrecision()
        self.capability = capability

    def quantize(
        self,
        x: Tensor | Quantized | GatheredRows,
        splits: Splits,
        quantizer: Quantizer | None,
        *,
        rowwise: bool,
        columnwise: bool,
        saved: bool = False,
    ) -> GroupedTensor:
        """x [T, K] as an operand: rowwise for fprop and dgrad, columnwise for wgrad (dy rowwise: `wgrad_reads_rows`). A
        quantized x is taken as `ops.products.product.quantized` does, gathered rows are copied unless the quantizer
        reads them where they lie.

        saved: the columnwise copy is kept for backward, as codes. Other copies of codes that no product multiplies are
        made as their values, where the cast can write these.
        """
        if isinstance(x, GatheredRows) and quantizer is not None and quantizer.gathers:
            return self._cast(x, splits, quantizer, rowwise=rowwise, columnwise=columnwise, saved=saved)
        if not isinstance(x, Tensor):
            if quantizer is not None and isinstance(x, GroupedTensor):
                needed = {"rowwise": rowwise, "columnwise": columnwise}
                if why_not_reused(x, quantizer, **needed, splits=splits) is None:
                    return _completed(x, quantizer, **needed)
            x = gather(x) if isinstance(x, GatheredRows) else x.dequantize()
        if quantizer is None:
            return GroupedTensor(x, splits, None, None, x.dtype)
        return self._cast(x, splits, quantizer, rowwise=rowwise, columnwise=columnwise, saved=saved)

    def _cast(self, x: Any, splits: Splits, quantizer: Quantizer, *, saved: bool, **copies: bool) -> GroupedTensor:
        made: GroupedTensor | None = None
        if x.device.type == "cuda" and x.dtype != torch.float64 and (copies["rowwise"] or not saved):
            dtype = gemm_dtype(x.dtype, x.device)
            made = quantizer.dequantized_rows(x, splits, dtype, **copies, column_codes=saved)
        return quantizer.quantize_grouped(x, splits, **copies) if made is None else made

    def quantized_buffers(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        splits: Splits,
        quantizer: Quantizer | None,
        *,
        rowwise: bool,
        columnwise: bool,
        whole_rows: bool = False,
        runs: int | None = None,
        meetings: Tensor | None = None,
        alone: bool = False,
    ) -> QuantizedBuffers | None:
        """Where the element-wise kernel that computes x [T, K] puts what `quantize` would make of it; None if it is
        quantized from memory.

        whole_rows: whether the kernel may hold whole rows of x, as it does in forward. runs: it computes so many
        columns beside each other; None: all. meetings: as in `SpecQuantizer.empty_grouped`. alone: what
        `casts_in_backward` says
        """
        columns = shape[-1] if whole_rows and not columnwise else None
        if not math.prod(shape):
            return None
        if not alone and not casts_as_computed(quantizer, splits.device, dtype, columns, runs):
            return None
        assert isinstance(quantizer, SpecQuantizer), "of others nothing is known"
        about: dict[str, Any] = {} if meetings is None else {"meetings": meetings}
        if casts_to_values(quantizer.spec):
            about["values"] = gemm_dtype(dtype, splits.device)
        return quantizer.empty_grouped(shape, dtype, splits, rowwise=rowwise, columnwise=columnwise, **about)

    def weight(
        self,
        w: Tensor | Sequence[Tensor],
        quantizer: Quantizer | None,
        *,
        rowwise: bool,
        columnwise: bool,
        once: bool = False,
    ) -> Tensor | QuantizedTensor:
        """The weights of all groups, [G, N, K] or a sequence of [N, K] (which is copied into one buffer).

        once: they serve one product, and a columnwise copy beside the rowwise one is kept for backward. So copies that
        are not kept are made as values, as `quantize` makes them.
        """
        stacked = w if isinstance(w, Tensor) else torch.stack(tuple(w))
        if quantizer is None:
            return stacked
        copies = {"rowwise": rowwise, "columnwise": columnwise}
        made: QuantizedTensor | None = None
        if once and stacked.is_cuda and stacked.dtype != torch.float64:
            dtype = gemm_dtype(stacked.dtype, stacked.device)
            made = quantizer.dequantized_stacked(stacked, dtype, **copies, column_codes=rowwise)
        return quantizer.quantize_stacked(stacked, **copies) if made is None else made

    def held(self, w: QuantizedTensor | Sequence[QuantizedTensor]) -> QuantizedTensor:
        """As `weight`, of weights that are quantized already; those of groups in one memory are not copied."""
        return w if isinstance(w, QuantizedTensor) else w[0].stacked(w[1:])

    def for_wgrad(self, x: GroupedTensor) -> Tensor | GroupedTensor:
        """What of x has to be kept for wgrad."""
        return for_wgrad(x) if x.data is None else x.data

    def fprop(
        self,
        x: GroupedTensor,
        w: Tensor | QuantizedTensor,
        *,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t] = x[t] w_g^T + scales[t] b_g, [T, N] in x's dtype; rows past the last group are zero."""
        pair, factors = without_row_factors(self._operands("TN", x, w))
        multiply = partial(
            m_grouped, "TN", pair, x.splits, split_accumulation=self.recipe.split_accumulator("fprop"),
            batch_invariant=self.recipe.batch_invariant,
        )  # fmt: skip
        if factors is None:
            return multiply(bias=bias, scales=scales, out=out, out_dtype=x.dtype)
        product = multiply(out_dtype=torch.promote_types(x.dtype, torch.float32))
        return self._finish(writable(product), factors, x, out, bias=bias, scales=scales)

    def fprop_activation(
        self, x: GroupedTensor, w: Tensor, spec: Activation, *, bias: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        """f(x[t] w_g^T + b_g) * scales[t] of x and w that are not quantized, as `grouped_activation` does."""
        assert x.data is not None, "its operands are not quantized"
        return grouped_activation(x.data, w, x.splits, spec, bias_GN=bias, scales_T=scales)

    def fprop_and_activation(
        self, x: GroupedTensor, w: Tensor, spec: Activation, scales: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """h[t] = x[t] w_g^T and f(h[t]) * scales[t], of x and w that are not quantized."""
        assert x.data is not None, "its operands are not quantized"
        return grouped_gemm_activation(x.data, w, x.splits, spec, scales_T=scales)

    def fprop_and_cast(
        self,
        x: GroupedTensor,
        w: QuantizedTensor,
        spec: Activation,
        scales: Tensor | None,
        into: QuantizedBuffers,
        *,
        stores_h: bool,
    ) -> Tensor | None:
        """h[t] = x[t] w_g^T of codes, and f(h[t]) * scales[t] quantized into these buffers, whose scales are given. h
        may be None if it is not to be stored."""
        pair = float8_operands("TN", x, w, self.capability)
        split = self.recipe.split_accumulator("fprop")
        if pair is None or x.dtype != torch.bfloat16:
            h = self.fprop(x, w)
            activation_cast(h, spec, scales, into)
            return h
        return grouped_gemm_activation_cast(
            *pair, x.splits, spec, into, scales_T=scales, stores_h=stores_h, split_accumulation=split
        )

    def _finish(
        self,
        product: Tensor,
        factors: Tensor,
        x: GroupedTensor,
        out: Tensor | None,
        *,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """What follows a product where x or dy has a factor for each row, which the grouped GEMM does not take."""
        product *= factors
        group = x.splits.group_of_row
        if bias is not None:
            rows = accumulator_like(bias).index_select(0, group.clamp(max=x.splits.num_groups - 1))
            product += rows if scales is None else rows * scales[:, None]
        product.masked_fill_((group == x.splits.num_groups)[:, None], 0)
        return product.to(x.dtype) if out is None else out.copy_(product)

    def dgrad(self, dy: GroupedTensor, w: Tensor | QuantizedTensor, *, out: Tensor | None = None) -> Tensor:
        """dx[t] = dy[t] w_g, [T, K] in dy's dtype; rows past the last group are zero."""
        pair, factors = without_row_factors(self._operands("NN", dy, w))
        multiply = partial(m_grouped, "NN", pair, dy.splits, split_accumulation=self.recipe.split_accumulator("dgrad"))
        if factors is None:
            return multiply(out=out, out_dtype=dy.dtype)
        product = multiply(out_dtype=torch.promote_types(dy.dtype, torch.float32))
        return self._finish(writable(product), factors, dy, out)

    def wgrad_reads_rows(self, dy: Any, splits: Splits, shape: tuple[int, int]) -> bool:
        """Whether wgrad multiplies the rowwise copy of dy, and no columnwise one is made. shape: of a weight, [N, K]"""
        if self.capability is None or not self._splits_sums_of_codes_per_tensor:
            return False
        if isinstance(dy, GroupedTensor) and (dy.rowwise is None or dy.columnwise is not None):
            return False
        if why_not_native("NT", "tensor", "tensor", dy.dtype, self.capability) is not None:
            return False
        return nt_reads_rows(splits.rows, splits.num_groups, *shape, self.capability)

    @cached_property
    def _splits_sums_of_codes_per_tensor(self) -> bool:
        """Whether wgrad multiplies codes with one scale a tensor, as the spec casts them, in split accumulation."""
        quantizers = [self.recipe.quantizer(role) for role in (Role.GRAD_OUTPUT, Role.INPUT)]
        return self.recipe.split_accumulator("wgrad") and all(
            isinstance(q, SpecQuantizer)
            and q.casts_by_spec()
            and type(q).dequantized_rows is SpecQuantizer.dequantized_rows
            and q.spec.float8_scaling == "tensor"
            for q in quantizers
        )

    def wgrad(
        self,
        dy: GroupedTensor,
        x: Tensor | GroupedTensor,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
        reverse: bool = False,
        spare: int = 0,
    ) -> Tensor:
        """dw_g = dy_g^T x_g, [G, N, K] in dy's dtype, in new memory; or `out` = dw, or `out` += dw. dy: a columnwise
        copy, or in rows, where `wgrad_reads_rows`.

        An empty group's dw is zero. What goes into `out` is summed in float32 and rounded once to out's dtype; reverse:
        the last group comes first there. spare: as `grouped_gemm_nt`
        """
        return k_grouped(
            self._operands("NT", dy, x), dy.splits, out=out, out_dtype=dy.dtype,
            split_accumulation=self.recipe.split_accumulator("wgrad"), accumulate=accumulate, reverse=reverse,
            spare=spare,
        )  # fmt: skip

    def _operands(self, layout: GemmLayout, a: GroupedTensor, b: Matrix) -> Operands:
        """What is multiplied: codes where the GPU takes them, else values."""
        return float8_operands(layout, a, b, self.capability) or operands(layout, a, b, a.dtype)

    def bias_grad(self, dy: Any, splits: Splits, scales: Tensor | None = None) -> Tensor:
        """db_g = sum over the group's rows of scales[t] dy[t], [G, N], accumulated in float32 in a fixed order."""
        rows = dy if isinstance(dy, GatheredRows) else at_tensor(dy)
        return grouped_bias_grad(rows, splits, scales_T=scales)


class SplitPath:
    """Group by group, with the split sizes read on the host: not for CUDA graphs, meant for correctness, not speed."""

    name = "split"

    def __init__(self, recipe: Recipe | None = None, *, capability: Capability | None) -> None:
        self.recipe = recipe or HighPrecision()
        self.capability = capability

    def quantize(
        self,
        x: Tensor | Quantized | GatheredRows,
        splits: Splits,
        quantizer: Quantizer | None,
        *,
        rowwise: bool,
        columnwise: bool,
        saved: bool = False,
    ) -> SplitTensors:
        """As `GroupedPath.quantize`, each group alone."""
        sizes = tuple(splits.tolist())
        if not isinstance(x, Tensor):
            if quantizer is not None and isinstance(x, GroupedTensor):
                needed = {"rowwise": rowwise, "columnwise": columnwise}
                if why_not_reused(x, quantizer, **needed, splits=splits) is None:
                    return SplitTensors(tuple(_members(x.unbind(), quantizer, **needed)), sizes, x.shape[0])
            x = x.dequantize()
        parts = x[: sum(sizes)].split(sizes)
        members = _members(parts, quantizer, rowwise, columnwise)
        return SplitTensors(tuple(members), sizes, x.shape[0])

    def quantized_buffers(self, *_: Any, **__: Any) -> None:
        """As `GroupedPath.quantized_buffers`: each group is quantized from memory."""

    def weight(
        self,
        w: Tensor | Sequence[Tensor],
        quantizer: Quantizer | None,
        *,
        rowwise: bool,
        columnwise: bool,
        once: bool = False,
    ) -> list[Tensor | QuantizedTensor]:
        """As `GroupedPath.weight`, each group alone."""
        members = w.unbind() if isinstance(w, Tensor) else w
        return _members(members, quantizer, rowwise, columnwise)

    def held(self, w: QuantizedTensor | Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
        """As `GroupedPath.held`, each group alone."""
        return w.unbind() if isinstance(w, QuantizedTensor) else list(w)

    def for_wgrad(self, x: SplitTensors) -> SplitTensors:
        """As `GroupedPath.for_wgrad`."""
        return x._replace(members=tuple(for_wgrad(member) for member in x.members))

    def fprop(
        self,
        x: SplitTensors,
        w: Sequence[Tensor | QuantizedTensor],
        *,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As `GroupedPath.fprop`."""
        out = _allocate(out, x, w[0].shape[0], w[0])
        begin = 0
        for group, size in enumerate(x.sizes):
            if not size:
                continue
            rows = slice(begin, begin + size)
            added = None
            if bias is not None:
                added = bias[group] if scales is None else accumulator_like(scales[rows, None]) * bias[group]
            out[rows] = self._gemm("fprop", x.members[group], w[group], out.dtype, added)
            begin += size
        out[begin:] = 0
        return out

    def dgrad(self, dy: SplitTensors, w: Sequence[Tensor | QuantizedTensor], *, out: Tensor | None = None) -> Tensor:
        """As `GroupedPath.dgrad`."""
        out = _allocate(out, dy, w[0].shape[1], w[0])
        begin = 0
        for member, weight, size in zip(dy.members, w, dy.sizes, strict=True):
            if size:
                out[begin : begin + size] = self._gemm("dgrad", member, weight, out.dtype)
                begin += size
        out[begin:] = 0
        return out

    def wgrad_reads_rows(self, *_: Any) -> bool:
        """As `GroupedPath.wgrad_reads_rows`: columnwise copies are multiplied."""
        return False

    def wgrad(
        self,
        dy: SplitTensors,
        x: SplitTensors,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
        reverse: bool = False,
        spare: int = 0,
    ) -> Tensor:
        """As `GroupedPath.wgrad`, which leaves no multiprocessors."""
        first_dy, first_x = dy.members[0], x.members[0]
        dtype = first_dy.dtype
        product = partial(
            wgrad, capability=self.capability, split_accumulator=self.recipe.split_accumulator("wgrad")
        )  # fmt: skip
        dw = out
        if dw is None:
            shape = len(dy.sizes), first_dy.shape[1], first_x.shape[1]
            dw = torch.empty(shape, dtype=dtype, device=first_dy.device)
        for group, size in enumerate(dy.sizes):
            members, place = (dy.members[group], x.members[group]), dw[-1 - group if reverse else group]
            if size and out is None:
                place.copy_(product(*members, dtype))
            elif size:
                product(*members, dtype, out=place, accumulate=accumulate)
            elif not accumulate:
                place.zero_()
        return dw

    def bias_grad(self, dy: Any, splits: Splits, scales: Tensor | None = None) -> Tensor:
        """As `GroupedPath.bias_grad`."""
        dy = at_tensor(dy)
        rows = accumulator_like(dy) if scales is None else accumulator_like(dy) * scales[:, None]
        sizes = splits.tolist()
        return torch.stack([part.sum(0) for part in rows[: sum(sizes)].split(sizes)]).to(dy.dtype)

    def _gemm(self, product: Product, a: Any, b: Any, out_dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
        split = self.recipe.split_accumulator(product)
        return gemm(
            LAYOUTS[product], a, b, out_dtype, capability=self.capability, added=added, split_accumulator=split,
            batch_invariant=product == "fprop" and self.recipe.batch_invariant,
        )  # fmt: skip


Path = GroupedPath | SplitPath
_PATHS: dict[str, type[Path]] = {GroupedPath.name: GroupedPath, SplitPath.name: SplitPath}


def choose_path(request: PlanRequest) -> Path:
    """The path that the request names, else the grouped one unless the recipe says why not.

    Raises ValueError if the request names the grouped path and the recipe refuses it, or for an unknown name.
    """
    asked = request.path
    if asked is not None and asked not in _PATHS:
        raise ValueError(
            f"path={asked!r} does not exist. Paths: {', '.join(map(repr, _PATHS))}, or None to let the recipe decide."
        )
    refusal = request.recipe.why_not_grouped(request)
    if asked == "grouped" and refusal is not None:
        raise ValueError(f"path='grouped' cannot be taken: {refusal} Leave path unset, or ask for path='split'.")
    kind = _PATHS[asked or ("grouped" if refusal is None else "split")]
    return kind(request.recipe, capability=compute_capability(request.device))


def casts_as_computed(
    quantizer: Quantizer | None,
    device: torch.device,
    dtype: torch.dtype,
    columns: int | None = None,
    runs: int | None = None,
) -> TypeGuard[SpecQuantizer]:
    """Whether the element-wise kernel that computes grouped rows quantizes them, or finds their amaxes, too: not on a
    CPU or in float64, and only to formats that it supports. columns: of rows whose rowwise copy alone is made; runs: as
    of `why_no_cast`."""
    if device.type != "cuda" or dtype == torch.float64 or not isinstance(quantizer, SpecQuantizer):
        return False
    return quantizer.casts_by_spec() and why_no_cast(quantizer.spec, grouped=True, columns=columns, runs=runs) is None


def casts_with_given_scales(quantizer: Quantizer) -> bool:
    """Whether rows in groups are cast to FP8 with one scale each, which is known before."""
    if not (isinstance(quantizer, SpecQuantizer) and quantizer.casts_by_spec()):
        return False
    return cast_kind(quantizer.spec) == "given"


def casts_in_backward(
    step: Step, dtype: torch.dtype, columns: int, device: torch.device, *quantizers: Quantizer | None
) -> bool:
    """Whether the kernel that computes an activation's backward, act of so many columns, quantizes dh and act by these,
    as no element-wise kernel does: `casts_alone`."""
    specs = [q.spec for q in quantizers if isinstance(q, SpecQuantizer) and q.casts_by_spec()]
    if len(specs) < len(quantizers) or not casts_alone(columns, specs):
        return False
    return fits_gluon(dtype, columns, step, device)


def how_cast_as_computed(
    quantizer: Quantizer | None,
    device: torch.device,
    dtype: torch.dtype,
    columns: int | None = None,
    runs: int | None = None,
    alone: bool = False,
) -> str | None:
    """What such a kernel does for the cast, in words; None for nothing. alone: what `casts_in_backward` says."""
    if alone:
        return "quantized as it is computed"
    if not casts_as_computed(quantizer, device, dtype, columns, runs):
        return None
    of_large_groups = " (of large groups amaxes are found)" if finds_amaxes(quantizer.spec) else ""
    return f"quantized as it is computed{of_large_groups}"


def _completed(x: GroupedTensor, quantizer: Quantizer, *, rowwise: bool, columnwise: bool) -> GroupedTensor:
    missing = {"rowwise": rowwise and x.rowwise is None, "columnwise": columnwise and x.columnwise is None}
    if not any(missing.values()):
        return x
    completed: GroupedTensor = with_missing(x, quantizer.quantize_grouped(x.dequantize(), x.splits, **missing))
    return completed


def _members(
    parts: Sequence[Tensor | QuantizedTensor], quantizer: Quantizer | None, rowwise: bool, columnwise: bool
) -> list[Any]:
    """Each group's tensor, quantized by itself where the recipe says so.

    A quantizer of single tensors gets none without rows, of which it may find no maximum.
    """
    takes_empty = quantizer is None or quantizer.knows_groups()
    if quantizer is not None and parts:
        quantizer = quantizer.seeded(parts[0].device)
    return [
        quantized(part, quantizer and quantizer.for_group(group), rowwise=rowwise, columnwise=columnwise)
        if takes_empty or part.shape[0]
        else part
        for group, part in enumerate(parts)
    ]


def _allocate(out: Tensor | None, x: SplitTensors, features: int, like: Tensor | QuantizedTensor) -> Tensor:
    if out is not None:
        return out
    return torch.empty(x.rows, features, dtype=like.dtype, device=like.device)
