"""A few tokens without gradients: the grouped MLP in a CUDA graph, against the time in which its weights can be read.

    share     (bytes of the active experts' weights / throughput of a device copy of the same run) / GPU time
    fused     FC1 and the activation in one kernel, the pre-activation not stored
    unfused   the same operations without fusion: FC1, the activation, FC2

Every token takes `topk` different experts. A graph holds `CALLS` calls that take different experts, so that weights
come from memory and not from the L2 cache, as in a model of many layers; GPU time is that of the graph, by CUDA events,
over its calls. The bits of both ways are compared with those of the forward of training: any other fails. `--sweep`
times the two kernels alone with each of the tiles in `CANDIDATES`, whose bits it does not compare. On a CPU,
which has no graphs, bits are compared and nothing is timed.

Targets: a share of at least 0.60 (stretch 0.75) for 4 to 64 tokens, 0.40 for one.
"""
# T tokens, R = T K rows, E experts, H hidden, F expert width

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from bench.case import DTYPE
from bench.models import SHAPES, ExpertShape
from bench.results import add_json_argument, write_results
from bench.table import print_table
from bench.timing import Timing, time_interleaved
from bench.usage import UsageError, require_device, require_positive
from fuser import Sequential, ops
from ops.kernels.grouped_gemm.grouped_activation import grouped_activation_triton
from ops.kernels.grouped_gemm.high_precision import m_grouped_triton
from ops.kernels.grouped_gemm.measured_tiles import (
    Gemm,
    GroupedGemmConfig,
    MeasuredTile,
    TileTable,
    describe,
    tiles_in_use,
    use_tiles,
)
from recipes.tensors.splits import Splits
from recipes.triton.gates import triton

DEFAULTS = {"cuda": "qwen3-30b-a3b,olmoe-1b-7b,deepseek-v3-ep8", "cpu": "tiny-qwen3-30b-a3b"}
CALLS = 8  # of a graph, with other experts each
COPIED_BYTES = 2**29
COPY, OURS, UNFUSED = "copy", "fused", "unfused"
TARGETS = {1: 0.40, 4: 0.60, 16: 0.60, 64: 0.60}  # share, by tokens
WARMUP = 3

# Columns of a tile are rows of weights: FC1's kernel stores half as many columns. The first two are those of
# `tile_rules` below FEW_ROWS and below DECODE_ROWS.
CANDIDATES = [
    GroupedGemmConfig(64, 128, 64, num_warps=4, num_stages=3, programs=2),
    GroupedGemmConfig(64, 128, 64, num_warps=4, num_stages=4, programs=2),
    GroupedGemmConfig(64, 128, 64, num_warps=4, num_stages=8, programs=1),
    GroupedGemmConfig(64, 128, 128, num_warps=4, num_stages=4, programs=1),
    GroupedGemmConfig(64, 64, 64, num_warps=4, num_stages=4, programs=3),
    GroupedGemmConfig(64, 64, 64, num_warps=4, num_stages=6, programs=2),
    GroupedGemmConfig(64, 64, 128, num_warps=4, num_stages=3, programs=2),
    GroupedGemmConfig(64, 256, 64, num_warps=4, num_stages=4, programs=1),
]

Run = Callable[[], object]


@dataclass(frozen=True)
class DecodeFigures:
    """Seconds a call, and the bytes of weights that it reads. way: "fused", "unfused", or a kernel and its tile."""

    model: str
    tokens: int
    way: str
    bytes: float
    time: Timing
    copy_bytes_per_second: float

    @property
    def share(self) -> float:
        return self.bytes / self.copy_bytes_per_second / self.time.median


@dataclass(frozen=True)
class DecodeCase:
    """The MLP of a model's experts, rows for `tokens` tokens, and the split sizes of CALLS calls."""

    shape: ExpertShape
    layer: Sequential
    unfused: Sequential
    x: Tensor
    scales: Tensor
    sizes: list[Tensor]

    def calls(self, layer: Sequential) -> list[Tensor]:
        return [layer(self.x, split_sizes=sizes, scales=self.scales) for sizes in self.sizes]

    @property
    def active(self) -> float:
        """How many experts a call takes, on average."""
        return sum(int(sizes.count_nonzero()) for sizes in self.sizes) / len(self.sizes)

    @property
    def expert_bytes(self) -> int:
        """Of the weights of one expert."""
        return 3 * self.shape.hidden * self.shape.intermediate * DTYPE.itemsize


