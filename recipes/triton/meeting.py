"""Meetings: the programs of a group learn the maximum of all their tiles while these are still in registers.

    meeting = empty_meetings(groups, device)           of a launch, [G, WORDS] int32
    arrive(meeting_ptr, amax)                          in each program: raise the group's maximum, and be counted
    amax = amax_of_all(meeting_ptr, programs)          wait until so many have arrived

So a tensor whose scale follows from its amax is read once. A program waits for later ones, which therefore have to fit
on the GPU beside it: programs of a group are at most `most_programs`, half of what the GPU holds at once, so that two
launches may wait side by side; nothing here casts on more streams. In kernels in Gluon so many share the tiles of a
large group, and read all but one of their tiles twice; in others a group of more than `most_rows` finds its amax by a
launch before, into the same memory (`known_amax`).

Each group has 128 bytes of its own, and one thread of a program polls, rarely: where all threads polled counters that
lay side by side, arrivals waited for the polls, and two launches were faster (`bench/results/tuning.md`). A wait of
more than 20 seconds ends the kernel with an error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recipes.triton.gates import tl, triton
from recipes.triton.launch import cdiv, properties

# Of a meeting: the bits of the amax, whose order is that of the non-negative float32 numbers; how many have arrived.
WORDS = 32
_WORDS = tl.constexpr(WORDS)

REGISTERS = 65536  # of a multiprocessor
LAUNCHES = 2  # may wait side by side


def empty_meetings(groups: int, device: torch.device) -> Tensor:
    """Meetings at which nobody has arrived, [G, WORDS]."""
    return torch.zeros(groups, WORDS, dtype=torch.int32, device=device)


class MeetingTile(NamedTuple):
    """Tile of a program that waits for the others of its group, and the registers that a thread of it may take."""

    block_m: int
    block_k: int
    num_warps: int
    registers: int


def most_programs(x: Tensor, tile: MeetingTile) -> int:
    """How many programs may wait for each other on x's GPU."""
    on_one = REGISTERS // (32 * tile.num_warps * tile.registers)
    return on_one * properties(x.get_device()).multi_processor_count // LAUNCHES


def most_rows(x: Tensor, columns: int, tile: MeetingTile) -> int:
    """Of how many rows, of so many columns, the programs may wait for each other on x's GPU, a tile each."""
    return most_programs(x, tile) // cdiv(columns, tile.block_k) * tile.block_m


# Polls take about 0.7 us: 2^25 of them more than 20 s.
_WAIT_OF_ONE = """{
    .reg .pred p;
    .reg .b32 found, left;
    mov.u32 found, %tid.x;
    setp.ne.u32 p, found, 0;
    @p bra ARRIVED;
    mov.u32 left, 0x2000000;
    POLL:
    ld.relaxed.gpu.global.s32 found, [$1];
    setp.ge.s32 p, found, $2;
    @p bra SEEN;
    nanosleep.u32 100;
    sub.u32 left, left, 1;
    setp.ne.u32 p, left, 0;
    @p bra POLL;
    trap;
    SEEN:
    FENCE
    ARRIVED:
    bar.sync 0;
    mov.b32 $0, 0;
}"""
_WAIT = tl.constexpr(_WAIT_OF_ONE.replace("FENCE", ""))
_WAIT_AND_SEE = tl.constexpr(_WAIT_OF_ONE.replace("FENCE", "fence.acq_rel.gpu;"))
# What an atomic returns has happened in the memory that all programs share, and its sign, 0, goes into the count: so
# the count is behind the amax, without a fence. A fence waits for other stores and empties L1: with them a cast took
# 1.15 times as long on an H200.
_ARRIVE = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 found;
    mov.u32 found, %tid.x;
    setp.ne.u32 p, found, 0;
    @p bra DONE;
    atom.relaxed.gpu.global.max.s32 found, [$1], $2;
    shr.u32 found, found, 31;
    add.s32 found, found, 1;
    red.relaxed.gpu.global.add.s32 [$1+4], found;
    DONE:
    mov.b32 $0, 0;
}""")


@triton.jit
def arrive(meeting_ptr, amax):
    """Raise the amax of a group's meeting, at meeting_ptr, and count this program. amax: float32, no NaN. Not under the
    interpreter."""
    bits = tl.maximum(amax, 0.0).to(tl.int32, bitcast=True)
    tl.inline_asm_elementwise(_ARRIVE, "=r,l,r", [meeting_ptr, bits], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def amax_of_all(meeting_ptr, programs):
    """The amax of a meeting, once so many have arrived. Not under the interpreter, which runs them one by one."""
    tl.inline_asm_elementwise(
        _WAIT, "=r,l,r", [meeting_ptr + 1, programs], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip
    amax = tl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [meeting_ptr], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip
    return amax.to(tl.float32, bitcast=True)


@triton.jit
def raise_amax_at(amax_ptr, amax, active):
    """Raise one amax, of which amax_ptr are the bits; amax is NaN only where all values are."""
    amax = tl.maximum(amax, 0.0)
    tl.atomic_max(amax_ptr, amax.to(tl.int32, bitcast=True), mask=active, sem="relaxed")


@triton.jit
def be_counted(meeting_ptr):
    """Count this program, behind what its threads had written before the last barrier."""
    tl.atomic_add(meeting_ptr + 1, 1, sem="release")


@triton.jit
def wait_for_all(meeting_ptr, programs):
    """Until so many are counted, and see what they had written."""
    tl.inline_asm_elementwise(
        _WAIT_AND_SEE, "=r,l,r", [meeting_ptr + 1, programs], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def known_amax(meeting_ptr, active):
    """The amax that an earlier launch has found; 0 where not active."""
    return tl.load(meeting_ptr, mask=active, other=0).to(tl.float32, bitcast=True)


@triton.jit
def largest_group(offsets_ptr, num_groups):
    """The rows of the largest group."""
    CHUNK: tl.constexpr = 128
    largest = tl.zeros([CHUNK], tl.int64)
    for start in range(0, num_groups, CHUNK):
        offs_g = start + tl.arange(0, CHUNK)
        begins = tl.load(offsets_ptr + offs_g, mask=offs_g < num_groups, other=0)
        ends = tl.load(offsets_ptr + offs_g + 1, mask=offs_g < num_groups, other=0)
        largest = tl.maximum(largest, ends - begins)
    return tl.max(largest, axis=0)


@triton.jit
def meeting_of(meetings_ptr, group):
    return meetings_ptr + group * _WORDS
