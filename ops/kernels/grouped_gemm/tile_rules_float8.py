"""Which tile a product of `grouped_gemm.float8` runs with: a rule over shapes and dtypes, measured on an H200, but
split accumulation of codes per tensor in Gluon on an H100."""
# G groups, N out features, K in features

from typing import Any, NamedTuple

import torch

from ops.kernels.grouped_gemm.measured_tiles import GLUON_GROUPS, Gemm, GroupedGemmConfig, shared_memory_limit
from ops.kernels.grouped_gemm.persistent_schedule import MOST_GROUPS
from ops.kernels.grouped_gemm.tile_rules import FEW_ROWS, MANY_ROWS
from recipes.tensors.formats import ScaleLayout
from recipes.triton.gates import why_no_gluon

# A group, on average: from here on TN with scales of blocks takes tiles in a fixed order where memory is fast. Of 512
# to 1024 rows that is 1 % faster than a queue on an H200, of 2048 as fast, of 256 4 % slower (`tuning.md`).
IN_ORDER_ROWS = 384
BLOCK = 128  # codes of one scale, and terms of one sum in split accumulation


class GroupedFloat8Config(NamedTuple):
    """Tile of the output, length of a step along the sum, and how the kernel is compiled and launched: first what
    `GroupedGemmConfig` has.

    part_m, part_n: what a kernel in Triton multiplies at once, the tile or half of it. Two parts are for split
    accumulation.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int  # that share a multiprocessor, with descriptors; 0: pointers, a program for each tile
    part_m: int
    part_n: int
    gluon: bool = False  # the kernel whose warps have roles (`m_grouped_gluon`); num_warps of them multiply
    fetches: bool = False  # there: what is added to, which L2 adds to otherwise

    def compiled(self) -> dict[str, int]:
        """The arguments of a launch that choose how the kernel is compiled."""
        return GroupedGemmConfig(*self[:5]).compiled()

    def half(self) -> tuple[int, int]:
        """Rows and columns that are stored at once: as they are multiplied, or of half the columns."""
        return self.part_m, self.part_n if self.part_m < self.block_m else self.block_n // 2


def m_grouped_float8_config(
    rows: int,
    num_groups: int,
    *,
    layout: ScaleLayout,
    promote: bool,
    out_dtype: torch.dtype,
    descriptors: bool,
    capability: tuple[int, int],
    gluon: bool,
    batch_invariant: bool = False,
) -> GroupedFloat8Config:
    """Tiles of the kernel for TN, the same for any number of rows if batch_invariant. promote: split accumulation.
    descriptors: see `takes_descriptors`, of all matrices, and at most MOST_GROUPS. gluon: whether its kernel can run
    (`why_no_gluon`)."""
    if not _uses_descriptors(descriptors, capability):
        return _POINTERS
    few = rows < FEW_ROWS * num_groups and not batch_invariant
    if few or layout == "row":
        return _SMALL
    if gluon and num_groups <= GLUON_GROUPS:
        return _HIGH_IN_GLUON if layout == "square" else WIDE_IN_GLUON
    if not promote:
        return _WIDE
    # With scales of rows and columns, and a bias, _IN_PARTS takes eight registers more than there are.
    return _IN_PARTS if out_dtype.itemsize == 2 and layout != "vector" else _SMALL


def k_grouped_float8_config(
    columns: int,
    num_groups: int,
    *,
    layout: ScaleLayout,
    promote: bool,
    out_dtype: torch.dtype,
    accumulate: bool,
    descriptors: bool,
    capability: tuple[int, int],
    gluon: bool,
) -> GroupedFloat8Config:
    """Tiles of the kernel for NT. columns: of the padded groups. accumulate: what is there needs shared memory too. The
    rest as above."""
    if not _uses_descriptors(descriptors, capability):
        return _POINTERS
    blockwise = layout == "row"
    if gluon and num_groups <= GLUON_GROUPS and (not accumulate or out_dtype.itemsize == 4):
        if not blockwise:
            return WIDE_IN_GLUON._replace(num_stages=3, fetches=True) if accumulate else WIDE_IN_GLUON
        if not accumulate or columns >= MANY_ROWS * num_groups:
            return _HIGH_IN_GLUON
        # those who fetch take the registers of a third consumer
        return _HIGH_IN_GLUON._replace(block_m=128, num_warps=8, part_m=128, fetches=True)
    if blockwise and (accumulate or out_dtype.itemsize == 4):
        return _SMALL
    if not promote:
        return _WIDE
    if out_dtype.itemsize == 4:
        return _WIDE_IN_PARTS
    return _SMALL if accumulate else _IN_PARTS


def nt_reads_rows(rows: int, num_groups: int, N: int, K: int, capability: tuple[int, int]) -> bool:
    """Whether NT with scales per tensor, in split accumulation, had better read dy [rows, N] as it lies, and no
    columnwise copy of it is made.

    Transposing costs the product 0 to 15 %, the more the longer its sums are, and where x [rows, K] has many features
    that is more than the copy, N * rows bytes, takes. Measured at 100 to 2048 rows a group (`tuning.md`).
    """
    if why_no_gluon(capability) is not None or num_groups > GLUON_GROUPS or N % 16 or K % 8 or not rows:
        return False
    return K <= 2048 and rows * K <= 1024 * 2048 * num_groups


def promotes(layout: ScaleLayout, split_accumulation: bool) -> bool:
    """Whether sums of 128 terms are added in float32: always where they have scales of their own."""
    return split_accumulation or layout in ("row", "square")


def built_in_float8_config(
    gemm: Gemm, rows: int, layout: ScaleLayout, split_accumulation: bool, capability: tuple[int, int]
) -> GroupedFloat8Config:
    """The tiles of these two rules for contiguous outputs. layout: of the second operand's scales."""
    product, _, out_dtype, accumulate, G, N, K = gemm
    width = N if product == "TN" else K
    about: dict[str, Any] = {
        "promote": promotes(layout, split_accumulation),
        "out_dtype": out_dtype,
        "descriptors": width * out_dtype.itemsize % 16 == 0 and G <= MOST_GROUPS,
        "capability": capability,
    }
    about["gluon"] = why_no_gluon(capability) is None
    if product == "NT":
        return k_grouped_float8_config(rows, G, layout=layout, accumulate=accumulate, **about)
    return m_grouped_float8_config(rows, G, layout=layout, **about)


