"""The Triton kernels of `ops.kernels.routing.symmetric`, which documents and launches them.

Memory of rank r begins at addresses[r]; a region of it at the same number of bytes behind that on each rank, a multiple
of 16. place = r * CAPACITY + row is a row of rank r; NOWHERE and OVERFLOWN are negative.

put_counts: a program for each rank that is written to.
locate:     a program handles BLOCK_T tokens and all slots.
push, pull: a program handles BLOCK_H columns of one token; the first columns take the token's scales along.
expand:     a program handles BLOCK_H columns of one row.
"""
# H features

from ops.kernels.routing.permute_triton import columns
from recipes.triton.gates import tl, triton
from recipes.triton.rounding import round_to, widen

NOWHERE = tl.constexpr(-1)
OVERFLOWN = tl.constexpr(-2)


@triton.jit
def _region(addresses_ptr, rank, begin, POINTER: tl.constexpr):
    return tl.multiple_of((tl.load(addresses_ptr + rank) + begin).to(POINTER), 16)


@triton.jit
def put_counts_kernel(counts_ptr, addresses_ptr, rank, E, BLOCK_E: tl.constexpr):
    offs_e = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + offs_e, mask=offs_e < E)
    there = _region(addresses_ptr, tl.program_id(0), 0, counts_ptr.dtype)
    tl.store(there + rank * E + offs_e, counts, mask=offs_e < E)


@triton.jit(do_not_specialize=["T"])
def locate_kernel(
    indices_ptr, row_of_slot_ptr, shift_ptr, needed_ptr, place_ptr, lead_ptr, T, E,
    CAPACITY: tl.constexpr, TOPK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    inside = (offs_t < T)[:, None] & (offs_k < TOPK)
    at = offs_t[:, None] * TOPK + offs_k
    expert = tl.maximum(tl.load(indices_ptr + at, mask=inside, other=0).to(tl.int64), 0)
    sent = inside & (expert < E)
    place = tl.load(row_of_slot_ptr + at, mask=sent, other=0) + tl.load(shift_ptr + expert, mask=sent, other=0)
    place = tl.where(sent, place, NOWHERE).to(tl.int32)
    place = tl.where(tl.load(needed_ptr) > CAPACITY, OVERFLOWN, place)
    rank = tl.where(place >= 0, place // CAPACITY, NOWHERE)
    lead = place
    for slot in range(TOPK):
        to = tl.max(tl.where(offs_k == slot, rank, NOWHERE), 1)
        first = tl.min(tl.where(rank == to[:, None], offs_k, BLOCK_K), 1)
        there = tl.max(tl.where(offs_k == first[:, None], place, OVERFLOWN), 1)
        lead = tl.where(offs_k == slot, there[:, None], lead)
    tl.store(place_ptr + at, place, mask=inside)
    tl.store(lead_ptr + at, lead, mask=inside)


@triton.jit
def push_kernel(
    x_ptr, scales_ptr, origins_ptr, place_ptr, lead_ptr, addresses_ptr, rows_at, scales_at, origins_at, H,
    CAPACITY: tl.constexpr, TOPK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """scales_ptr, origins_ptr: None if rows alone are sent; of origins_ptr the type is used"""
    token, offs_h = columns(H, BLOCK_H)
    x = tl.load(x_ptr + token * H + offs_h, mask=offs_h < H)
    for slot in tl.static_range(TOPK):
        place = tl.load(place_ptr + token * TOPK + slot)
        lead = tl.load(lead_ptr + token * TOPK + slot)
        rank, row = tl.maximum(place, 0) // CAPACITY, place % CAPACITY
        rows = _region(addresses_ptr, rank, rows_at, x_ptr.dtype)
        tl.store(rows + row.to(tl.int64) * H + offs_h, x, mask=(place >= 0) & (place == lead) & (offs_h < H))
        if scales_ptr is not None:
            sent = (place >= 0) & (tl.program_id(0) % tl.cdiv(H, BLOCK_H) == 0)
            scales = _region(addresses_ptr, rank, scales_at, scales_ptr.dtype)
            tl.store(scales + row, tl.load(scales_ptr + token * TOPK + slot), mask=sent)
            origins = _region(addresses_ptr, rank, origins_at, origins_ptr.dtype)
            tl.store(origins + row, lead % CAPACITY, mask=sent)


@triton.jit
def expand_kernel(rows_ptr, origins_ptr, y_ptr, H, BLOCK_H: tl.constexpr):
    row, offs_h = columns(H, BLOCK_H)
    origin = tl.load(origins_ptr + row)
    inside = (origin >= 0) & (offs_h < H)
    x = tl.load(rows_ptr + origin.to(tl.int64) * H + offs_h, mask=inside, other=0.0)
    if origin == OVERFLOWN:
        x = round_to(tl.full([BLOCK_H], float("nan"), tl.float32), y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * H + offs_h, x, mask=offs_h < H)


@triton.jit
def pull_kernel(
    y_ptr, scales_ptr, place_ptr, addresses_ptr, rows_at, scales_at, H,
    CAPACITY: tl.constexpr, TOPK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """y_ptr or scales_ptr may be None."""
    token, offs_h = columns(H, BLOCK_H)
    for slot in tl.static_range(TOPK):
        place = tl.load(place_ptr + token * TOPK + slot)
        rank, row = tl.maximum(place, 0) // CAPACITY, place % CAPACITY
        missing = tl.where(place == OVERFLOWN, float("nan"), 0.0)
        if y_ptr is not None:
            rows = _region(addresses_ptr, rank, rows_at, y_ptr.dtype)
            x = tl.load(rows + row.to(tl.int64) * H + offs_h, mask=(place >= 0) & (offs_h < H), other=0.0)
            x = tl.where(place >= 0, _accumulated(x), missing)
            if slot == 0:
                y = x
            else:
                y += x
        if scales_ptr is not None:
            scales = _region(addresses_ptr, rank, scales_at, scales_ptr.dtype)
            scale = _accumulated(tl.load(scales + row, mask=place >= 0, other=0.0))
            scale = round_to(tl.where(place >= 0, scale, missing), scales_ptr.dtype.element_ty)
            tl.store(scales_ptr + token * TOPK + slot, scale, mask=tl.program_id(0) % tl.cdiv(H, BLOCK_H) == 0)
    if y_ptr is not None:
        tl.store(y_ptr + token * H + offs_h, round_to(y, y_ptr.dtype.element_ty), mask=offs_h < H)


@triton.jit
def _accumulated(x):
    """x in float32; float64 as it is."""
    if x.dtype == tl.float64:
        return x
    else:
        return widen(x).to(tl.float32)