def draw_sizes(shape: ExpertShape, tokens: int, calls: int = CALLS) -> list[list[int]]:
    """Rows of each expert in each call: every token takes topk different ones. Calls of one token take others each, as
    long as there are any."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    order = torch.randperm(shape.num_experts, generator=generator)
    for _ in range(calls):
        counts = torch.zeros(shape.num_experts, dtype=torch.int64)
        for _ in range(tokens):
            counts[order[: shape.topk]] += 1
            rest = order[shape.topk :]
            enough = tokens == 1 and len(rest) >= shape.topk
            order = rest if enough else torch.randperm(shape.num_experts, generator=generator)
        drawn.append(counts.tolist())
    return drawn


def make_layer(shape: ExpertShape, device: str) -> Sequential:
    E, H, F = shape.num_experts, shape.hidden, shape.intermediate
    options = {"bias": False, "device": device, "dtype": DTYPE}
    torch.manual_seed(0)
    return Sequential(
        ops.GroupedLinear(E, H, 2 * F, **options), ops.ScaledSwiGLU(), ops.GroupedLinear(E, F, H, **options)
    )


def make_case(shape: ExpertShape, layer: Sequential, tokens: int, device: str) -> DecodeCase:
    rows = tokens * shape.topk
    sizes = [torch.tensor(each, device=device) for each in draw_sizes(shape, tokens)]
    x, scales = torch.randn(rows, shape.hidden, device=device).to(DTYPE), torch.rand(rows, device=device)
    return DecodeCase(shape, layer, Sequential(*layer, fusions=()), x, scales, sizes)


def differing(case: DecodeCase) -> list[str]:
    """The ways whose bits are not those of the forward of training."""
    trained = [y.detach() for y in case.calls(case.layer)]
    with torch.no_grad():
        ways = {OURS: case.calls(case.layer), UNFUSED: case.calls(case.unfused)}
    return [way for way, found in ways.items() if not all(map(torch.equal, found, trained))]


def captured(run: Run) -> Run:
    """A replay of what it does, after it has done it often enough to be repeated by the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return lambda: (graph.replay(), kept)


@torch.no_grad()
def measure(model: str, case: DecodeCase, tokens: int, rounds: int) -> list[DecodeFigures]:
    ways = {OURS: captured(partial(case.calls, case.layer)), UNFUSED: captured(partial(case.calls, case.unfused))}
    bytes_read = case.active * case.expert_bytes
    return figures(model, tokens, ways, dict.fromkeys(ways, bytes_read), rounds)


