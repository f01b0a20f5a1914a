"""QuantizedShard: one rank's part of a weight that is held quantized and sharded by FSDP2 (`fully_shard`).

FSDP2 divides a parameter along dim 0: stacked weights into groups, a weight [N, K] into rows. A rank holds the codes
and scales of its part; before forward and backward those of all ranks are gathered, as bytes, and are the whole
weight's, bit for bit. A columnwise copy that is the transpose of the rowwise one is neither held nor gathered, but
transposed after the gather.

A part that is written is quantized as the whole would be: where one scale is of all rows, from the amax of all ranks.
"""
# G groups, N rows, K columns

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from recipes.casts.cast import abs_without_nan
from recipes.casts.layout import is_square
from recipes.casts.members import Stored
from recipes.casts.scale_rules import NVFP4Scale
from recipes.casts.shards import (
    Layout,
    flat_bytes,
    from_bytes,
    layout_of,
    part_of,
    rows_of_block,
    spans_rows,
    zeros_of,
)
from recipes.tensors.quantize_weight import as_copied, overwrite, quantize_weight
from recipes.tensors.quantized_handle import Quantized, QuantizedHandle, held_tensors
from recipes.tensors.quantized_tensor import QuantizedTensor, each_copy
from recipes.tensors.quantizer import Quantizer, StateOfRole
from recipes.tensors.scaled_codes import ScaledCodes
from recipes.tensors.values_view import write_refused

_aten = torch.ops.aten


