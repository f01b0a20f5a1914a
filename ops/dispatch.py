"""Dispatch: copies each token to a row for each of its experts, and orders the rows by expert."""
# T tokens, H features, R rows for the experts of a rank

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.codes_on_wire import SentTokens, check_send_codes, choose_codes, pack, unpack
from ops.kernels.collectives import Ranks
from ops.kernels.norm.norm_triton import runs_in_triton
from ops.kernels.routing.all_to_all import (
    ExpertGroup,
    NeededGradients,
    ShardedRoutingMap,
    announce_refusal,
    make_sharded_routing_map,
)
from ops.kernels.routing.permute import RoutingMap, combine, combine_and_return_scales, dispatch, route_scales
from ops.kernels.routing.symmetric import MULTIPROCESSORS, SymmetricRoutingMap, send
from ops.kernels.routing.symmetric_buffers import BYTES_BESIDE_ROW, bytes_held
from ops.kernels.routing.symmetric_memory import why_not_symmetric
from ops.kernels.routing.transports import PARTIAL_SUMS, WHY_IN_FULL, check_partial_sums, check_transport
from ops.runner.named_extras import NamedExtras
from ops.runner.operation import BackwardOfBasic, BasicOperation, IndexTensor, LentMemory, OperationContext
from ops.runner.set_once import SetOnce
from recipes.arguments import check_factors, check_flags, positive_integers
from recipes.recipe import Role
from recipes.request import PlanRequest
from recipes.tensors.abstract import is_abstract
from recipes.tensors.gathered_rows import GatheredRows
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.splits import Splits


