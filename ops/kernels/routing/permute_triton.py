"""The Triton kernels of `ops.kernels.routing.permute`, which documents and launches them.

Moving rows: a program handles BLOCK_H columns of one token. dispatch loads them once and stores them topk times;
combine issues topk loads at once and stores their sum, without those of row -1; the first program of a token returns
the scales of its rows, too. gather handles those of one row.

The map is made by a stable counting sort of the pairs, BLOCK of them in each program:

    count    counts[e, b] = pairs of block b that chose e;  local_ends[e, b] = sum of counts[e', b] over e' <= e
    (torch)  ends = inclusive sum of counts in the order of memory: by expert, then block
    place    the pairs of block b in order: the i-th, of expert e, has row  ends[e, b] - local_ends[e, b] + i;
             scales of rows are the probabilities of their pairs

Invalid indices count for one additional last expert, and so do the positions of a block past the last pair.
"""
# T tokens, H features

from recipes.triton.gates import tl, triton
from recipes.triton.rounding import round_to, widen


@triton.jit
def columns(H, BLOCK_H: tl.constexpr):
    """(token, columns) of a program. Neighbours share the token."""
    column_blocks = tl.cdiv(H, BLOCK_H)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    return token, tl.program_id(0) % column_blocks * BLOCK_H + tl.arange(0, BLOCK_H)


@triton.jit
def dispatch_kernel(x_ptr, row_of_slot_ptr, y_ptr, H, TOPK: tl.constexpr, BLOCK_H: tl.constexpr):
    token, offs_h = columns(H, BLOCK_H)
    x = tl.load(x_ptr + token * H + offs_h, mask=offs_h < H)
    for slot in tl.static_range(TOPK):
        row = tl.load(row_of_slot_ptr + token * TOPK + slot)
        tl.store(y_ptr + row * H + offs_h, x, mask=offs_h < H)


@triton.jit
def gather_kernel(x_ptr, row_of_ptr, y_ptr, H, BLOCK_H: tl.constexpr):
    row, offs_h = columns(H, BLOCK_H)
    x = tl.load(x_ptr + tl.load(row_of_ptr + row) * H + offs_h, mask=offs_h < H)
    tl.store(y_ptr + row * H + offs_h, x, mask=offs_h < H)


@triton.jit
def combine_kernel(
    x_ptr, row_of_slot_ptr, y_ptr, scales_ptr, probs_ptr, H, TOPK: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    token, offs_h = columns(H, BLOCK_H)
    if scales_ptr is not None:
        first = tl.program_id(0) % tl.cdiv(H, BLOCK_H) == 0
        for slot in tl.static_range(TOPK):
            at = token * TOPK + slot
            scale = tl.load(scales_ptr + tl.load(row_of_slot_ptr + at), mask=first)
            tl.store(probs_ptr + at, scale, mask=first)
    row = tl.load(row_of_slot_ptr + token * TOPK)
    y = widen(tl.load(x_ptr + row * H + offs_h, mask=(offs_h < H) & (row >= 0), other=0.0)).to(tl.float32)
    for slot in tl.static_range(1, TOPK):
        row = tl.load(row_of_slot_ptr + token * TOPK + slot)
        y += widen(tl.load(x_ptr + row * H + offs_h, mask=(offs_h < H) & (row >= 0), other=0.0)).to(tl.float32)
    tl.store(y_ptr + token * H + offs_h, round_to(y, y_ptr.dtype.element_ty), mask=offs_h < H)


@triton.jit
def _experts(indices_ptr, num_pairs, num_experts, BLOCK: tl.constexpr):
    """(first pair, experts [BLOCK] int32) of a program."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    pairs = first + tl.arange(0, BLOCK)
    expert = tl.load(indices_ptr + pairs, mask=pairs < num_pairs, other=0).to(tl.int64)
    expert = tl.where(pairs < num_pairs, tl.minimum(tl.maximum(expert, 0), num_experts), num_experts)
    return first, expert.to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    indices_ptr, counts_ptr, local_ends_ptr, num_pairs, num_experts, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    _, expert = _experts(indices_ptr, num_pairs, num_experts, BLOCK)
    counts = tl.histogram(expert, BLOCK_E)
    offs_e = tl.arange(0, BLOCK_E)
    at = offs_e.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts_ptr + at, counts, mask=offs_e <= num_experts)
    tl.store(local_ends_ptr + at, tl.cumsum(counts, 0), mask=offs_e <= num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    indices_ptr, ends_ptr, local_ends_ptr, probs_ptr, row_of_slot_ptr, token_of_row_ptr, slot_of_row_ptr, sizes_ptr,
    scales_ptr, num_pairs, num_experts, topk, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.num_programs(0)
    first, expert = _experts(indices_ptr, num_pairs, num_experts, BLOCK)
    offs = tl.arange(0, BLOCK)
    key = tl.sort(expert * BLOCK + offs)
    pair = first + key % BLOCK
    at = (key // BLOCK).to(tl.int64) * num_blocks + tl.program_id(0)
    row = (tl.load(ends_ptr + at) - tl.load(local_ends_ptr + at) + offs).to(tl.int64)
    inside = first + offs < num_pairs
    tl.store(row_of_slot_ptr + pair, row, mask=inside)
    if slot_of_row_ptr is not None:
        tl.store(slot_of_row_ptr + row, pair, mask=inside)
    if probs_ptr is not None:
        tl.store(scales_ptr + row, tl.load(probs_ptr + pair, mask=inside), mask=inside)
    tl.store(token_of_row_ptr + row, pair // topk, mask=inside)
    if tl.program_id(0) == 0:
        offs_e = tl.arange(0, BLOCK_E)
        end = (offs_e + 1).to(tl.int64) * num_blocks - 1
        begin = end - num_blocks
        size = tl.load(ends_ptr + end, mask=offs_e < num_experts, other=0)
        size -= tl.load(ends_ptr + begin, mask=(offs_e < num_experts) & (begin >= 0), other=0)
        tl.store(sizes_ptr + offs_e, size.to(tl.int64), mask=offs_e < num_experts)