@dataclass
class Sharding:
    """What all views of a rank's part share.

    whole: the shape of the weight; rows: of its dim 0, on each rank but the last ones
    transposes: whether the gathered weight gets a columnwise copy that is the transpose of the rowwise one
    unsharded: makes the parameter of the gathered codes
    source, groups: where the quantizer keeps its state, and which of its scales are the whole weight's; None for all
    ranks, rank: the process group of the ranks, and this one's place in it, as soon as they are known
    initial: the part's values before quantization, on the host, if they are kept
    in_whole: whether the part lies in a whole weight, of which it may hold no columnwise copy: it is not written
    """

    whole: torch.Size
    rows: int
    quantizer: Quantizer
    transposes: bool
    unsharded: partial[Any]
    source: StateOfRole | None = None
    groups: range | None = None
    ranks: dist.ProcessGroup | None = None
    rank: int = 0
    initial: Tensor | None = field(default=None, repr=False)
    in_whole: bool = False

    @property
    def stacked(self) -> bool:
        return len(self.whole) == 3

    def groups_of_rank(self) -> range | None:
        """Of the state's scales those of this part."""
        if not self.stacked:
            return self.groups
        begin = min(self.rank * self.rows, self.whole[0])
        return range(begin, min(begin + self.rows, self.whole[0]))

    def layout(self, copy: ScaledCodes) -> Layout:
        return layout_of(copy.spec, copy.columnwise, self.stacked)

    def require_ranks(self) -> dist.ProcessGroup:
        if self.ranks is None:
            raise RuntimeError(
                "The scale of this sharded weight depends on the amax of all ranks, but its ranks are not known before "
                "the first forward. Write it by load_state_dict or by MasterWeights, or run forward before."
            )
        return self.ranks

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process and its operation."""
        make = partial(self.unsharded.func, quantizer=self.quantizer, source=None, groups=self.groups)
        return {**self.__dict__, "ranks": None, "source": None, "unsharded": make}


class QuantizedShard(QuantizedHandle):
    """The rows that one rank holds; the local tensor of a DTensor.

    `copy_` quantizes, as of a `QuantizedParameter`, and is a collective of all ranks where one scale is of all rows.
    What FSDP2 does to the tensors that it shards keeps the codes: `narrow`, `new_zeros`, `view(-1)`.
    """

    quantized: QuantizedTensor

    @staticmethod
    def __new__(cls, quantized: Quantized, sharding: Sharding) -> Any:
        return QuantizedHandle.__new__(cls, quantized)

    def __init__(self, quantized: Quantized, sharding: Sharding) -> None:
        super().__init__(quantized)
        self.sharding = sharding

    def over(self, quantized: Quantized) -> QuantizedShard:
        return QuantizedShard(quantized, self.sharding)

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of its codes, by which FSDP2 compares tensors; a handle has none of its own."""
        return held_tensors(self)[0].untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        shard = args[0] if args else None
        if isinstance(shard, QuantizedShard):
            if func is _aten.slice.Tensor and _is_front(*args[1:]):
                return shard.over(_part(shard.quantized, shard.sharding, 0, min(args[3], len(shard))))
            if func is _aten.new_zeros.default and is_padded(shard, args[1], kwargs):
                zeros = _zeros(shard.quantized, shard.sharding, args[1][0])
                return QuantizedShard(zeros, replace(shard.sharding, in_whole=False))
            if func is _aten.view.default and list(args[1]) == [-1]:
                return shard.over(shard.quantized)  # FSDP2 keeps it, and reads it of ordinary tensors alone
            if func is _aten.slice.Tensor:
                raise NotImplementedError(
                    f"Only the first rows can be taken of a rank's part of a weight that is held quantized, not "
                    f"{args[1:]}. Slice its dequantize()."
                )
            if func is _aten._pin_memory.default:
                raise NotImplementedError(
                    "A weight that is held quantized cannot be offloaded to pinned memory. Give "
                    "CPUOffloadPolicy(pin_memory=False), or leave offload_policy out."
                )
        return super().__torch_dispatch__(func, types, args, kwargs)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        mine, sharding = self.quantized, self.sharding
        if sharding.in_whole:
            raise write_refused("A change in place")
        if isinstance(values, QuantizedShard) and _have_same_codes(self, values):
            sharding.initial = values.sharding.initial
            overwrite(mine, values.quantized)
            return
        sharding.initial = None
        values = values.dequantize() if isinstance(values, QuantizedHandle) else values
        overwrite(mine, self._made_of(values.expand(self.shape).to(self.device)))

    @property
    def quantizer(self) -> Quantizer:
        return self.sharding.quantizer

    def get_high_precision_init_val(self) -> Tensor | None:
        """As of `QuantizedParameter`, of these rows."""
        return self.sharding.initial

    def clear_high_precision_init_val(self) -> None:
        """Drop these values."""
        self.sharding.initial = None

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
        """The bytes of each tensor of this part, padded to those of a whole one; of one rank beside an empty tensor,
        because there FSDP2 copies the first alone."""
        self.sharding.ranks, self.sharding.rank = mesh.get_group(), mesh.get_local_rank()
        inputs = tuple(flat_bytes(*each, self.sharding.rows) for each in self._tensors())
        return ((inputs[0].new_empty(0),), inputs) if mesh.size() == 1 else (inputs, None)

    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        of_one_rank: tuple[Tensor, ...] | None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight over the gathered bytes, and what it holds beside them; or `out`, which this gave before, anew."""
        whole = replace(self._joined(of_one_rank or gathered), dtype=dtype)
        memory = {each.untyped_storage()._cdata for each in gathered}

        def lies_there(tensor: Tensor) -> bool:
            return tensor.is_contiguous() and tensor.untyped_storage()._cdata in memory

        if out is None:
            tensors = [t if t is None or lies_there(t) else _contiguous(t) for t in whole.tensors()]
            own = tuple(t for t in tensors if t is not None and not lies_there(t))
            return self.sharding.unsharded(whole.rebuild(tensors)), own
        assert isinstance(out, QuantizedHandle), "FSDP2 gives back what it got"
        pairs = zip(out.quantized.tensors(), whole.tensors(), strict=True)
        own_pairs = [(to, t) for to, t in pairs if to is not None and t is not None and not lies_there(t)]
        with torch.autograd._unsafe_preserve_version_counter(tuple(to for to, _ in own_pairs)):
            for to, tensor in own_pairs:
                as_copied(to).copy_(as_copied(tensor))
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return QuantizedShard, (self.quantized, self.sharding)

    def __create_write_items__(self, name: str, tensor: Tensor) -> Any:
        raise NotImplementedError(
            f"torch.distributed.checkpoint cannot save the codes of {name}, a weight that is held quantized. Give it "
            "fuser.dequantized_state_dict(model.state_dict()), or the float32 masters."
        )

    def __create_chunk_list__(self) -> Any:
        raise NotImplementedError(
            "torch.distributed.checkpoint cannot load into the codes of a weight that is held quantized. Load into "
            "fuser.dequantized_state_dict(model.state_dict()), and give that to model.load_state_dict."
        )

    def _tensors(self) -> list[tuple[Tensor, Any]]:
        """With their entries, those of a copy that both share once."""
        copies = [self.quantized.rowwise, self.quantized.columnwise]
        copies = copies[:1] if copies[0] is copies[1] else copies
        return [
            (tensor, entries)
            for copy in copies
            if copy is not None
            for tensor, entries in zip(_stored(copy), self.sharding.layout(copy), strict=True)
            if tensor is not None
        ]

    def _joined(self, gathered: Sequence[Tensor]) -> QuantizedTensor:
        """The copies of the whole weight, of which some may be views with other strides."""
        whole, rest = self.sharding.whole, iter(gathered)

        def join(copy: ScaledCodes) -> ScaledCodes:
            pairs = zip(_stored(copy), self.sharding.layout(copy), strict=True)
            tensors = [None if like is None else from_bytes(next(rest), like, e, whole[0]) for like, e in pairs]
            return replace(copy, **Stored(*tensors)._asdict(), shape=whole)  # type: ignore[arg-type]

        joined = _each(self.quantized, join)
        if self.sharding.transposes:
            assert joined.rowwise is not None, "it is the one that is held"
            joined = replace(joined, columnwise=_transposed(joined.rowwise))
        return joined

    def _made_of(self, values: Tensor) -> QuantizedTensor:
        """The codes of these rows of a whole weight."""
        held, sharding = self.quantized, self.sharding
        quantizer = sharding.quantizer
        if sharding.stacked:
            made = held
            if len(self):
                made = _quantize(values, held, sharding)
            if quantizer.keeps_state:
                assert sharding.source is not None, "such weights are bound to their operation"
                recorded: Any = quantizer.bound(sharding.source, None, None)
                sharding.source.tensors(recorded, self.device)
                dist.all_reduce(recorded.amax, dist.ReduceOp.MAX, sharding.require_ranks())
            return made
        copies = [copy for copy in (held.rowwise, held.columnwise) if copy is not None]
        if not (quantizer.keeps_state or any(spans_rows(c.spec, c.columnwise, False) for c in copies)):
            return _quantize(values, held, sharding) if len(self) else held
        # A row that has the amaxes of all ranks, in blocks of its own, gives the scales that the whole weight has.
        amax = abs_without_nan(values).amax(0) if len(self) else values.new_zeros(values.shape[1:])
        dist.all_reduce(amax, dist.ReduceOp.MAX, sharding.require_ranks())
        block = max(rows_of_block(copy.spec, copy.columnwise, False) for copy in copies)
        padded = F.pad(values, (0, 0, 0, -len(self) % block))
        return _part(
            _quantize(torch.cat((padded, amax[None].to(values.dtype))), held, sharding), sharding, 0, len(self)
        )


def shards_of(quantized: QuantizedTensor, sharding: Sharding, dim: int) -> list[QuantizedShard]:
    """The parts of `sharding.rows` each, as views. sharding: of the whole weight; its values before are divided too.

    Raises NotImplementedError for another dim than 0 and for formats of a layout of their own, ValueError if a block of
    a scale would be divided.
    """
    _check_dim(dim)
    quantized, sharding = _divisible(quantized, sharding)
    length, rows = sharding.whole[0], sharding.rows
    parts = []
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        initial = None if sharding.initial is None else sharding.initial[begin:end].clone()
        own = replace(sharding, rank=begin // rows, initial=initial, in_whole=True)
        parts.append(QuantizedShard(_part(quantized, own, begin, end), own))
    return parts


def empty_shard(like: QuantizedTensor, sharding: Sharding, rows: int) -> QuantizedShard:
    """A part of so many rows with codes and scales of 0. like: a weight with as many columns. Raises as `shards_of`."""
    like, sharding = _divisible(like, replace(sharding, initial=None))
    return QuantizedShard(_zeros(like, sharding, rows), sharding)


def is_padded(weight: Tensor, size: Sequence[int], settings: Mapping[str, Any] | None) -> bool:
    """Whether new zeros of this size are those in which FSDP2 pads a part: rows as the weight's, nothing else given."""
    return tuple(size[1:]) == weight.shape[1:] and not any((settings or {}).values())


