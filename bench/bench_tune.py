"""Find the fastest tiles of the grouped GEMM for given shapes, and write them as a table for `fuser.load_tiles`.

Measured for each GroupedLinear, in bf16, on random numbers and random splits: fprop (TN), dgrad (NN), wgrad (NT), and
wgrad added to an fp32 main_grad; for a model's expert layer, those of FC1 and FC2. Every candidate is first checked
against float64. Then they are timed interleaved by CUDA events, with the L2 cache overwritten before each turn;
medians. The built-in choice is kept unless another tile is faster by `MARGIN`.
"""
# G groups, N out features, K in features, R rows

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.environment import environment
from bench.models import EXPERT_SHAPES
from bench.results import add_json_argument, write_results
from bench.routing import split_sizes
from bench.table import print_table
from bench.timing import Timing, time_interleaved
from bench.usage import UsageError, require_positive
from ops.kernels.grouped_gemm.high_precision import grouped_gemm_nn, grouped_gemm_nt, grouped_gemm_tn
from ops.kernels.grouped_gemm.measured_tiles import (
    Gemm,
    GroupedGemmConfig,
    MeasuredTile,
    TileTable,
    describe,
    tiles_in_use,
    use_tiles,
    why_not_tile,
)
from ops.kernels.grouped_gemm.operands import row_slices
from ops.kernels.grouped_gemm.tile_rules import MANY_ROWS, built_in_config
from recipes.tensors.splits import Splits
from recipes.triton.gates import triton

Weights = tuple[int, int, int]  # G, N, K

MARGIN = 0.02  # relative to the built-in choice; smaller differences change sign between runs on an H200
DEFAULT_MODEL = "qwen3-30b-a3b"
WARMUP = 3

# The fastest of many on an H200: the first three with 512 or more rows per group, the last three with fewer.
ON_DESCRIPTORS = [
    GroupedGemmConfig(128, 256, 64, num_warps=8, num_stages=4, programs=1),
    GroupedGemmConfig(128, 256, 64, num_warps=8, num_stages=3, programs=1),
    GroupedGemmConfig(64, 256, 64, num_warps=4, num_stages=4, programs=1),
    GroupedGemmConfig(256, 128, 64, num_warps=8, num_stages=3, programs=1),
    GroupedGemmConfig(128, 128, 64, num_warps=8, num_stages=5, programs=1),
    GroupedGemmConfig(64, 128, 64, num_warps=4, num_stages=3, programs=2),
    GroupedGemmConfig(64, 128, 64, num_warps=4, num_stages=4, programs=1),
    GroupedGemmConfig(64, 64, 64, num_warps=4, num_stages=4, programs=2),
]
# For GPUs without TMA-descriptor kernels; not measured.
ON_POINTERS = [
    GroupedGemmConfig(128, 256, 32, num_warps=8, num_stages=3),
    GroupedGemmConfig(128, 128, 64, num_warps=4, num_stages=3),
    GroupedGemmConfig(128, 128, 32, num_warps=4, num_stages=4),
    GroupedGemmConfig(128, 64, 64, num_warps=4, num_stages=3),
    GroupedGemmConfig(64, 128, 64, num_warps=4, num_stages=3),
    GroupedGemmConfig(64, 64, 64, num_warps=4, num_stages=4),
]


