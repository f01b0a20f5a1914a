"""`rank_groups` in a kernel of its own. Import this only where `recipes.triton.gates.why_no_gluon` says None."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ops.kernels.grouped_gemm.tile_queue_gluon import rank_groups
from recipes.triton.launch import next_power_of_2


@gluon.jit(do_not_specialize=["num_groups"])
def ranks_kernel(offsets_ptr, ranks_ptr, num_groups, GROUPS: gl.constexpr, MIXED: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([GROUPS // 128], [32], [4], [0])
    ranks = gl.allocate_shared_memory(gl.int32, [GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rank_groups(offsets_ptr, num_groups, ranks, MIXED)
    gl.store(ranks_ptr + gl.arange(0, GROUPS, layout), ranks.load(layout))


def ranks_of(sizes: Tensor, mixed: bool) -> Tensor:
    """The rank of each group [G] of these sizes, and then GROUPS for none, up to GROUPS."""
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    groups = max(128, next_power_of_2(sizes.numel()))
    ranks = torch.empty(groups, dtype=torch.int32, device=sizes.device)
    ranks_kernel[(1,)](offsets, ranks, sizes.numel(), GROUPS=groups, MIXED=mixed, num_warps=4)
    return ranks