def figures(
    model: str, tokens: int, ways: dict[str, Run], bytes_read: dict[str, float], rounds: int
) -> list[DecodeFigures]:
    """Of graphs of CALLS calls, interleaved with a copy."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    runs = {COPY: lambda: target.copy_(source), **ways}
    times = time_interleaved(runs, rounds=rounds, warmup=WARMUP, device="cuda", clock="device")
    copied = 2 * COPIED_BYTES / times.pop(COPY).median
    return [
        DecodeFigures(model, tokens, way, bytes_read[way], Timing(*(each / CALLS for each in timing)), copied)
        for way, timing in times.items()
    ]


@torch.no_grad()
def sweep(model: str, case: DecodeCase, tokens: int, rounds: int) -> Iterator[list[DecodeFigures]]:
    """FC1 with its activation, then FC2, with each candidate, those that run."""
    splits = [Splits.make(sizes, rows=len(case.x), device=case.x.device) for sizes in case.sizes]
    w1, w2 = (layer.weight.detach() for layer in (case.layer[0], case.layer[2]))
    spec = case.layer[1].activation
    act = case.x.new_empty(len(case.x), case.shape.intermediate).normal_()
    y = torch.empty_like(case.x)
    gemm = Gemm("TN", DTYPE, DTYPE, False, *w2.shape)

    def fc1(tile: GroupedGemmConfig) -> None:
        half = tile._replace(block_n=tile.block_n // 2)
        for each in splits:
            grouped_activation_triton(case.x, w1, each.offsets, spec, None, case.scales, act, half)

    def fc2(tile: GroupedGemmConfig) -> None:
        use_tiles(TileTable({}, (9, 0), (MeasuredTile(gemm, len(act), tile, 0.0, 0.0),)))
        for each in splits:
            m_grouped_triton(act, w2, each.offsets, None, None, None, y, True, False)

    before = tiles_in_use()
    try:
        for name, kernel, part in (("FC1", fc1, 2 / 3), ("FC2", fc2, 1 / 3)):
            ways = {}
            for tile in CANDIDATES:
                try:
                    ways[f"{name} {describe(tile)}, {tile.programs} programs"] = captured(partial(kernel, tile))
                except (triton.TritonError, RuntimeError) as error:
                    print(f"  left out: {name} {describe(tile)}: {error}", flush=True)
            bytes_read = dict.fromkeys(ways, case.active * case.expert_bytes * part)
            yield figures(model, tokens, ways, bytes_read, rounds)
    finally:
        use_tiles(before)


def show(found: Sequence[DecodeFigures], active: float) -> None:
    first = found[0]
    title = (
        f"{first.model}, {first.tokens} tokens, {active:.1f} experts a call; a copy moves "
        f"{first.copy_bytes_per_second / 1e12:.2f} TB/s"
    )
    headers = ["way", "us a call", "quartiles", "TB/s of weights", "share"]
    rows = [
        [
            each.way, _us(each.time.median), f"{_us(each.time.low)} - {_us(each.time.high)}",
            f"{each.bytes / each.time.median / 1e12:.2f}", f"{each.share:.2f}",
        ]
        for each in found
    ]  # fmt: skip
    print_table(title, headers, rows)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", help=f"by commas (default: {DEFAULTS['cuda']}; on a CPU {DEFAULTS['cpu']})")
    parser.add_argument("--tokens", default="1,4,16,64,256", help="by commas (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="time each kernel alone, with each candidate tile, too")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: %(default)s)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="start no further measurement after this time")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one)")
    add_json_argument(parser, "decode")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench decode`."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    require_positive(arguments, "rounds")
    models = (arguments.models or DEFAULTS[device]).split(",")
    for model in models:
        if model not in SHAPES:
            raise UsageError(f"--models {model} is not known. Take {SHAPES.choices}, or several by commas.")
    tokens = arguments.tokens.split(",")
    if not all(number.isdecimal() and int(number) for number in tokens):
        raise UsageError(f"--tokens {arguments.tokens} must be numbers above 0, by commas.")
    end = None if arguments.limit is None else time.monotonic() + arguments.limit
    found: list[DecodeFigures] = []
    wrong = []
    for model in models:
        layer = make_layer(SHAPES[model], device)
        for number in map(int, tokens):
            if end is not None and time.monotonic() > end:
                print(f"no time was left for {model}, {number} tokens", flush=True)
                continue
            case = make_case(SHAPES[model], layer, number, device)
            differ = differing(case)
            if differ:
                wrong.append(f"{model}, {number} tokens: the bits of {' and '.join(differ)} are not those of training")
                print(f"FAILED {wrong[-1]}", flush=True)
            elif device == "cpu":
                print(f"{model}, {number} tokens: without gradients the bits are those of training. Nothing is timed.")
            if device == "cuda":
                some = [measure(model, case, number, arguments.rounds)]
                show(some[0], case.active)
                for kernels in sweep(model, case, number, arguments.rounds) if arguments.sweep else ():
                    show(kernels, case.active)
                    some.append(kernels)
                found += [each for part in some for each in part]
        del layer
    if arguments.json:
        record = [asdict(each) | {"share": each.share} for each in found]
        path = write_results(arguments.json, "decode", device, {"figures": record, "wrong": wrong})
        print(f"written: {path}")
    show_targets(found)
    return 1 if wrong else 0


def show_targets(found: Sequence[DecodeFigures]) -> None:
    for each in found:
        target = TARGETS.get(each.tokens)
        if each.way == OURS and target is not None:
            reached = "reached" if each.share >= target else "missed"
            print(f"{each.model}, {each.tokens} tokens: share {each.share:.2f}, target {target:.2f}: {reached}")
