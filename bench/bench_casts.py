"""Quantize and dequantize of each recipe, compared with a device copy in the same run.

    tensor    x [R, C] as one tensor
    groups    the same rows divided randomly among groups
    weights   stacked weights [8, R / 8, C]

    input, weight, grad   the quantizer of that role
    rowwise, columnwise   one copy, or both at once; "back" dequantizes one

Bytes: the minimum that must be moved. The high-precision input is read once, or twice where the scale needs an amax
first; codes and scales are written once. Time: that of the kernels, by the "device" clock of `bench.timing`, with a
cold L2 cache. Every cast is compared with its input (SQNR) before it is timed.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench.results import add_json_argument, write_results
from bench.schedule import known_recipes, recipe_named
from bench.sqnr import sqnr_db, sqnr_floor
from bench.table import print_table
from bench.timing import Timing, time_interleaved
from bench.usage import UsageError, require_device, require_positive
from recipes import GroupedTensor, QuantizedTensor, Quantizer, Role, Splits

SHAPES = {"cuda": (65536, 7168), "cpu": (1024, 512)}
NUM_GROUPS = {"tensor": 1, "groups": 40, "weights": 8}
COPIES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
# Recipes whose scales need an amax first, and which therefore read their input twice. Of rows alone, whose scales are
# their own, fp8_rowwise reads them once.
READS = {"fp8_current": 2, "fp8_rowwise": 2, "nvfp4": 2}
READS_OF_ROWS = READS | {"fp8_rowwise": 1}

Quantized = GroupedTensor | QuantizedTensor


@dataclass(frozen=True)
class CastFigures:
    """One cast or dequantization. bytes: the minimum that must be moved; copy_bytes: bytes moved by the device copy."""

    recipe: str
    cast: str
    bytes: int
    copy_bytes: int
    times: dict[str, Timing]

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.times["cast"].median / 1e9

    @property
    def percent_of_copy(self) -> float:
        """Memory throughput in % of that of the device copy."""
        return 100 * self.gb_per_s * 1e9 * self.times["copy"].median / self.copy_bytes


def check_cast(quantized: Quantized, given: Tensor, splits: Splits | None, label: str) -> None:
    """Raise AssertionError if the error of a copy is larger than the recipe's format allows.

    Copies of rotated rows (random Hadamard transform) are not checked here; other benchmarks check their products.
    """
    for copy in (quantized.rowwise, quantized.columnwise):
        if copy is not None and copy.transform is None:
            db = sqnr_db(copy.dequantize(splits), given)
            assert db >= sqnr_floor(label), f"{label}: the cast has {db:.1f} dB, but must have {sqnr_floor(label):.0f}"


def written_bytes(quantized: Quantized, splits: Splits | None) -> int:
    """Bytes of the codes and scales."""
    of_splits = [] if splits is None else [id(tensor) for tensor in splits.tensors()]
    return sum(t.nbytes for t in quantized.tensors() if t is not None and id(t) not in of_splits)


def measure_casts(
    label: str, rows: int, columns: int, *, device: str = "cpu", rounds: int = 20, calls: int = 5
) -> Iterator[CastFigures]:
    """Check and time all casts of one recipe."""
    recipe = recipe_named(label)
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(x)
    sizes = torch.bincount(torch.randint(NUM_GROUPS["groups"], (rows,)), minlength=NUM_GROUPS["groups"])
    splits = Splits.make(sizes.to(device), rows=rows, device=x.device)

    def timed(name: str, call: Callable[[], object], num_bytes: int) -> CastFigures:
        steps = {"cast": call, "copy": lambda: target.copy_(x)}
        times = time_interleaved(steps, rounds=rounds, calls=calls, device=device, clock="device")
        return CastFigures(label, name, num_bytes, 2 * x.nbytes, times)

    def quantizer_of(role: Role) -> Quantizer:
        quantizer = recipe.quantizer(role)
        assert quantizer is not None, f"{label} casts nothing"
        return quantizer

    kinds: dict[str, tuple[Role, Tensor, Splits | None]] = {
        "input, tensor": (Role.INPUT, x, None),
        "input, groups": (Role.INPUT, x, splits),
        "grad, groups": (Role.GRAD_OUTPUT, x, splits),
        "weight, weights": (Role.WEIGHT, x.view(NUM_GROUPS["weights"], -1, columns), None),
    }
    for name, (role, given, given_splits) in kinds.items():
        quantizer = quantizer_of(role)
        for copies in COPIES if name == "input, tensor" else ("both",):
            cast = _cast(quantizer, given, given_splits, *COPIES[copies])
            quantized = cast()
            if role is not Role.GRAD_OUTPUT:  # some recipes round gradients to fewer bits, or stochastically
                check_cast(quantized, given, given_splits, label)
            reads = (READS_OF_ROWS if copies == "rowwise" else READS).get(label, 1)
            num_bytes = reads * x.nbytes + written_bytes(quantized, given_splits)
            yield timed(f"{name}, {copies}", cast, num_bytes)
            del quantized
    for name, given_splits in (("tensor", None), ("groups", splits)):
        quantized = _cast(quantizer_of(Role.INPUT), x, given_splits, True, True)()
        for copies in ("rowwise", "columnwise"):
            copy = getattr(quantized, copies)
            num_bytes = copy.codes.nbytes + copy.scale_inv.nbytes + x.nbytes
            yield timed(f"back, {name}, {copies}", _dequantization(copy, given_splits), num_bytes)


def _cast(
    quantizer: Quantizer, x: Tensor, splits: Splits | None, rowwise: bool, columnwise: bool
) -> Callable[[], Quantized]:
    if splits is not None:
        return lambda: quantizer.quantize_grouped(x, splits, rowwise=rowwise, columnwise=columnwise)
    if x.ndim == 3:
        return lambda: quantizer.quantize_stacked(x, rowwise=rowwise, columnwise=columnwise)
    return lambda: quantizer.quantize(x, rowwise=rowwise, columnwise=columnwise)


def _dequantization(copy: object, splits: Splits | None) -> Callable[[], object]:
    """A function that dequantizes as an emulated product does, without the factors that the epilogue applies."""
    return lambda: copy.operand(torch.bfloat16, splits)  # type: ignore[attr-defined]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipes", default=",".join(known_recipes()[1:]), help="by commas (default: %(default)s)")
    for index, name in enumerate(("rows", "columns")):
        defaults = ", ".join(f"{shape[index]} on {device}" for device, shape in SHAPES.items())
        parser.add_argument(f"--{name}", type=int, help=f"of the tensor (default: {defaults})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default: %(default)s)")
    add_json_argument(parser, "casts")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench casts`."""
    require_device(arguments.device)
    require_positive(arguments, "rows", "columns", "rounds")
    default_rows, default_columns = SHAPES[arguments.device]
    rows, columns = arguments.rows or default_rows, arguments.columns or default_columns
    if rows % NUM_GROUPS["weights"]:
        raise UsageError(f"--rows {rows} --columns {columns}: give rows in multiples of {NUM_GROUPS['weights']}.")
    labels = arguments.recipes.split(",")
    for label in labels:
        if recipe_named(label).quantizer(Role.INPUT) is None:
            raise UsageError(f"--recipes {label} casts nothing. Take {', '.join(known_recipes()[1:])}.")
    print(f"casts of [{rows}, {columns}] bf16 on {arguments.device}")
    found: list[CastFigures] = []
    for label in labels:
        of_recipe = list(measure_casts(label, rows, columns, device=arguments.device, rounds=arguments.rounds))
        print_table(
            label,
            ["", "MB", "median ms", "quartiles", "GB/s", "% of copy"],
            [
                [
                    each.cast, f"{each.bytes / 1e6:.0f}", *_ms(each.times["cast"]),
                    f"{each.gb_per_s:.0f}", f"{each.percent_of_copy:.1f}",
                ]
                for each in of_recipe
            ],
        )  # fmt: skip
        found += of_recipe
    if arguments.json:
        casts = [asdict(each) | {"gb_per_s": each.gb_per_s, "percent_of_copy": each.percent_of_copy} for each in found]
        figures = {"rows": rows, "columns": columns, "casts": casts}
        print(f"written: {write_results(arguments.json, 'casts', arguments.device, figures)}")
    return 0


def _ms(timing: Timing) -> tuple[str, str]:
    return f"{timing.median * 1e3:.3f}", f"{timing.low * 1e3:.3f} - {timing.high * 1e3:.3f}"