class Dispatch(BasicOperation):
    """y [T topk, H]: a row of x [T, H] for each (token, slot) pair, ordered by expert, then token, then slot.

    Extra inputs, which are extra outputs of `Router`:
        probs   [T, topk]: the factor of each pair
        indices [T, topk] integers in [0, num_experts): the expert of each pair; see empty_slots
    Extra outputs:
        split_sizes: the number of rows of each expert, [num_experts]
        scales [T topk]: probs in the order of the rows, in the same dtype; `ScaledSwiGLU` multiplies by them
        routing_map: for `Combine`

    dx[t] is the sum of the gradients of t's rows, added in the order of the slots in float32 and rounded once.

    empty_slots: the index num_experts stands for no expert: the pair's row comes after all others, past the sum of
    split_sizes, where grouped operations give zeros. It adds nothing to its token, and its prob gets no gradient.

    group: a torch.distributed ProcessGroup, or a DeviceMesh of one dimension (mesh["ep"]): the ranks among which the
    experts are divided, rank r of n owning the experts [r num_experts / n, (r + 1) num_experts / n). Rows go to the
    rank of their expert, and `Combine(group=...)` brings them back. Then y is [R, H], the rows of all ranks for the
    experts here, ordered by expert, then source rank, then token, then slot; split_sizes is [num_experts / n] and
    scales [R]. That is the order of one rank that has the tokens of all, concatenated in rank order, so every expert
    computes the same bits. Rows past the sum of the sizes stay where they are, and return as zeros. R follows from the
    routing: it is read on the host once a forward. Forward and backward are collectives: every rank makes the same
    calls in the same order, also one without tokens (`ops.kernels.routing.all_to_all`).

    transport: "alltoall", or "symmetric" for GPUs of one NVLink domain, whose kernels write and read the memory of the
    other ranks, without a host read, so that they can be captured in CUDA graphs (`ops.kernels.routing.symmetric`).
    Then R is `capacity` on each rank, whatever the routing, and rows past the sum of the sizes are zeros. A step in
    which any rank would receive more gives NaN for all outputs and gradients on every rank, and `fuser.check_overflow`
    and the next forward raise RuntimeError once the host knows of it.

    partial_sums: None, "float32" or "rounded", the same for `Combine`, which has the formula and the bounds. Where a
    rank owns several of a token's experts, it sums their results, and in backward the gradients of their rows, and
    sends one row in place of several: the bounds hold for dx too. Forward of Dispatch and the gradients of the
    probabilities keep their bits. By default each returns by itself, and all bits are those of one rank.

    overlap: with "symmetric", the gradients of this rank's tokens are read from the other ranks while FC1's weight
    gradient is computed, which leaves 16 multiprocessors to that; no bit changes. By default they are read behind it.

    send_codes: whether tokens go to other ranks as float8 codes and scales, quantized before instead of behind the
    transfer, about half the bytes of bfloat16; with a GroupedLinear without adapter behind, and a recipe whose rowwise
    codes depend on their row alone (`fp8_block`, `fp8_rowwise`, `mxfp8`). `explain()` gives the reason where they do
    not. The experts' weight gradients need a columnwise copy, with scales along the rows of an expert.

        "exact": where no rank needs these gradients: without gradients, or with frozen weights. No bit changes. Else
                 the values go, once: they serve both copies, in fewer bytes than codes now and values in backward
        "always": also where these gradients are needed; the columnwise copy is made from the values v of the codes
                 received. With E4M3 codes, a row's scale s and a columnwise scale s', each of its values is within
                 (|x| + |v|) / 16 + (s + s') / 1024 of x, besides the rounding of v to the dtype. Scales that are
                 powers of two (`mxfp8`, `fp8_block`) round alike both times but for the smallest of values, so
                 that there the gradients seldom differ. Nothing else changes
        "never": the values always go

    An x that is quantized already is dequantized first. The gradients dx return in their dtype.

    Raises ValueError for num_experts that is not positive or that the ranks do not divide, a group without this rank,
    another transport, partial_sums or send_codes, overlap with another transport or partial_sums, partial_sums without
    a group, a capacity that is missing, not needed or less than a row for each expert of a rank, shapes that do not
    match, x on a CPU with "symmetric", and, on the CPU, indices outside [0, num_experts) (with empty_slots above
    num_experts); TypeError for indices that are not integers, probs in integers or float8, a group of another type;
    NotImplementedError for empty_slots with a group. On a GPU the indices are not checked, because that would
    synchronize: a negative one counts for expert 0, one above for no expert, in rows past the sum of the sizes. With a
    group RuntimeError, on every rank, where ranks differ in num_experts, features, dtypes, slots, capacity, overlap,
    partial_sums, the format of codes, in whether gradients are computed or in the name of the recipe ("symmetric"
    compares once for each of these; differences of later steps in the same buffers are found as an overflow is); with
    "alltoall" also where one of them refuses its arguments (that one raises its own error), and while a CUDA graph is
    captured.
    """

    accepts_integers = True
    hands_on_rows = True
    extra_inputs = {"probs": Tensor, "indices": IndexTensor}
    extra_outputs = {"split_sizes": Splits, "scales": Tensor, "routing_map": RoutingMap}
    weights_of_rows = {"routing_map": "scales"}

    repeatable = True

    num_experts = SetOnce[int]()
    group = SetOnce[ExpertGroup | None]()
    empty_slots = SetOnce[bool]()
    transport = SetOnce[str]()
    capacity = SetOnce[int | None]()
    partial_sums = SetOnce[str | None]()
    send_codes = SetOnce[str]()
    overlap = SetOnce[bool]()

    class Saved(NamedTuple):
        routing_map: RoutingMap

    def __init__(
        self,
        num_experts: int,
        *,
        group: Ranks | None = None,
        empty_slots: bool = False,
        transport: str = "alltoall",
        capacity: int | None = None,
        partial_sums: str | None = None,
        send_codes: str = "exact",
        overlap: bool = False,
    ) -> None:
        super().__init__()
        check_flags(empty_slots=empty_slots, overlap=overlap)
        if empty_slots and group is not None:
            raise NotImplementedError(
                "empty_slots=True with a group: pairs without an expert have no rank to go to. Leave out one of them."
            )
        (self.num_experts,) = positive_integers("Dispatch", num_experts=num_experts)
        self.empty_slots = empty_slots
        self.group = None if group is None else ExpertGroup(group)
        self.transport = check_transport(transport, self.group)
        self.partial_sums = check_partial_sums(partial_sums, self.group)
        if self.group is not None:
            ranks = len(self.group.ranks)
            if self.num_experts % ranks:
                raise ValueError(
                    f"num_experts is {self.num_experts}, but must be a multiple of the {ranks} ranks of group, each of "
                    "which owns as many. It is the number of experts on all ranks together."
                )
            self.why_in_full = WHY_IN_FULL[transport]
        self.lends_memory = transport == "symmetric"
        self.hands_on_rows = transport != "symmetric" and send_codes != "always"
        self.capacity = self._checked_capacity(capacity)
        if overlap and (transport != "symmetric" or partial_sums is not None):
            raise ValueError(
                "overlap=True is for transport='symmetric' without partial_sums, whose rows are read where the experts "
                "write them. Leave one of them out; `fuser.distributed.Overlapped` is for 'alltoall'."
            )
        self.overlap = overlap
        self.send_codes = check_send_codes(send_codes, self.group)

    def kernel(self, request: PlanRequest) -> str:
        in_triton = runs_in_triton(request.device, request.dtype)
        if self.group is None:
            return "a token read once, counting sort (Triton)" if in_triton else "torch"
        sort, transport = "counting sort (Triton)" if in_triton else "torch", self.group.transport(request.device)
        sums = "" if self.partial_sums is None else f"; in backward gradients {PARTIAL_SUMS[self.partial_sums]}"
        if self.capacity is not None:
            held = bytes_held(self.group, self.capacity)
            return (
                f"{sort}; symmetric memory {self.group.describe(request.device)}, a token written once to each rank; "
                f"no host read; capacity {self.capacity} rows a rank, of {request.dtype.itemsize} H + "
                f"{BYTES_BESIDE_ROW} + 4 topk bytes{f', {held} bytes held' if held else ''}{sums}"
                f"{'; dx is read beside the weight gradient of the operation behind' if self.overlap else ''}"
            )
        return f"{sort}; {transport}, which every backend has; row counts are read on the host once a forward{sums}"

    def hand_on(self, receiver: BasicOperation | None, request: PlanRequest) -> SentTokens | None:
        if self.group is None:
            return None
        return choose_codes(receiver, request.recipe, self.send_codes)

    def why_not_captured(self, request: PlanRequest) -> str | None:
        return None if self.transport == "symmetric" else super().why_not_captured(request)

    def why_not_traced(self, path: str) -> str | None:
        if self.transport == "symmetric":
            return "other ranks write its rows, which torch's tracing does not see."
        if self.group is not None:
            return "how many rows the ranks send is read on the host in each forward, and torch's tracing stops there."
        return super().why_not_traced(path)

    def features(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Any, Mapping[str, Any]]:
        probs, indices = extras["probs"], extras["indices"]
        if self.group is not None:
            return self._forward_over_ranks(ctx, x, probs, indices, self.group)
        self._check(x, probs, indices)
        routing_map, sizes, scales = route_scales(probs, indices, self.num_experts)
        if ctx.needs_grad:
            ctx.saved = self.Saved(routing_map)
        return GatheredRows(x, routing_map.token_of_row) if ctx.gathers else dispatch(x, routing_map), {
            "split_sizes": Splits.make(sizes, rows=indices.numel(), device=x.device),
            "scales": scales,
            "routing_map": routing_map,
        }

    def memory_for_grad_output(self, saved: Saved, rows: int, dtype: torch.dtype) -> LentMemory | None:
        routing_map = saved.routing_map
        assert isinstance(routing_map, SymmetricRoutingMap), "no other transport lends memory"
        memory = routing_map.memory_for_rows((rows, routing_map.features), dtype)
        if memory is None:
            return None
        ready = routing_map.buffers.expect_rows() if routing_map.overlap else None
        return LentMemory(memory, ready, MULTIPROCESSORS)

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        routing_map: RoutingMap = ctx.saved.routing_map
        if isinstance(routing_map, SymmetricRoutingMap):
            return self._backward_symmetric(ctx, dy, d_extra_outputs.get("scales"), routing_map)
        if isinstance(routing_map, ShardedRoutingMap):
            return self._backward_over_ranks(ctx, dy, d_extra_outputs.get("scales"), routing_map)
        dx = dprobs = None
        dscales = d_extra_outputs.get("scales")
        if dy is not None and ctx.needs.input:
            if dscales is not None:
                dx, dprobs = combine_and_return_scales(dy, dscales, routing_map)
            else:
                dx = combine(dy, routing_map)
        elif dscales is not None:
            rows = routing_map.row_of_slot
            dprobs = dscales.index_select(0, rows.flatten()).view(rows.shape)
        return dx, {}, {"probs": dprobs}

    def _forward_over_ranks(
        self, ctx: OperationContext, x: Tensor, probs: Tensor, indices: Tensor, group: ExpertGroup
    ) -> tuple[Any, Mapping[str, Any]]:
        try:
            self._check(x, probs, indices)
        except (TypeError, ValueError) as error:
            if self.transport == "alltoall":
                announce_refusal(group, x.device, error)
            raise
        about = (
            f"num_experts={self.num_experts}, {x.shape[1]} features in {x.dtype}, {indices.shape[1]} slots, probs in "
            f"{probs.dtype}, gradients {'computed' if ctx.needs_grad else 'not computed'}, recipe {ctx.recipe.name}"
        )
        # A rank that has none, because of a hook of its own, lets all send values, or differs from the others.
        needs_values, codes = True, ""
        if ctx.handed_on.spec is not None:
            assert ctx.receiver is not None, "codes are for an operation"
            codes = f"tokens sent as codes of {ctx.handed_on.spec}"
            needs_values = not ctx.receiver.needs.params.isdisjoint(ctx.handed_on.values_for)
        if self.partial_sums is not None:
            about = f"partial_sums={self.partial_sums}, {about}"
        if self.send_codes != "exact":
            about = f"send_codes={self.send_codes}, {about}"
        routing_map: ShardedRoutingMap | SymmetricRoutingMap
        y: Any
        if self.capacity is None:
            needed = NeededGradients(ctx.needs.input, "probs" in ctx.needs.extras, needs_values)
            routing_map, slot_of_pair, sizes = make_sharded_routing_map(
                indices, self.num_experts, group, about, needed, self.partial_sums, codes
            )
            scales = routing_map.send(probs.flatten().index_select(0, slot_of_pair))
            splits = Splits.make(sizes, rows=routing_map.num_rows, device=x.device)
            if not routing_map.needed.values:
                y = _send_codes(ctx, splits, x, routing_map)
            elif ctx.gathers:
                y = routing_map.gather_tokens(x)
            else:
                y = self.send_tokens(x, routing_map)
        else:
            about = f"capacity={self.capacity}{', overlap' if self.overlap else ''}, {about}"
            sent, widths = x, None
            if not needs_values:
                about = f"{codes}, {about}"
                sent, widths = pack(*_to_quantize(ctx, x), _ALIGNED)
            routing_map, parts, scales, sizes = send(
                sent, widths, probs, indices, self.num_experts, self.capacity, group, about, (x.shape[1], x.dtype),
                self.overlap, self.partial_sums,
            )  # fmt: skip
            splits = Splits.make(sizes, rows=routing_map.num_rows, device=x.device)
            y = parts[0] if needs_values else _unpacked(ctx, parts[0], parts[1], splits)
        if ctx.needs_grad:
            ctx.saved = self.Saved(routing_map)
            ctx.num_features, ctx.probs_dtype = x.shape[1], probs.dtype
        return y, {"split_sizes": splits, "scales": scales, "routing_map": routing_map}

    def _backward_over_ranks(
        self, ctx: OperationContext, dy: Tensor | None, dscales: Tensor | None, routing_map: ShardedRoutingMap
    ) -> BackwardOfBasic:
        """What is transferred follows from forward alone, so every rank takes part: zeros for what is not there."""
        rows = routing_map.row_of_arrived
        dx = dprobs = None
        if routing_map.needed.x:
            if dy is None:
                dy = rows.new_zeros(rows.shape[0], ctx.num_features, dtype=ctx.dtype)
            dx = self.sum_rows(dy, routing_map)
        if routing_map.needed.probs:
            if dscales is None:
                dscales = rows.new_zeros(rows.shape, dtype=ctx.probs_dtype)
            d_pairs, slots = routing_map.send_back(dscales), routing_map.row_of_slot
            dprobs = d_pairs.index_select(0, slots.flatten()).view(slots.shape)
        return dx if ctx.needs.input else None, {}, {"probs": dprobs if "probs" in ctx.needs.extras else None}

    def send_tokens(self, x: Tensor, routing_map: ShardedRoutingMap) -> Tensor:
        """The rows of the experts here, or what stands for them where another operation awaits them."""
        return routing_map.send_tokens(x)

    def sum_rows(self, dy: Tensor, routing_map: ShardedRoutingMap) -> Tensor:
        """The gradients of this rank's tokens."""
        return routing_map.sum_rows(dy)

    def _backward_symmetric(
        self, ctx: OperationContext, dy: Tensor | None, dscales: Tensor | None, routing_map: SymmetricRoutingMap
    ) -> BackwardOfBasic:
        rows = routing_map.num_rows
        if dy is None:
            dy = routing_map.origins.new_zeros(rows, ctx.num_features, dtype=ctx.dtype)
        if dscales is None:
            dscales = routing_map.origins.new_zeros(rows, dtype=ctx.probs_dtype)
        needed = NeededGradients(ctx.needs.input, "probs" in ctx.needs.extras)
        dx, dprobs = routing_map.send_back(dy, dscales, needed)
        return dx, {}, {"probs": dprobs}

    def _checked_capacity(self, capacity: int | None) -> int | None:
        if self.group is None or self.transport != "symmetric":
            if capacity is None:
                return None
            raise ValueError(
                f"capacity is {capacity!r}, but only transport='symmetric' has one: others receive any number of rows. "
                "Leave it out, or name that transport."
            )
        if capacity is None:
            raise ValueError(
                "transport='symmetric' needs a capacity: the rows that a rank can receive, a row for each pair of a "
                "token and an expert here. Balanced routing has tokens of all ranks * topk / ranks; give more."
            )
        (capacity,) = positive_integers("Dispatch", capacity=capacity)
        own = self.num_experts // self.group.size
        if not own <= capacity < 2**31 // self.group.size:
            raise ValueError(
                f"capacity is {capacity}, but must be at least {own}, a row for each expert of a rank, and the "
                "capacities of all ranks together less than 2^31."
            )
        return capacity

    def _check(self, x: Tensor, probs: Tensor, indices: Tensor) -> None:
        if self.transport == "symmetric":
            reason = why_not_symmetric(x.device)
            if reason is not None:
                raise ValueError(reason)
            if x.shape[-1:] == (0,):
                raise ValueError("x has no features, so there are no rows to transfer. Give it at least one.")
        if x.dim() != 2 or indices.dim() != 2 or indices.shape[0] != x.shape[0] or probs.shape != indices.shape:
            raise ValueError(
                f"x has shape {list(x.shape)}, probs {list(probs.shape)}, indices {list(indices.shape)}, but "
                "[tokens, features], [tokens, topk] and [tokens, topk] are needed. Take all three from one Router."
            )
        if indices.shape[1] == 0:
            raise ValueError("indices has no slots. Choose at least one expert for each token.")
        check_factors("probs", probs.dtype)
        if indices.dtype not in _INDEX_DTYPES:
            raise TypeError(f"indices is {indices.dtype}, but must be integers with a sign, or bytes. Convert it.")
        highest = self.num_experts if self.empty_slots else self.num_experts - 1
        if indices.device.type == "cpu" and not is_abstract(indices) and ((indices < 0) | (indices > highest)).any():
            dropped = (
                f" A slot without an expert, of a token that is dropped, has the index {self.num_experts}, with "
                "Dispatch(..., empty_slots=True)."
            )
            raise ValueError(
                f"indices reach from {indices.min()} to {indices.max()}, but num_experts is {self.num_experts}"
                f"{' and stands for no expert' if self.empty_slots else ''}. Give both the Router and Dispatch the "
                f"same number of experts.{dropped if self.group is None and not self.empty_slots else ''}"
            )

    def check_extra_from(self, name: str, maker: NamedExtras) -> None:
        chosen = getattr(maker, "num_experts", self.num_experts)
        if name == "indices" and chosen != self.num_experts:
            raise ValueError(
                f"The {type(maker).__name__} before it chooses among {chosen} experts, but num_experts is "
                f"{self.num_experts}. Give both the same number of experts."
            )

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}{', empty_slots=True' if self.empty_slots else ''}"
            + ("" if self.group is None else f", group={self.group}")
            + ("" if self.capacity is None else f", transport='symmetric', capacity={self.capacity}")
            + (", overlap=True" if self.overlap else "")
            + ("" if self.partial_sums is None else f", partial_sums={self.partial_sums!r}")
            + ("" if self.send_codes == "exact" else f", send_codes={self.send_codes!r}")
        )


