"""The Triton kernels of `ops.kernels.routing.symmetric`, which documents and launches them.

Memory of rank r begins at addresses[r]; a region of it at the same number of bytes behind that on each rank, a multiple
of 16. place = r * CAPACITY + row is a row of rank r; NOWHERE and OVERFLOWN are negative.

put_counts:       a program for each rank that is written to; `number`, by which the ranks know what they exchange, lies
                  in front of the counts, that of rank r at r.
layout:           one program. Rows needed are more than any capacity if the ranks' numbers differ (`DIFFERENT`).
locate:           a program handles BLOCK_T tokens and all slots.
push, pull:       a program handles BLOCK_H columns of one token; the first columns take its scales and members along.
expand:           a program handles BLOCK_H columns of ROWS rows: of those to which a token was written it stores the
                  members, so that a token is read once, however far apart its rows are.
sum_members:      a program handles BLOCK_H columns of one row.
"""
# H features, E experts, L experts of a rank

from ops.kernels.routing.permute_triton import columns
from recipes.triton.gates import tl, triton
from recipes.triton.rounding import round_to, widen

NOWHERE = tl.constexpr(-1)
OVERFLOWN = tl.constexpr(-2)
# Rows needed, if the numbers of the ranks differ: this, and the lowest * NUMBERS + the highest.
DIFFERENT = tl.constexpr(1 << 62)
NUMBERS = tl.constexpr(1 << 30)


@triton.jit
def _region(addresses_ptr, rank, begin, POINTER: tl.constexpr):
    return tl.multiple_of((tl.load(addresses_ptr + rank) + begin).to(POINTER), 16)


@triton.jit(do_not_specialize=["number", "rank"])
def put_counts_kernel(counts_ptr, addresses_ptr, number, rank, E, counts_at, BLOCK_E: tl.constexpr):
    offs_e = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + offs_e, mask=offs_e < E)
    there = _region(addresses_ptr, tl.program_id(0), counts_at, counts_ptr.dtype)
    tl.store(there + rank * E + offs_e, counts, mask=offs_e < E)
    tl.store(_region(addresses_ptr, tl.program_id(0), 0, counts_ptr.dtype) + rank, number)