def is_dtensor(tensor: Any) -> bool:
    """Without the import, which takes a second: who has one has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(parameter: Any) -> QuantizedShard | None:
    """This rank's part of a parameter that is sharded and held quantized, which then knows its ranks; else None."""
    shard = parameter._local_tensor if is_dtensor(parameter) else None
    if not isinstance(shard, QuantizedShard):
        return None
    dim, mesh = shard_dim(parameter), parameter.device_mesh
    shard.sharding.ranks, shard.sharding.rank = mesh.get_group(dim), mesh.get_local_rank(dim)
    return shard


def shard_dim(parameter: Any) -> int:
    """The dimension of its mesh over which dim 0 of a DTensor is sharded. Raises NotImplementedError for other ones."""
    dims = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard()]
    if len(dims) != 1:
        raise NotImplementedError(
            f"A weight with the placements {parameter.placements} cannot be held quantized, but one that is sharded "
            "over one dimension of the mesh, along dim 0. Shard it by fully_shard alone."
        )
    _check_dim(parameter.placements[dims[0]].dim)
    return dims[0]


def with_local(parameter: Any, values: Tensor) -> Any:
    """A DTensor that is sharded as `parameter` is, of these rows on this rank."""
    return type(parameter).from_local(
        values, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _divisible(quantized: QuantizedTensor, sharding: Sharding) -> tuple[QuantizedTensor, Sharding]:
    """The copies that parts hold, checked, and whether they leave one out that is transposed after the gather."""
    copies = [copy for copy in (quantized.rowwise, quantized.columnwise) if copy is not None]
    other = next((copy for copy in copies if type(copy) is not ScaledCodes), None)
    if other is not None:
        raise NotImplementedError(
            f"A weight that is held quantized as {type(other).__name__} cannot be sharded, because its tensors do not "
            "lie as a ScaleSpec says. Hold it by a built-in recipe, or quantize in the step, without to_quantized."
        )
    quantized, transposes = _held(quantized)
    copies = [copy for copy in (quantized.rowwise, quantized.columnwise) if copy is not None]
    block = max(rows_of_block(copy.spec, copy.columnwise, sharding.stacked) for copy in copies)
    if sharding.rows < sharding.whole[0] and sharding.rows % block:
        raise ValueError(
            f"A weight {list(sharding.whole)} that is held quantized would be sharded into {sharding.rows} rows a "
            f"rank, but its blocks of scales have {block} rows. Shard over ranks of which each gets a multiple of "
            f"{block} rows, or quantize this layer in the step, without to_quantized; outside of FSDP2 take parts of "
            "its dequantize()."
        )
    return quantized, replace(sharding, transposes=transposes)


def _check_dim(dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(
            f"A weight that is held quantized cannot be sharded along dim {dim}, but along dim 0 alone. Leave "
            "shard_placement_fn out for it, or let it return None; outside of FSDP2 take parts of its dequantize()."
        )


def _is_front(dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> bool:
    """Whether a slice is of the first rows, as `narrow` from 0 is."""
    return dim == 0 and start == 0 and end is not None and end >= 0 and step == 1


def _quantize(values: Tensor, held: QuantizedTensor, sharding: Sharding) -> QuantizedTensor:
    return quantize_weight(
        values, sharding.quantizer, sharding.source, sharding.groups_of_rank(),
        rowwise=held.rowwise is not None, columnwise=held.columnwise is not None,
    )  # fmt: skip


def _have_same_codes(one: QuantizedShard, other: QuantizedShard) -> bool:
    held = [[copy is None for copy in (each.quantized.rowwise, each.quantized.columnwise)] for each in (one, other)]
    return one.sharding.quantizer == other.sharding.quantizer and held[0] == held[1] and one.shape == other.shape


def _held(quantized: QuantizedTensor) -> tuple[QuantizedTensor, bool]:
    """What parts hold of it, and whether a columnwise copy is left out that is the transpose of the rowwise one."""
    rowwise, columnwise = quantized.rowwise, quantized.columnwise
    if rowwise is None or columnwise is None or columnwise is rowwise or columnwise.spec != rowwise.spec:
        return quantized, False
    spec = rowwise.spec
    symmetric = (spec.is_per_tensor or is_square(spec)) and not isinstance(spec.scale_rule, NVFP4Scale)
    if not (symmetric and columnwise.columnwise and spec.columnwise == "transposed" and spec.transform is None):
        return quantized, False
    return replace(quantized, columnwise=None), True


def _transposed(rowwise: ScaledCodes) -> ScaledCodes:
    """The columnwise copy of codes whose blocks have as many rows as columns."""
    codes, scale, spec = rowwise.codes.view(torch.uint8).mT, rowwise.scale_inv, rowwise.spec
    if codes.dim() == 2:
        codes = F.pad(codes, (0, -codes.shape[-1] % spec.alignment))
    scale = scale if spec.is_per_tensor else scale.mT
    return replace(rowwise, codes=codes.view(rowwise.codes.dtype), scale_inv=scale, columnwise=True)


def _part(quantized: QuantizedTensor, sharding: Sharding, begin: int, end: int) -> QuantizedTensor:
    return _with_rows(quantized, end - begin, lambda copy: part_of(_stored(copy), sharding.layout(copy), begin, end))


def _zeros(quantized: QuantizedTensor, sharding: Sharding, rows: int) -> QuantizedTensor:
    return _with_rows(quantized, rows, lambda copy: zeros_of(_stored(copy), sharding.layout(copy), rows))


def _with_rows(quantized: QuantizedTensor, rows: int, function: Callable[[ScaledCodes], Stored]) -> QuantizedTensor:
    def of(copy: ScaledCodes) -> ScaledCodes:
        return replace(copy, **function(copy)._asdict(), shape=torch.Size((rows, *copy.shape[1:])))

    return _each(quantized, of)


def _each(quantized: QuantizedTensor, of_copy: Callable[[ScaledCodes], ScaledCodes]) -> QuantizedTensor:
    return QuantizedTensor(*each_copy(quantized.rowwise, quantized.columnwise, of_copy), quantized.dtype)


def _stored(copy: ScaledCodes) -> Stored:
    return Stored(copy.codes, copy.scale_inv, copy.amax)


def _contiguous(tensor: Tensor) -> Tensor:
    return as_copied(tensor).clone(memory_format=torch.contiguous_format).view(tensor.dtype)