def gemms(weights: Weights) -> dict[str, Gemm]:
    """The products of one GroupedLinear by name."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return {
        "fprop": Gemm("TN", bf16, bf16, False, *weights),
        "dgrad": Gemm("NN", bf16, bf16, False, *weights),
        "wgrad": Gemm("NT", bf16, bf16, False, *weights),
        "wgrad to main_grad": Gemm("NT", bf16, fp32, True, *weights),
    }


def candidates(gemm: Gemm, rows: int, capability: tuple[int, int]) -> list[GroupedGemmConfig]:
    """The built-in choice, its variants with fewer or more rows, then other tiles that fit the same kind of kernel;
    empty where elements are loaded one by one."""
    rule, *near = (built_in_config(gemm, n, capability) for n in (rows, 0, MANY_ROWS * gemm.num_groups))
    aligned = gemm.out_features % 16 == gemm.in_features % 16 == 0
    listed = ON_DESCRIPTORS if rule.programs else ON_POINTERS if aligned else []
    fitting = [tile for tile in [*near, *listed] if why_not_tile(tile, gemm, capability) is None]
    return list(dict.fromkeys([rule, *fitting]))


def choose(seconds: dict[GroupedGemmConfig, float], rule: GroupedGemmConfig) -> GroupedGemmConfig:
    """The fastest tile, or the built-in choice unless that is slower by `MARGIN`."""
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < (1 - MARGIN) * seconds[rule] else rule


@dataclass(frozen=True)
class GemmCase:
    """One product with its operands and output."""

    gemm: Gemm
    splits: Splits
    left: Tensor  # [R, K] for TN, else [R, N]
    right: Tensor  # [R, K] for NT, else [G, N, K]
    out: Tensor

    @property
    def flop(self) -> int:
        return 2 * self.splits.rows * self.gemm.out_features * self.gemm.in_features

    def run(self) -> None:
        if self.gemm.product == "TN":
            grouped_gemm_tn(self.left, self.right, self.splits, out=self.out)
        elif self.gemm.product == "NN":
            grouped_gemm_nn(self.left, self.right, self.splits, out=self.out)
        else:
            grouped_gemm_nt(self.left, self.right, self.splits, out=self.out, accumulate=self.gemm.accumulate)

    def error(self) -> float:
        """The largest error of a run against float64, relative to one rounding plus 1/1000 of the group's RMS."""
        before = 1.0 if self.gemm.accumulate else 0.0
        self.out.fill_(before if self.gemm.accumulate else torch.nan)
        self.run()
        worst = torch.zeros((), dtype=torch.float64, device=self.out.device)
        for group, rows in row_slices(self.splits):
            left = self.left[rows].double()
            if self.gemm.product == "NT":
                got, exact = self.out[group], left.T @ self.right[rows].double() + before
            else:
                weight = self.right[group].double()
                got, exact = self.out[rows], left @ (weight.T if self.gemm.product == "TN" else weight)
            if got.numel():
                rms = exact.square().mean().sqrt()
                allowed = torch.finfo(got.dtype).eps / 2 * exact.abs() + 1e-3 * rms + 1e-30
                error = ((got.double() - exact).abs() / allowed).nan_to_num(nan=torch.inf)
                worst = torch.maximum(worst, error.max())
        return worst.item()


def gemm_case(gemm: Gemm, rows: int, device: torch.device | str) -> GemmCase:
    G, N, K = gemm[4:]
    torch.manual_seed(0)
    splits = Splits.make(split_sizes(G, rows, "random"), rows=rows, device=device)
    x, w, dy = (torch.randn(shape, dtype=gemm.dtype, device=device) for shape in ((rows, K), (G, N, K), (rows, N)))
    left, right, like = {"TN": (x, w, dy), "NN": (dy, w, x), "NT": (dy, x, w)}[gemm.product]
    return GemmCase(gemm, splits, left, right, torch.empty_like(like, dtype=gemm.out_dtype))


class Tuned(NamedTuple):
    """One product: the time of each correct candidate, the built-in choice first, and messages on the others.

    wrong: candidates with a wrong result. left_out: candidates that could not be compiled or launched.
    """

    name: str
    gemm: Gemm
    rows: int
    flop: int
    times: dict[GroupedGemmConfig, Timing]
    wrong: list[str]
    left_out: list[str]

    @property
    def rule(self) -> GroupedGemmConfig:
        return next(iter(self.times))

    @property
    def chosen(self) -> GroupedGemmConfig:
        return choose({tile: timing.median for tile, timing in self.times.items()}, self.rule)

    def measured(self) -> MeasuredTile:
        chosen, rule = (round(1e6 * self.times[tile].median, 2) for tile in (self.chosen, self.rule))
        return MeasuredTile(self.gemm, self.rows, self.chosen, chosen, rule)


def tune(
    weights: Weights, rows: int, *, device: torch.device | str, capability: tuple[int, int], rounds: int
) -> Iterator[Tuned]:
    """Tune the products of one GroupedLinear. Raises RuntimeError if the built-in choice is wrong or does not run."""
    before = tiles_in_use()
    try:
        for name, gemm in gemms(weights).items():
            yield _tune_product(name, gemm, rows, device, capability, rounds)
    finally:
        use_tiles(before)


def _tune_product(
    name: str, gemm: Gemm, rows: int, device: torch.device | str, capability: tuple[int, int], rounds: int
) -> Tuned:
    case = gemm_case(gemm, rows, device)
    runs: dict[str, Callable[[], None]] = {}
    tiles: dict[str, GroupedGemmConfig] = {}
    wrong, left_out = [], []
    for config in candidates(gemm, rows, capability):
        alone = TileTable({}, capability, (MeasuredTile(gemm, rows, config, 0.0, 0.0),))
        use_tiles(alone)
        label = label_of(config)
        try:
            error = case.error()
        except (triton.TritonError, RuntimeError) as failure:
            left_out.append(f"{name}, {label}: {failure}")
            continue
        if error > 1:
            wrong.append(f"{name}, {label}: {error:.3g} times the error that is allowed")
            continue
        tiles[label], runs[label] = config, partial(_run_with, alone, case)
    if not runs or next(iter(tiles.values())) != built_in_config(gemm, rows, capability):
        raise RuntimeError(f"the built-in tile fails: {' '.join([*wrong, *left_out])}")
    times = time_interleaved(runs, rounds=rounds, warmup=WARMUP, device=device, clock="device")
    return Tuned(name, gemm, rows, case.flop, {tiles[label]: time for label, time in times.items()}, wrong, left_out)