@triton.jit(do_not_specialize=["rank"])
def layout_kernel(
    counts_ptr, numbers_ptr, shift_ptr, sizes_ptr, totals_ptr, most_ptr, rank, E, L,
    RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    offs_e = tl.arange(0, BLOCK_E)
    inside = offs_e < E
    owner = offs_e // L
    own = tl.load(counts_ptr + rank * E + offs_e, mask=inside, other=0)
    received = tl.zeros([BLOCK_E], tl.int64)
    before = tl.zeros([BLOCK_E], tl.int64)
    for source in tl.static_range(RANKS):
        counts = tl.load(counts_ptr + source * E + offs_e, mask=inside, other=0)
        received += counts
        before += tl.where(source < rank, counts, 0)
        number = tl.load(numbers_ptr + source)
        if source == 0:
            lowest, highest = number, number
        else:
            lowest, highest = tl.minimum(lowest, number), tl.maximum(highest, number)
    begin = tl.cumsum(received, 0) - received  # of the experts of all ranks
    total = tl.sum(tl.where(owner == rank, received, 0), 0)
    needed = total
    ends = total * 0
    for at in tl.static_range(RANKS):
        of_rank = tl.sum(tl.where(owner == at, received, 0), 0)
        begin -= tl.where(owner == at, ends, 0)
        ends += of_rank
        needed = tl.maximum(needed, of_rank)
    needed = tl.where(lowest == highest, needed, DIFFERENT + lowest * NUMBERS + highest)
    shift = begin + owner * CAPACITY + before - (tl.cumsum(own, 0) - own)
    tl.store(shift_ptr + offs_e, shift, mask=inside)
    offs_l = offs_e - rank * L
    even = CAPACITY // L + (offs_l < CAPACITY % L).to(tl.int64)
    tl.store(sizes_ptr + offs_l, tl.where(needed > CAPACITY, even, received), mask=inside & (owner == rank))
    tl.store(totals_ptr, total)
    tl.store(totals_ptr + 1, needed)
    tl.store(most_ptr, tl.maximum(tl.load(most_ptr), tl.where(needed > CAPACITY, needed, 0)))


@triton.jit(do_not_specialize=["T"])
def locate_kernel(
    indices_ptr, row_of_slot_ptr, shift_ptr, totals_ptr, place_ptr, lead_ptr, T, E,
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
    place = tl.where(tl.load(totals_ptr + 1) > CAPACITY, OVERFLOWN, place)
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
    x_ptr, scales_ptr, origins_ptr, members_ptr, place_ptr, lead_ptr, addresses_ptr,
    rows_at, scales_at, origins_at, members_at, H,
    CAPACITY: tl.constexpr, TOPK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """scales_ptr, origins_ptr, members_ptr: None if rows alone are sent; of the last two the type is used"""
    token, offs_h = columns(H, BLOCK_H)
    x = tl.load(x_ptr + token * H + offs_h, mask=offs_h < H)
    first = tl.program_id(0) % tl.cdiv(H, BLOCK_H) == 0
    offs_k = tl.arange(0, BLOCK_K)
    if scales_ptr is not None:
        places = tl.load(place_ptr + token * TOPK + offs_k, mask=offs_k < TOPK, other=NOWHERE)
    for slot in tl.static_range(TOPK):
        place = tl.load(place_ptr + token * TOPK + slot)
        lead = tl.load(lead_ptr + token * TOPK + slot)
        rank, row = tl.maximum(place, 0) // CAPACITY, (place % CAPACITY).to(tl.int64)
        rows = _region(addresses_ptr, rank, rows_at, x_ptr.dtype)
        tl.store(rows + row * H + offs_h, x, mask=(place >= 0) & (place == lead) & (offs_h < H))
        if scales_ptr is not None:
            sent = (place >= 0) & first
            scales = _region(addresses_ptr, rank, scales_at, scales_ptr.dtype)
            tl.store(scales + row, tl.load(scales_ptr + token * TOPK + slot), mask=sent)
            origins = _region(addresses_ptr, rank, origins_at, origins_ptr.dtype)
            tl.store(origins + row, lead % CAPACITY, mask=sent)
            members = _region(addresses_ptr, rank, members_at, members_ptr.dtype)
            there = tl.where((places >= 0) & (places // CAPACITY == rank), places % CAPACITY, NOWHERE)
            leads = (place >= 0) & (place == lead) & first
            tl.store(members + row * TOPK + offs_k, there, mask=leads & (offs_k < TOPK))


@triton.jit
def expand_kernel(
    rows_ptr, members_ptr, origins_ptr, y_ptr, totals_ptr, scales_ptr, found_origins_ptr, found_scales_ptr,
    C, H, row_stride, ROWS: tl.constexpr, TOPK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """totals_ptr and what follows: None where the origins hold for all rows"""
    column_blocks = tl.cdiv(H, BLOCK_H)
    begin = (tl.program_id(0) // column_blocks).to(tl.int64) * ROWS
    offs_h = tl.program_id(0) % column_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    total = C
    if totals_ptr is not None:
        overflows = tl.load(totals_ptr + 1) > C
        total = tl.load(totals_ptr)
        offs_r = begin + tl.arange(0, ROWS)
        inside, written = (offs_r < total) & (offs_r < C), (offs_r < C) & (tl.program_id(0) % column_blocks == 0)
        origins = tl.load(origins_ptr + offs_r, mask=inside, other=NOWHERE)
        tl.store(found_origins_ptr + offs_r, tl.where(overflows, OVERFLOWN, origins), mask=written)
        scales = _accumulated(tl.load(scales_ptr + offs_r, mask=inside, other=0.0))
        scales = round_to(tl.where(overflows, float("nan"), scales), found_scales_ptr.dtype.element_ty)
        tl.store(found_scales_ptr + offs_r, scales, mask=written)
    else:
        overflows = tl.load(origins_ptr) == OVERFLOWN
    for row in range(begin, tl.minimum(begin + ROWS, C)):
        origin = tl.load(origins_ptr + row, mask=row < total, other=NOWHERE)
        if overflows | (origin < 0):
            if y_ptr.dtype.element_ty == tl.uint8:
                x = tl.where(overflows, tl.full([BLOCK_H], 0x7F, tl.int32), 0).to(tl.uint8)  # NaN in float8 codes
            else:
                x = tl.where(overflows, tl.full([BLOCK_H], float("nan"), tl.float32), 0.0)
                x = round_to(x, y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * H + offs_h, x, mask=offs_h < H)
        elif origin == row:
            x = tl.load(rows_ptr + row * row_stride + offs_h, mask=offs_h < H)
            for slot in tl.static_range(TOPK):
                member = tl.load(members_ptr + row * TOPK + slot).to(tl.int64)
                tl.store(y_ptr + member * H + offs_h, x, mask=(member >= 0) & (offs_h < H))


@triton.jit
def sum_members_kernel(
    rows_ptr, members_ptr, origins_ptr, y_ptr, H, TOPK: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    row, offs_h = columns(H, BLOCK_H)
    if tl.load(origins_ptr + row) == row:
        for slot in tl.static_range(TOPK):
            member = tl.load(members_ptr + row * TOPK + slot).to(tl.int64)
            x = tl.load(rows_ptr + member * H + offs_h, mask=(member >= 0) & (offs_h < H), other=0.0)
            if slot == 0:
                y = _accumulated(x)
            else:
                y += _accumulated(x)
        tl.store(y_ptr + row * H + offs_h, round_to(y, y_ptr.dtype.element_ty), mask=offs_h < H)


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
def pull_sums_kernel(
    y_ptr, sums_ptr, lead_ptr, addresses_ptr, rows_at, H,
    RANKS: tl.constexpr, CAPACITY: tl.constexpr, TOPK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """of sums_ptr the type is used: in which the ranks hold their sums"""
    token, offs_h = columns(H, BLOCK_H)
    offs_k = tl.arange(0, BLOCK_K)
    leads = tl.load(lead_ptr + token * TOPK + offs_k, mask=offs_k < TOPK, other=NOWHERE)
    for rank in tl.static_range(RANKS):
        lead = tl.max(tl.where((leads >= 0) & (leads // CAPACITY == rank), leads, NOWHERE), 0)
        rows = _region(addresses_ptr, rank, rows_at, sums_ptr.dtype)
        at = (lead % CAPACITY).to(tl.int64) * H + offs_h
        x = _accumulated(tl.load(rows + at, mask=(lead >= 0) & (offs_h < H), other=0.0))
        if rank == 0:
            y = x
        else:
            y += x
    y = tl.where(tl.min(leads, 0) == OVERFLOWN, float("nan"), y)
    tl.store(y_ptr + token * H + offs_h, round_to(y, y_ptr.dtype.element_ty), mask=offs_h < H)


@triton.jit
def _accumulated(x):
    """x in float32; float64 as it is."""
    if x.dtype == tl.float64:
        return x
    else:
        return widen(x).to(tl.float32)
