"""Barriers of copies into the shared memory of a program, of kernels in Gluon.

The memory of barriers of copies must be theirs to the kernel's end: PTX allows no other use of it before they are
invalidated. Where the compiler, for which they were dead once all were waited for, had put scales there, 0.6 % of the
programs of a cast read wrong ones on an H100, as if the GPU wrote the barriers' state late (`bench/results/tuning.md`).
A kernel ends with `invalidate`, which is a use of them.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def invalidate(barriers):
    """All of these, [n, 1]; every thread has waited for those that copies had, and met the others since."""
    COUNT: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(COUNT):
        mbarrier.invalidate(barriers.index(i))