def _uses_descriptors(descriptors: bool, capability: tuple[int, int]) -> bool:
    """The tiles are Hopper's, and take its shared memory."""
    return descriptors and capability >= (9, 0) and shared_memory_limit(capability) >= shared_memory_limit((9, 0))


# Steps of 128 everywhere: a promotion is then one step, and a step has one scale.
_WIDE = GroupedFloat8Config(128, 256, BLOCK, num_warps=8, num_stages=3, programs=1, part_m=128, part_n=256)
WIDE_IN_GLUON = _WIDE._replace(num_stages=4, gluon=True)
_HIGH_IN_GLUON = GroupedFloat8Config(
    192, 128, BLOCK, num_warps=12, num_stages=4, programs=1, part_m=192, part_n=128, gluon=True
)
_WIDE_IN_PARTS = _WIDE._replace(part_n=128)
# Two programs of four warps each: while one scales, the other multiplies. With float32 results, and with what is added
# to, shared memory does not hold two with three stages of the first of these.
_IN_PARTS = GroupedFloat8Config(128, 128, BLOCK, num_warps=4, num_stages=3, programs=2, part_m=64, part_n=128)
_SMALL = GroupedFloat8Config(64, 128, BLOCK, num_warps=4, num_stages=3, programs=2, part_m=64, part_n=128)
_POINTERS = GroupedFloat8Config(64, 64, BLOCK, 4, num_stages=2, programs=0, part_m=64, part_n=64)
