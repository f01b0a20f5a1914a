"""The kernel of `ops.kernels.grouped_gemm.grouped_activation`: a grouped product whose tiles end in an activation.

It is `m_grouped_persistent_kernel` but for two things. A tile of w holds the rows of gate and linear part of the same
columns, so that one product makes both. And what is stored is the activation of the product, which is first rounded as
if it had been stored.

    halves, or runs longer than the tile    a box of two parts: BLOCK_N rows of gates, BLOCK_N of linear part
    runs of S <= BLOCK_N columns            2 BLOCK_N adjacent rows: S of gates, S of linear part, S of gates, ...
"""

from ops.kernels.elementwise.chain_triton import columns_of_parts, up_to
from ops.kernels.grouped_gemm.high_precision_triton import store_rows, zero_tail
from ops.kernels.grouped_gemm.persistent_schedule import ends_of_groups, split_columns, tile_of_groups
from ops.kernels.grouped_gemm.ragged_tma import ragged_indices
from recipes.triton.gates import tl, triton
from recipes.triton.rounding import round_pairs_to, widen


@triton.jit
def split_parts(acc, RUNS: tl.constexpr):
    """Gate and linear part of a tile whose columns are RUNS times (gate, linear part)."""
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1] // 2
    parts = tl.reshape(acc, (HEIGHT, RUNS, 2, WIDTH // RUNS))
    a, b = tl.split(tl.permute(parts, (0, 1, 3, 2)))
    return tl.reshape(a, (HEIGHT, WIDTH)), tl.reshape(b, (HEIGHT, WIDTH))


@triton.jit
def pre_activation(acc, bias_ptr, group, columns, inside, N, DTYPE: tl.constexpr):
    """acc + bias[group, columns], rounded as it would be stored; [G, N] is the bias."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + group.to(tl.int64) * N + columns, mask=inside, other=0)
        acc += widen(bias).to(tl.float32)[None, :]
    return round_pairs_to(acc, DTYPE)


@triton.jit
def finish_activation(
    gate, linear, out, bias_ptr, operands, group, first, end, first_c, C,
    STEPS: tl.constexpr, KINDS: tl.constexpr, CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr,
    COUNT: tl.constexpr, GATE: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """Stores the activation of gate and linear part (without a gate, of the first), box by box: so few are in work at
    once that registers suffice."""
    HALF: tl.constexpr = gate.shape[1] // 2
    if HALF < out.block_shape[3]:
        columns = first_c + tl.arange(0, gate.shape[1])
        inside = columns < C
        columns_a, columns_b = columns, columns
        if GATE >= 0:
            columns_a, columns_b = columns_of_parts(columns, C, INTERLEAVE)
        N = C * (1 + (GATE >= 0))
        h_a = pre_activation(gate, bias_ptr, group, columns_a, inside, N, out.dtype)
        h_b = pre_activation(linear, bias_ptr, group, columns_b, inside, N, out.dtype)
        act, _ = up_to(
            h_a, h_b, COUNT, operands, (0,), (0,), first + tl.arange(0, gate.shape[0]), columns, columns, columns,
            first_c, end, C, C, inside,
            STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, GATE,
        )  # fmt: skip
        store_rows(out, widen(act).to(tl.float32), first, end, first_c)
    else:
        gate_0, gate_1 = split_columns(gate)
        linear_0, linear_1 = split_columns(linear)
        finish_activation(
            gate_0, linear_0, out, bias_ptr, operands, group, first, end, first_c, C,
            STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, COUNT, GATE, INTERLEAVE,
        )  # fmt: skip
        finish_activation(
            gate_1, linear_1, out, bias_ptr, operands, group, first, end, first_c + HALF, C,
            STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, COUNT, GATE, INTERLEAVE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_activation_kernel(
    a,  # [T, R]: descriptor, ragged along T
    w,  # [G, N / (parts * run), parts, run, R]: descriptor of the boxes above
    out,  # [T, C]: descriptor, ragged along T
    offsets_ptr,  # [G + 1] int64
    bias_ptr,  # [G, N] or None
    operands,  # (scales [T],), or (None,)
    rows,
    num_groups,
    R,
    C,
    run,
    STEPS: tl.constexpr,  # one step of `ops.kernels.elementwise.chain`: see there, here and below
    KINDS: tl.constexpr,
    CONSTANTS: tl.constexpr,
    DTYPES: tl.constexpr,
    ENTERS: tl.constexpr,
    COUNT: tl.constexpr,
    GATE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns of out
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """out[t, c] = f(sum_r a[t, r] w[g, n, r] + bias[g, n]) * scales[t], n: the column or the two of c; tile after tile
    of one group."""
    GATED: tl.constexpr = GATE >= 0
    HEIGHT: tl.constexpr = w.block_shape[3]
    BOTH: tl.constexpr = w.block_shape[2] * HEIGHT  # rows of w in a tile
    RUNS: tl.constexpr = BLOCK_N // INTERLEAVE if HEIGHT > BLOCK_N else 1
    num_tiles_n = tl.cdiv(C, BLOCK_N)
    ends = ends_of_groups(offsets_ptr, num_groups, BLOCK_M, GROUPS, AT_ONCE=BLOCK_M == 64)
    num_tiles_m = tl.max(ends, axis=0)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0), flatten=True):
        group, first, end, tile_n = tile_of_groups(offsets_ptr, ends, tile, num_tiles_n, BLOCK_M, BAND)
        first_c = tile_n * BLOCK_N
        first_w = tile_n * HEIGHT
        z, y, x = ragged_indices(first, end - first, 0, 1)
        acc = tl.zeros((BLOCK_M, BOTH), tl.float32)
        for r in range(0, R, BLOCK_K):
            a_tile = widen(a.load([z, y, x, r]).reshape(BLOCK_M, BLOCK_K))
            w_tile = widen(w.load([group, first_w // run, 0, first_w % run, r]).reshape(BOTH, BLOCK_K))
            acc = tl.dot(a_tile, w_tile.T, acc)
        gate, linear = acc, acc
        if GATED:
            gate, linear = split_parts(acc, RUNS)
        finish_activation(
            gate, linear, out, bias_ptr, operands, group, first, end, first_c, C,
            STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, COUNT, GATE, INTERLEAVE,
        )  # fmt: skip
    zero_tail(out, offsets_ptr, rows, num_groups, C, BLOCK_M)
