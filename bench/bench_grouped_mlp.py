"""The grouped MLP, forward + backward, against `torch.nn.functional.grouped_mm` with eager SwiGLU.

    ours    Sequential(GroupedLinear(G, H, 2F), SwiGLU(), GroupedLinear(G, F, H)), fused where a fusion takes it
    torch   grouped_mm -> chunk, silu, multiply -> grouped_mm

Same weights, same inputs, same split sizes, gradients of the input and of both weights. Before anything is timed,
both are held against a float64 loop over the groups. Timed by turns in one process, the whole step with its launches;
caches are as the turns leave them. Useful FLOP: 18 R H F for R rows (6 forward, 12 backward).
"""

# T rows, H hidden, F expert width, G groups

import argparse
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.results import add_json_argument, write_results
from bench.timing import Timing, time_interleaved
from bench.usage import UsageError, require_device
from fuser import Sequential, ops

# Relative norm of the error of an output or gradient against float64: a few units of the dtype's last place.
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUTINGS = ("uniform", "random", "skewed")


@dataclass(frozen=True)
class GroupedMLPShape:
    """Rows over all groups, and the widths."""

    num_groups: int
    rows: int
    hidden: int
    intermediate: int

    @property
    def flop(self) -> int:
        """Of one step, forward + backward."""
        return 18 * self.rows * self.hidden * self.intermediate


SHAPES = {
    "cpu": GroupedMLPShape(8, 2048, 512, 512),
    "qwen3-30b-a3b": GroupedMLPShape(128, 65536, 2048, 768),
    "olmoe-1b-7b": GroupedMLPShape(64, 65536, 2048, 1024),
    "mixtral-8x7b": GroupedMLPShape(8, 16384, 4096, 14336),
    "gpt-oss-120b": GroupedMLPShape(128, 65536, 2880, 2880),
    "deepseek-v3-ep8": GroupedMLPShape(32, 65536, 7168, 2048),
}

Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Comparison:
    """Seconds a step of both, and errors against float64: relative norms, the largest of outputs and gradients."""

    dtype: str
    ours: Timing
    torch: Timing
    ours_error: float
    torch_error: float

    @property
    def ratio(self) -> float:
        """Our time over torch's: below 1 is faster."""
        return self.ours.median / self.torch.median


def compare_grouped_mlp(
    shape: GroupedMLPShape,
    dtype: str,
    *,
    device: torch.device | str = "cpu",
    routing: str = "uniform",
    rounds: int = 30,
) -> Comparison:
    """Check both ways against float64, then time them by turns. AssertionError if one is wrong."""
    sizes = split_sizes(shape.num_groups, shape.rows, routing)
    layer, x, dy = _layer(shape, DTYPES[dtype], torch.device(device))
    steps = {"ours": _our_step(layer, x, dy, sizes), "torch": _torch_step(layer, x, dy, sizes)}

    reference = _reference(layer, x, dy, sizes)
    errors = {}
    for name, step in steps.items():
        errors[name] = max(_relative_error(got, exact) for got, exact in zip(step(), reference, strict=True))
        limit = MAX_ERROR[DTYPES[dtype]]
        assert errors[name] <= limit, f"{name} is off by {errors[name]:.2e} in {dtype}, more than {limit:.0e}"
    del reference

    times = time_interleaved(steps, rounds=rounds, device=device)
    return Comparison(dtype, times["ours"], times["torch"], errors["ours"], errors["torch"])


