"""The Triton kernels of `ops.kernels.routing.routing`, which documents and launches them.

A program handles BLOCK_T tokens and all experts. Logits are compared as order-preserving integers, so that one integer
below all logits can mark the experts already chosen. NaN is the largest, as in torch's sort, and -0 equals 0.
"""
# T tokens, E experts

from recipes.triton.gates import tl, triton

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _order(x):
    """int32 in the order of float32 x, above LOWEST."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & HIGHEST), HIGHEST)


@triton.jit
def _from_order(key):
    """The x of `_order`; HIGHEST is a NaN."""
    return (key ^ ((key >> 31) & HIGHEST)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits_ptr, probs_ptr, indices_ptr, softmax_ptr, counts_ptr, sums_ptr, T, E,
    TOPK: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """counts, sums [programs, E]: of a program's tokens, how many chose e, and the sum of their softmax."""
    offs_e = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.float32)
    sums = tl.zeros([BLOCK_E], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.num_programs(0)):
        chosen, softmax = _route_block(
            logits_ptr, probs_ptr, indices_ptr, softmax_ptr, block, T, E, TOPK, NORMALIZED, BLOCK_T, BLOCK_E, BLOCK_K
        )
        counts += tl.sum(chosen.to(tl.float32), 0)
        sums += tl.sum(softmax, 0)
    share = tl.program_id(0).to(tl.int64) * E + offs_e
    tl.store(counts_ptr + share, counts, mask=offs_e < E)
    tl.store(sums_ptr + share, sums, mask=offs_e < E)


@triton.jit
def _route_block(
    logits_ptr, probs_ptr, indices_ptr, softmax_ptr, block, T, E,
    TOPK: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes what is of each token; returns which experts it chose, and its softmax, zero outside."""
    offs_t = (block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    offs_k = tl.arange(0, BLOCK_K)
    inside = (offs_t < T)[:, None] & (offs_e < E)[None, :]
    at = offs_t[:, None] * E + offs_e[None, :]
    logits = tl.load(logits_ptr + at, mask=inside, other=0.0)
    key = tl.where((offs_e < E)[None, :], _order(logits), LOWEST)
    largest = _from_order(tl.max(key, 1))
    softmax = tl.where(inside, tl.exp(logits - largest[:, None]), 0.0)
    total = tl.where(offs_t < T, tl.sum(softmax, 1), 1.0)
    softmax /= total[:, None]
    tl.store(softmax_ptr + at, softmax, mask=inside)

    experts = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for slot in range(TOPK):
        best = tl.max(key, 1)
        expert = tl.min(tl.where(key == best[:, None], offs_e[None, :], BLOCK_E), 1)
        key = tl.where(offs_e[None, :] == expert[:, None], LOWEST, key)
        experts = tl.where((offs_k == slot)[None, :], expert[:, None], experts)
        chosen = tl.where((offs_k == slot)[None, :], best[:, None], chosen)
    probs = tl.where((offs_k < TOPK)[None, :], tl.exp(_from_order(chosen) - largest[:, None]), 0.0)
    if NORMALIZED:
        total = tl.sum(probs, 1)
    probs /= total[:, None]
    written = (offs_t < T)[:, None] & (offs_k < TOPK)[None, :]
    slots = offs_t[:, None] * TOPK + offs_k[None, :]
    tl.store(probs_ptr + slots, probs, mask=written)
    tl.store(indices_ptr + slots, experts.to(tl.int64), mask=written)

    return inside & (key == LOWEST), softmax


@triton.jit(do_not_specialize=["P", "pairs"])
def balance_kernel(
    counts_ptr, sums_ptr, totals_ptr, fractions_ptr, losses_ptr, P, E, pairs, loss_scale,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Of the counts and sums [P, E] of `route_kernel`: totals [E] int64, fractions = totals / pairs, and of the experts
    of each program loss_scale sum_e fractions[e] sums[e]. pairs: at least 1."""
    offs_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    totals = tl.zeros([BLOCK_E], tl.int32)
    sums = tl.zeros([BLOCK_E], tl.float32)
    for first in range(0, P, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        at = offs_p[:, None] * E + offs_e[None, :]
        inside = (offs_p < P)[:, None] & (offs_e < E)[None, :]
        totals += tl.sum(tl.load(counts_ptr + at, mask=inside, other=0.0).to(tl.int32), 0)
        sums += tl.sum(tl.load(sums_ptr + at, mask=inside, other=0.0), 0)
    fractions = tl.div_rn(totals.to(tl.float32), tl.zeros([BLOCK_E], tl.float32) + pairs)
    tl.store(totals_ptr + offs_e, totals.to(tl.int64), mask=offs_e < E)
    tl.store(fractions_ptr + offs_e, fractions, mask=offs_e < E)
    tl.store(losses_ptr + tl.program_id(0), tl.sum(fractions * sums, 0) * loss_scale)


@triton.jit
def _dsoftmax(dy, y):
    return (dy - tl.sum(dy * y, 1)[:, None]) * y


@triton.jit(do_not_specialize=["T"])
def droute_kernel(
    dprobs_ptr, dloss_ptr, probs_ptr, indices_ptr, softmax_ptr, fractions_ptr, dlogits_ptr, loss_scale, T, E,
    TOPK: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """loss_scale: num_experts / num_tokens. dprobs_ptr or dloss_ptr may be None."""
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    inside = (offs_t < T)[:, None] & (offs_e < E)[None, :]
    at = offs_t[:, None] * E + offs_e[None, :]
    softmax = tl.load(softmax_ptr + at, mask=inside, other=0.0)
    d_softmax = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    if dloss_ptr is not None:
        fractions = tl.load(fractions_ptr + offs_e, mask=offs_e < E, other=0.0)
        d_softmax += (fractions * (tl.load(dloss_ptr) * loss_scale))[None, :]
    d_chosen = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    if dprobs_ptr is not None:
        offs_k = tl.arange(0, BLOCK_K)
        slots = offs_t * TOPK
        if NORMALIZED:
            written = (offs_t < T)[:, None] & (offs_k < TOPK)[None, :]
            dprobs = tl.load(dprobs_ptr + slots[:, None] + offs_k[None, :], mask=written, other=0.0)
            probs = tl.load(probs_ptr + slots[:, None] + offs_k[None, :], mask=written, other=0.0)
            mean = tl.sum(dprobs * probs, 1)
        for slot in range(TOPK):
            expert = tl.load(indices_ptr + slots + slot, mask=offs_t < T, other=0).to(tl.int32)
            d = tl.load(dprobs_ptr + slots + slot, mask=offs_t < T, other=0.0)
            if NORMALIZED:
                d = (d - mean) * tl.load(probs_ptr + slots + slot, mask=offs_t < T, other=0.0)
            d_chosen = tl.where(offs_e[None, :] == expert[:, None], d[:, None], d_chosen)
    if NORMALIZED:
        dlogits = d_chosen
        if dloss_ptr is not None:
            dlogits += _dsoftmax(d_softmax, softmax)
    else:
        dlogits = _dsoftmax(d_softmax + d_chosen, softmax)
    tl.store(dlogits_ptr + at, dlogits, mask=inside)