def _run_with(table: TileTable, case: GemmCase) -> None:
    use_tiles(table)
    case.run()


def label_of(config: GroupedGemmConfig) -> str:
    return f"{describe(config)}, {config.programs or 'no'} programs"


def show(tuned: Tuned) -> None:
    """Print all candidates, fastest first."""
    G, N, K = tuned.gemm[4:]
    rows = []
    for tile, timing in sorted(tuned.times.items(), key=lambda item: item[1].median):
        mark = " and ".join(word for word, one in (("built-in", tuned.rule), ("chosen", tuned.chosen)) if tile == one)
        rate = tuned.flop / timing.median / 1e12
        rows.append(
            [
                label_of(tile),
                f"{1e6 * timing.median:.1f}",
                f"{1e6 * (timing.high - timing.low):.1f}",
                f"{rate:.0f}",
                mark,
            ]
        )
    title = f"{tuned.name} of {G} groups, {K} -> {N}, {tuned.rows} rows"
    print_table(title, ["tile", "us", "quartiles apart", "TFLOP/s", ""], rows)
    for sentence in tuned.left_out:
        print(f"  left out: {sentence}")
    for sentence in tuned.wrong:
        print(f"  FAILED: {sentence}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=EXPERT_SHAPES, help=f"FC1 and FC2 of its experts (default: {DEFAULT_MODEL})")
    parser.add_argument("--groups", type=int, help="instead of a model: how many groups")
    parser.add_argument("--in", dest="in_features", metavar="K", help="in features; by commas, of several linears")
    parser.add_argument("--out", dest="out_features", metavar="N", help="out features; as many")
    parser.add_argument("--rows", metavar="R", help="of all groups, by commas (default: the model's)")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default: %(default)s)")
    add_json_argument(parser, "tune")


def asked_for(arguments: argparse.Namespace) -> tuple[list[Weights], list[int]]:
    """The linears and the numbers of rows. Raises UsageError for options that cannot be combined."""
    own = (arguments.groups, arguments.in_features, arguments.out_features)
    if own == (None, None, None):
        shape = EXPERT_SHAPES[arguments.model or DEFAULT_MODEL]
        E, H, F = shape.num_experts, shape.hidden, shape.intermediate
        rows = [shape.rows] if arguments.rows is None else _numbers("rows", arguments.rows)
        return [(E, 2 * F, H), (E, H, F)], rows
    if arguments.model is not None or None in (*own, arguments.rows):
        raise UsageError("give --model, or all of --groups, --in, --out and --rows.")
    wide, narrow = _numbers("out", arguments.out_features), _numbers("in", arguments.in_features)
    if len(wide) != len(narrow) or arguments.groups < 1:
        raise UsageError(
            f"--out {arguments.out_features} and --in {arguments.in_features} must be as many, --groups > 0."
        )
    return [(arguments.groups, N, K) for N, K in zip(wide, narrow, strict=True)], _numbers("rows", arguments.rows)


def _numbers(name: str, text: str) -> list[int]:
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise UsageError(f"--{name} {text} must be numbers above 0, by commas.")
    return [int(part) for part in text.split(",")]


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench tune`."""
    require_positive(arguments, "rounds")
    linears, all_rows = asked_for(arguments)
    if not torch.cuda.is_available():
        raise UsageError(f"tiles are measured on a GPU, and torch {torch.__version__} finds no CUDA device here.")
    return tune_all(linears, all_rows, arguments, "cuda", torch.cuda.get_device_capability())


def tune_all(
    linears: Sequence[Weights], all_rows: Sequence[int], arguments: argparse.Namespace, device: str,
    capability: tuple[int, int],
) -> int:  # fmt: skip
    """Tune all products, writing the table after each. Returns exit code 1 if a candidate was wrong."""
    found: list[MeasuredTile] = []
    failed = 0
    for weights in linears:
        for rows in all_rows:
            for tuned in tune(weights, rows, device=device, capability=capability, rounds=arguments.rounds):
                show(tuned)
                failed += len(tuned.wrong)
                found.append(tuned.measured())
                if arguments.json:
                    table = TileTable(environment(device), capability, tuple(found))
                    path = write_results(arguments.json, "tune", device, table.record())
    if arguments.json:
        print(f"written: {path}. Use it by `fuser.load_tiles({str(path)!r})`.")
    return 1 if failed else 0
