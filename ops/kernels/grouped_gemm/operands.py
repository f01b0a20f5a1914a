"""What grouped kernels need of their operands: that they fit together, and how they lie in memory."""
# T rows, G groups, K in features, N out features

from collections.abc import Iterator

import torch
from torch import Tensor

from recipes.tensors.abstract import is_abstract
from recipes.tensors.gathered_rows import GatheredRows
from recipes.tensors.splits import Splits


def check_m_grouped(
    x: Tensor,
    w_GNK: Tensor,
    splits: Splits,
    bias_GN: Tensor | None = None,
    scales_T: Tensor | None = None,
    *,
    w_features: int,
) -> None:
    """Raises unless the operands fit. x's features are those of w's dimension `w_features`."""
    check_rows(x, splits)
    if why_not_read_as(x, w_GNK) is not None:
        check_dtypes(x, w_GNK)
    if w_GNK.dim() != 3 or w_GNK.shape[0] != splits.num_groups or w_GNK.shape[w_features] != x.shape[1]:
        needed: list[object] = [splits.num_groups, "out_features", "in_features"]
        needed[w_features] = x.shape[1]
        raise ValueError(
            f"the weight has shape {list(w_GNK.shape)}, but must be [{', '.join(map(str, needed))}] for "
            f"{splits.num_groups} groups and rows of {x.shape[1]} features. Pass the weight that belongs to these rows."
        )
    if bias_GN is not None and bias_GN.shape != w_GNK.shape[:2]:
        raise ValueError(
            f"bias has shape {list(bias_GN.shape)}, but must be {list(w_GNK.shape[:2])}. Pass one row for each group."
        )
    check_scales(scales_T, splits)


def check_scales(scales_T: Tensor | None, splits: Splits) -> None:
    if scales_T is not None and scales_T.shape != (splits.rows,):
        raise ValueError(
            f"scales has shape {list(scales_T.shape)}, but must be [{splits.rows}]. Pass one for each row."
        )


def check_rows(x: Tensor | GatheredRows, splits: Splits) -> None:
    if len(x.shape) != 2 or x.shape[0] != splits.rows:
        raise ValueError(
            f"an operand has shape {list(x.shape)}, but the splits were made for {splits.rows} rows. "
            f"Pass a matrix of {splits.rows} rows, or make the splits for this one."
        )
    if x.device != splits.offsets.device:
        raise ValueError(
            f"an operand is on {x.device}, but the splits are on {splits.offsets.device}. Move one of them."
        )


def check_dtypes(x: Tensor, w: Tensor) -> None:
    if x.dtype != w.dtype or not x.is_floating_point():
        raise TypeError(
            f"the operands are {x.dtype} and {w.dtype}, but must have one floating dtype. Convert one of them."
        )
    if x.device != w.device:
        raise ValueError(f"the operands are on {x.device} and {w.device}, but must be on one device. Move one of them.")
    refuse_float64(x)


def why_not_read_as(x: Tensor, w: Tensor) -> str | None:
    """Why grouped products of rows do not read weights w in x's dtype, group by group, as a sentence; None on a CPU,
    where w is narrower and x at least float32."""
    if x.device.type != "cpu" or w.device.type != "cpu":
        return "GPU kernels read both operands in one dtype."
    if x.dtype not in (torch.float32, torch.float64) or not w.is_floating_point() or w.itemsize >= x.itemsize:
        return f"{w.dtype} is not narrower than {x.dtype}, or that is below float32."
    return None


def refuse_float64(x: Tensor) -> None:
    if x.dtype == torch.float64 and x.is_cuda:
        raise NotImplementedError(
            "float64 has no grouped kernel on CUDA. Use the split path (path='split'), or float32, bfloat16 or float16."
        )


def output(out: Tensor | None, shape: tuple[int, ...], out_dtype: torch.dtype | None, x: Tensor) -> Tensor:
    """`out` if it fits, or a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)
    if out.shape != shape or out.device != x.device or (out_dtype is not None and out.dtype != out_dtype):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}, but must be {out_dtype or x.dtype} {list(shape)} "
            f"on {x.device}. Pass such a buffer, or None."
        )
    return out


def check_accumulate(out: Tensor | None, accumulate: bool, reverse: bool = False) -> None:
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to `out`, but out is None. Pass the buffer, or accumulate=False.")
    if reverse and out is None:
        raise ValueError("reverse=True is the order of `out`, but out is None. Pass the buffer, or reverse=False.")


def with_contiguous_rows(x: Tensor, *, empty: bool = False) -> Tensor:
    """x if the elements of a row are contiguous, or a contiguous copy (without the values, if `empty`)."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if empty else x.contiguous()


def packed(x: Tensor, *, empty: bool = False) -> Tensor:
    """x if it lies without gaps from a multiple of 16 bytes on, or such a copy (without the values, if `empty`).

    Then the shape alone decides by which kernel it is read.
    """
    if is_abstract(x):
        return x
    if x.is_contiguous() and (x.dim() < 2 or x.stride(-2) == x.shape[-1]) and x.data_ptr() % 16 == 0:
        return x
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return made if empty else made.copy_(x)


def per_group(alpha_G: Tensor | None, splits: Splits) -> Tensor | None:
    return None if alpha_G is None else alpha_G.expand(splits.num_groups).contiguous()


def row_slices(splits: Splits) -> Iterator[tuple[int, slice]]:
    """(group, its rows) for each group. Reads the sizes on the host: for references and CPU tensors."""
    begin = 0
    for group, size in enumerate(splits.tolist()):
        yield group, slice(begin, begin + size)
        begin += size


def accumulator_like(x: Tensor) -> Tensor:
    """x in the dtype in which sums are made: at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
