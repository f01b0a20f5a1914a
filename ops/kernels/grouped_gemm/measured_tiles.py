"""Tiles that were measured: a table for shapes of the user's own, read before the built-in rule of a grouped GEMM.

    load_tiles("tiles.json")    from now on the table is read first; `python -m bench tune --json tiles.json` writes it
    load_tiles(None)            the built-in rule alone, as at the start

An entry holds for one `Gemm` exactly, and for rows within a factor of sqrt(2) of those it was measured with; of several
the nearest in the logarithm. For what no entry holds, the built-in rule chooses. Nothing is read from the device.

    measured with 4096 and 65536 rows:    3000 rows -> 4096    5793 rows -> none    50000 rows -> 65536

A table is JSON: "format", "environment" (date, device, versions), "capability" of the GPU, and "tiles", each the fields
of a `MeasuredTile`. It holds for products of 16-bit operands on the GPU that it names. CUDA graphs keep the tiles they
were captured with.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import next_power_of_2
from recipes.triton.replay import forget

# Of the table; another one is refused. 1 was before the kernel in Gluon, 2 before it added, 3 before it fetched what it
# adds to, 4 before TN and NN in Gluon: entries would shut these out.
FORMAT = 5

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
PRODUCTS = ("TN", "NN", "NT")
GLUON_GROUPS = 512  # the most of a tile in Gluon: their ranks, or tiles, are in shared memory


class GroupedGemmConfig(NamedTuple):
    """Tile of the output, length of a step along the sum, and how it is compiled."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 0  # that share a multiprocessor, with descriptors; 0: pointers, a program for each tile
    # the most columns that are stored at once, with descriptors, in Gluon by boxes of 128 bytes a row
    box: int = 128
    # a kernel whose warps have roles (`m_grouped_gluon`, `high_precision_nt_gluon`); num_warps of them multiply
    gluon: bool = False
    fetches: bool = False  # there: what is added to, which L2 adds to otherwise

    def fitting(self, rows_a_step: int, dtype: torch.dtype, capability: tuple[int, int]) -> "GroupedGemmConfig":
        """With as many stages as shared memory holds; one stage is rows_a_step * block_k elements of the operands."""
        stage = rows_a_step * self.block_k * dtype.itemsize
        return self._replace(num_stages=min(self.num_stages, shared_memory_limit(capability) // stage))

    def compiled(self) -> dict[str, int]:
        """The arguments of a launch that choose how the kernel is compiled."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


class Gemm(NamedTuple):
    """A grouped product but for its rows: what tiles depend on. Weights are [num_groups, out_features, in_features].

    product: "TN", "NN" or "NT". dtype: of the operands. accumulate: the result is added to what is there (NT alone).
    """

    product: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    accumulate: bool
    num_groups: int
    out_features: int
    in_features: int


class MeasuredTile(NamedTuple):
    """The fastest tile of a product with so many rows; microseconds with it, and with the built-in rule's."""

    gemm: Gemm
    rows: int
    config: GroupedGemmConfig
    microseconds: float
    built_in_microseconds: float


@dataclass(frozen=True, eq=False)
class TileTable:
    """environment: name -> value, "date" and "device" among them. capability: of that device."""

    environment: Mapping[str, str]
    capability: tuple[int, int]
    tiles: tuple[MeasuredTile, ...]

    def find(self, gemm: Gemm, rows: int) -> GroupedGemmConfig | None:
        """The tile that was measured with about so many rows, or None."""
        return _nearest(self, gemm, rows)

    def record(self) -> dict[str, Any]:
        """Its content for JSON, from which `read_tiles` makes the table again."""
        return {
            "format": FORMAT,
            "environment": dict(self.environment),
            "capability": list(self.capability),
            "tiles": [_entry(tile) for tile in self.tiles],
        }


# Shared memory that one program may use, KiB (CUDA C++ programming guide, table of technical specifications).
_SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227}
_SMALLEST_SHARED_MEMORY = 99
BOX_BYTES = 128  # of a row, in what is stored at once in Gluon; it is half as high as the tile
_BARRIERS = 768  # bytes for those of a program in Gluon, and a queue; as compiled for sm_90a 680 at most
_BESIDES = 1536  # bytes of a program for barriers, and to spread a bias; as compiled for sm_90a 1048 at most


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory one program may use on a GPU of this compute capability."""
    major, minor = capability
    return 1024 * _SHARED_MEMORY.get(10 * major + minor, _SMALLEST_SHARED_MEMORY)


def shared_memory(config: GroupedGemmConfig, gemm: Gemm) -> int:
    """Bytes that the programs of a multiprocessor use: the stages, and with descriptors what is stored and added to."""
    used = (config.block_m + config.block_n) * config.block_k * gemm.dtype.itemsize * config.num_stages
    if not config.programs:
        return used
    stored = config.block_m * min(config.block_n, config.box) * gemm.out_dtype.itemsize
    if config.gluon:
        return used + stored + 4 * max(128, next_power_of_2(gemm.num_groups)) + _BARRIERS
    read = stored if gemm.accumulate and gemm.out_dtype.itemsize == 2 else 0
    return (used + stored + read + _BESIDES) * config.programs


def why_not_tile(config: GroupedGemmConfig, gemm: Gemm, capability: tuple[int, int]) -> str | None:
    """Why the kernels cannot run this product with this tile on such a GPU, as a sentence, or None."""
    powers = (config.block_m, config.block_n, config.block_k, config.num_warps)
    if min(powers) < 1 or any(power & (power - 1) for power in powers):
        return f"The tile {describe(config)} is not made of powers of two."
    if min(powers[:3]) < 16 or max(powers[:3]) > 256 or config.num_warps > 16:
        return f"The tile {describe(config)} is not within 16 to 256 a side and 16 warps."
    if config.num_stages < 1 or config.programs < 0:
        return f"The tile {describe(config)} and {config.programs} programs must have a stage, and no fewer than 0."
    if config.programs and capability != (9, 0):
        return f"The tile {describe(config)} is for descriptors, and so for compute capability 9.0 alone."
    if config.gluon:
        refusal = _why_not_in_gluon(config, gemm, capability)
        if refusal is not None:
            return refusal
    if config.fetches and not (config.gluon and gemm.accumulate):
        return f"The tile {describe(config)} fetches what it adds to: it is for kernels in Gluon that add."
    if config.box not in (64, 128):
        return f"The tile {describe(config)} is stored by 64 or 128 columns, not by {config.box}."
    used, limit = shared_memory(config, gemm), shared_memory_limit(capability)
    if used > limit:
        return f"The tile {describe(config)} needs {used} bytes of shared memory, and there are {limit}."
    return None


def _why_not_in_gluon(config: GroupedGemmConfig, gemm: Gemm, capability: tuple[int, int]) -> str | None:
    reason = why_no_gluon(capability)
    if reason is not None:
        return f"The tile {describe(config)} is one of kernels that cannot run. {reason}"
    if gemm.accumulate and gemm.out_dtype != torch.float32:
        return f"The tile {describe(config)} is for weight gradients that are written, or added to float32."
    if config[:2] != (128, 256) or config.num_warps != 8 or config.programs != 1:
        return f"The tile {describe(config)} must be 128x256, of 8 warps and one program."
    if config.num_stages < 2:
        return f"The tile {describe(config)} must have two stages or more: one is freed while the next is multiplied."
    if gemm.product == "TN" and config.block_k > 64:  # 128 bytes of each row, behind which lie the next 128 of each
        return f"The tile {describe(config)} must sum 64 features a step at most: halves of its columns are loaded."
    if gemm.num_groups > GLUON_GROUPS:
        return f"The tile {describe(config)} is for {GLUON_GROUPS} groups at most, and there are {gemm.num_groups}."
    return None


def describe(config: Sequence[int]) -> str:
    """128x256x64, 8 warps, 4 stages: the first five fields of a configuration, and whether its kernel is in Gluon."""
    block_m, block_n, block_k, num_warps, num_stages, *_ = config
    words = f"{block_m}x{block_n}x{block_k}, {num_warps} warps, {num_stages} stages"
    return f"{words} in Gluon" if getattr(config, "gluon", False) else words


# ---------------------------------------------------------------------------------------------- the table in use

_in_use: TileTable | None = None


def load_tiles(path: str | Path | None) -> TileTable | None:
    """Read this table before the built-in rule, from the next launch on; None: the built-in rule alone.

    Returns the table. Raises ValueError, and changes nothing, for a file that is no table of this format, that was
    measured on another GPU than torch's current one, or that has a tile which does not fit. Without a GPU a table is
    taken for what `explain(device="cuda")` says. OSError if the file cannot be read.
    """
    table = None if path is None else read_tiles(path)
    use_tiles(table)
    return table


def use_tiles(table: TileTable | None) -> None:
    """As `load_tiles`, for a table that is not in a file."""
    global _in_use
    _in_use = table
    forget()


def tiles_in_use() -> TileTable | None:
    """The table that was loaded."""
    return _in_use


@lru_cache(maxsize=4096)
def _nearest(table: TileTable, gemm: Gemm, rows: int) -> GroupedGemmConfig | None:
    near = [tile for tile in table.tiles if tile.gemm == gemm and _is_near(rows, tile.rows)]
    return min(near, key=lambda tile: abs(math.log(rows / tile.rows))).config if near else None


def _is_near(rows: int, measured: int) -> bool:
    return rows**2 <= 2 * measured**2 and measured**2 <= 2 * rows**2


# ---------------------------------------------------------------------------------------------------- the file


def read_tiles(path: str | Path) -> TileTable:
    """The table in this file. Raises ValueError as `load_tiles` does."""
    try:
        record = json.loads(Path(path).read_text())
        form = record["format"]
        if form == FORMAT:
            major, minor = map(int, record["capability"])
            table = TileTable(dict(record["environment"]), (major, minor), tuple(map(_tile, record["tiles"])))
            gpu, _ = table.environment["device"], table.environment["date"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no table of tiles: {type(error).__name__}: {error}. Write one with `python -m bench tune`."
        ) from error
    if form != FORMAT:
        raise ValueError(f"{path} has format {form}, but must have {FORMAT}. Measure it again: `python -m bench tune`.")
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else gpu
    if here != gpu:
        raise ValueError(f"{path} was measured on {gpu}, and this is {here}. Measure here: `python -m bench tune`.")
    for tile in table.tiles:
        refusal = why_not_tile(tile.config, tile.gemm, table.capability)
        if refusal is not None:
            raise ValueError(f"{path} cannot be used: {refusal} Leave that entry out, or measure again.")
    return table


def _entry(tile: MeasuredTile) -> dict[str, Any]:
    gemm = tile.gemm._asdict()
    names = {key: str(gemm[key]).removeprefix("torch.") for key in ("dtype", "out_dtype")}
    rest = {key: value for key, value in tile._asdict().items() if key != "gemm"}
    return gemm | names | rest | {"config": tile.config._asdict()}


def _tile(entry: Mapping[str, Any]) -> MeasuredTile:
    """Raises KeyError, TypeError or ValueError for what `_entry` does not write."""
    values = {name: entry[name] for name in Gemm._fields}
    gemm = Gemm(**values | {key: DTYPES[values[key]] for key in ("dtype", "out_dtype")})
    config = GroupedGemmConfig(**entry["config"])
    *sizes, gluon, fetches = config
    numbers = (entry["rows"], gemm.num_groups, gemm.out_features, gemm.in_features, *sizes)
    if any(type(number) is not int for number in numbers) or {*map(type, (gemm.accumulate, gluon, fetches))} != {bool}:
        raise TypeError(f"an entry holds something else than whole numbers: {entry}")
    if min(numbers[:4]) < 1 or gemm.product not in PRODUCTS or gemm.dtype.itemsize != 2:
        raise ValueError(f"an entry is of no product of 16-bit operands: {entry}")
    return MeasuredTile(gemm, entry["rows"], config, entry["microseconds"], entry["built_in_microseconds"])