_ALIGNED = 16  # bytes, which a thread writes at once
_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _send_codes(ctx: OperationContext, splits: Splits, x: Tensor, routing_map: ShardedRoutingMap) -> GroupedTensor:
    """The rows of the experts here, quantized for the operation behind."""
    given, widths = pack(*_to_quantize(ctx, x))
    # Clones: a single row would keep its distance to a next one, scales between, and its scales begin at any byte.
    codes, scales = routing_map.send_tokens(given).split(widths, 1)
    lies = {"memory_format": torch.contiguous_format}
    return _unpacked(ctx, codes.clone(**lies), scales.clone(**lies), splits)


def _to_quantize(ctx: OperationContext, x: Tensor) -> tuple[Tensor, Quantizer]:
    """The tokens as the operation behind takes them, and what it quantizes them with."""
    quantizer = ctx.quantizer(Role.INPUT)
    assert quantizer is not None and ctx.receiver is not None, "no codes are agreed on otherwise"
    return x.to(ctx.receiver.dtype), quantizer


def _unpacked(ctx: OperationContext, codes: Tensor, scales: Tensor, splits: Splits) -> GroupedTensor:
    assert ctx.receiver is not None, "no codes are agreed on otherwise"
    return unpack(codes, scales, ctx.handed_on.spec, splits, ctx.receiver.dtype)