def split_sizes(num_groups: int, rows: int, routing: str) -> list[int]:
    """Rows of each group: equal, drawn at random, or by Zipf's law with the last group empty; they sum to `rows`."""
    if routing == "uniform":
        weights = torch.ones(num_groups)
    elif routing == "random":
        weights = torch.bincount(
            torch.randint(num_groups, (rows,), generator=torch.Generator().manual_seed(0)), minlength=num_groups
        ).float()
    else:
        weights = 1 / torch.arange(1, num_groups + 1)
        weights[-1] = 0
    ends = (weights.double().cumsum(0) / weights.double().sum() * rows).round().long().tolist()
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def _layer(shape: GroupedMLPShape, dtype: torch.dtype, device: torch.device) -> tuple[Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = Sequential(
        ops.GroupedLinear(
            shape.num_groups, shape.hidden, 2 * shape.intermediate, bias=False, device=device, dtype=dtype
        ),
        ops.SwiGLU(),
        ops.GroupedLinear(shape.num_groups, shape.intermediate, shape.hidden, bias=False, device=device, dtype=dtype),
    )
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    x = torch.randn(shape.rows, shape.hidden, device=device, dtype=dtype).requires_grad_()
    return layer, x, torch.randn_like(x)


def _our_step(layer: Sequential, x: Tensor, dy: Tensor, sizes: list[int]) -> Step:
    wanted = (x, *layer.parameters())
    device_sizes = torch.tensor(sizes, device=x.device)

    def step() -> list[Tensor]:
        y = layer(x, split_sizes=device_sizes)
        return [y, *torch.autograd.grad(y, wanted, dy)]

    return step


def _torch_step(layer: Sequential, x: Tensor, dy: Tensor, sizes: list[int]) -> Step:
    fc1, fc2 = layer.parameters()
    ends = torch.tensor(sizes, device=x.device).cumsum(0).int()

    def step() -> list[Tensor]:
        gate, up = F.grouped_mm(x, fc1.mT, offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, fc2.mT, offs=ends)
        return [y, *torch.autograd.grad(y, (x, fc1, fc2), dy)]

    return step


def _reference(layer: Sequential, x: Tensor, dy: Tensor, sizes: list[int]) -> list[Tensor]:
    """The same step in float64, group by group."""
    x, fc1, fc2 = (tensor.detach().double().requires_grad_() for tensor in (x, *layer.parameters()))
    parts = []
    for rows, w1, w2 in zip(x.split(sizes), fc1, fc2, strict=True):
        gate, up = (rows @ w1.mT).chunk(2, dim=-1)
        parts.append((F.silu(gate) * up) @ w2.mT)
    y = torch.cat(parts)
    return [y.detach(), *torch.autograd.grad(y, (x, fc1, fc2), dy.double())]


def _relative_error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", choices=SHAPES, default="cpu", help="(default: %(default)s: 8 experts, 2048 rows, 512 / 512)"
    )
    parser.add_argument("--dtype", default="fp32,bf16", help="separated by commas (default: %(default)s)")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform", help="(default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="turns that count (default: %(default)s)")
    add_json_argument(parser, "grouped_mlp")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench grouped_mlp`."""
    require_device(arguments.device)
    dtypes = arguments.dtype.split(",")
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise UsageError(f"--dtype {unknown[0]} is unknown. Take {', '.join(DTYPES)}, or several by commas.")
    shape = SHAPES[arguments.shape]
    print(
        f"grouped MLP {arguments.shape}: {shape.num_groups} experts, {shape.rows} rows ({arguments.routing}), "
        f"{shape.hidden} / {shape.intermediate}, forward + backward on {arguments.device}; median (quartiles)"
    )
    comparisons = []
    for dtype in dtypes:
        found = compare_grouped_mlp(
            shape, dtype, device=arguments.device, routing=arguments.routing, rounds=arguments.rounds
        )
        comparisons.append(found)
        for name, timing, error in (("ours", found.ours, found.ours_error), ("torch", found.torch, found.torch_error)):
            print(
                f"  {dtype} {name:5} {timing.median * 1e3:8.3f} ms ({timing.low * 1e3:.3f} - {timing.high * 1e3:.3f})  "
                f"{shape.flop / timing.median / 1e12:7.3f} TFLOP/s  error {error:.1e}"
            )
        print(f"  {dtype} ours / torch: {found.ratio:.3f}")
    if arguments.json:
        figures = {
            "shape": asdict(shape),
            "routing": arguments.routing,
            "comparisons": [asdict(found) | {"ratio": found.ratio} for found in comparisons],
        }
        print(f"written: {write_results(arguments.json, 'grouped_mlp', arguments.device, figures)}")
    return 0
