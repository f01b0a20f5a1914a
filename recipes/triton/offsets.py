"""Offsets of the groups from their sizes, on the device.

    offsets[0] = 0        offsets[g + 1] = min(rows, sum of max(0, min(rows, sizes[h])) over h <= g)
    aligned[0] = 0        aligned[g + 1] = sum of block * ceil((offsets[h + 1] - offsets[h]) / block) over h <= g

sizes: [G], any integer dtype. offsets, aligned: [G + 1] int64. In words: a negative size counts as 0, and what goes
beyond the rows is cut off; aligned, each group is rounded up to a multiple of `block` rows. Where `block` is known
with the sizes, one launch makes both. In a step that is repeated it makes counters of later kernels 0, too.

Graph safety: nothing is read by the host. One program, one pass; what it makes 0 is of programs of its own.
"""

import torch
from torch import Tensor

from recipes.triton.gates import tl, triton
from recipes.triton.launch import Launch, cdiv, launcher, next_power_of_2
from recipes.triton.repeated import Zeroes

WORDS = 2048  # that a program makes 0


def clamped_offsets_ref(sizes: Tensor, rows: int) -> Tensor:
    """`clamped_offsets` in plain torch."""
    ends = sizes.to(torch.int64).clamp(0, rows).cumsum(0).clamp_(max=rows)
    return torch.nn.functional.pad(ends, (1, 0))


def clamped_offsets_config(num_groups: int) -> int:
    """How many groups are summed at a time."""
    return min(1024, max(32, next_power_of_2(num_groups)))


@triton.jit(do_not_specialize=["words", "few_words", "num_groups", "rows", "block"])
def clamped_offsets_kernel(
    sizes_ptr, offsets_ptr, aligned_ptr, zeroed_ptr, words, few_zeroed_ptr, few_words, num_groups, rows, block,
    BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) > 0:
        offs_w = (tl.program_id(0) - 1) * WORDS + tl.arange(0, WORDS)
        tl.store(zeroed_ptr + offs_w, tl.zeros([WORDS], tl.int64), mask=offs_w < words)
        tl.store(few_zeroed_ptr + offs_w, tl.zeros([WORDS], tl.int64), mask=offs_w < few_words)
        return
    before = tl.cast(0, tl.int64)
    before_aligned = tl.cast(0, tl.int64)
    tl.store(offsets_ptr, before)
    if aligned_ptr is not None:
        tl.store(aligned_ptr, before_aligned)
    for start in range(0, num_groups, BLOCK):
        offs_g = start + tl.arange(0, BLOCK)
        mask = offs_g < num_groups
        sizes = tl.load(sizes_ptr + offs_g, mask=mask, other=0).to(tl.int64)
        sizes = tl.minimum(tl.maximum(sizes, 0), rows)
        ends = before + tl.cumsum(sizes, axis=0)
        clamped = tl.minimum(ends, rows)
        tl.store(offsets_ptr + 1 + offs_g, clamped, mask=mask)
        if aligned_ptr is not None:
            padded = tl.cdiv(clamped - tl.minimum(ends - sizes, rows), block) * block
            tl.store(aligned_ptr + 1 + offs_g, before_aligned + tl.cumsum(padded, axis=0), mask=mask)
            before_aligned += tl.sum(padded, axis=0)
        before += tl.sum(sizes, axis=0)


def clamped_offsets(sizes: Tensor, rows: int, block: int | None = None) -> tuple[Tensor, Tensor | None]:
    """The offsets of groups of these sizes [G] in a buffer of `rows` rows, [G + 1] int64, on sizes' device; and their
    `aligned_offsets`, if a block is given."""
    if not sizes.is_cuda:
        offsets = clamped_offsets_ref(sizes, rows)
        return offsets, None if block is None else aligned_offsets_ref(offsets, block)
    out = torch.empty(sizes.numel() + 1, dtype=torch.int64, device=sizes.device)
    aligned = None if block is None else torch.empty_like(out)
    clamped_offsets_triton(sizes.contiguous(), out, aligned, rows, block or 1)
    return out, aligned


def aligned_offsets_ref(offsets: Tensor, block: int) -> Tensor:
    """`aligned_offsets` in plain torch."""
    padded = (offsets.diff() + (block - 1)) // block * block
    return torch.nn.functional.pad(padded.cumsum(0), (1, 0))


@triton.jit(do_not_specialize=["num_groups", "block"])
def aligned_offsets_kernel(offsets_ptr, aligned_ptr, num_groups, block, BLOCK: tl.constexpr):
    before = tl.cast(0, tl.int64)
    tl.store(aligned_ptr, before)
    for start in range(0, num_groups, BLOCK):
        offs_g = start + tl.arange(0, BLOCK)
        mask = offs_g < num_groups
        begin = tl.load(offsets_ptr + offs_g, mask=mask, other=0)
        end = tl.load(offsets_ptr + 1 + offs_g, mask=mask, other=0)
        sizes = tl.cdiv(end - begin, block) * block
        tl.store(aligned_ptr + 1 + offs_g, before + tl.cumsum(sizes, axis=0), mask=mask)
        before += tl.sum(sizes, axis=0)


def aligned_offsets(offsets: Tensor, block: int) -> Tensor:
    """The offsets of the same groups, each rounded up to a multiple of `block` rows."""
    if not offsets.is_cuda:
        return aligned_offsets_ref(offsets, block)
    out = torch.empty_like(offsets)
    aligned_offsets_triton(offsets, out, block)
    return out


clamped_offsets_launch = Launch(clamped_offsets_kernel, zeroes=Zeroes(((3, 4), (5, 6)), WORDS))
_aligned_offsets = Launch(aligned_offsets_kernel)


@launcher("fuser::clamped_offsets", mutates=["out", "aligned"])
def clamped_offsets_triton(sizes: Tensor, out: Tensor, aligned: Tensor | None, rows: int, block: int) -> None:
    """Launches the kernel. sizes [G], and out and aligned [G + 1] int64, are contiguous."""
    clamp_and_zero(sizes, out, aligned, rows, block, (out, 0), (out, 0))


def clamp_and_zero(
    sizes: Tensor, out: Tensor, aligned: Tensor | None, rows: int, block: int, *zeroed: tuple[Tensor, int]
) -> None:
    """The same, which makes the first words of two contiguous tensors of int64 0 as well, as a repetition has it do."""
    num_groups = sizes.numel()
    programs = 1 + max(cdiv(words, WORDS) for _, words in zeroed)
    clamped_offsets_launch(
        out, programs, sizes, out, aligned, *zeroed[0], *zeroed[1], num_groups, rows, block,
        BLOCK=clamped_offsets_config(num_groups), WORDS=WORDS,
    )  # fmt: skip


@launcher("fuser::aligned_offsets", mutates=["out"])
def aligned_offsets_triton(offsets: Tensor, out: Tensor, block: int) -> None:
    """Launches the kernel. offsets and out [G + 1] int64 are contiguous."""
    num_groups = offsets.numel() - 1
    _aligned_offsets(out, 1, offsets, out, num_groups, block, BLOCK=clamped_offsets_config(num_groups))
