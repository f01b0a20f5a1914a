"""Element-wise chains that occur between two GEMMs, forward and forward + backward, against three alternatives.

    ours      Sequential of the chain's operations, fused where a fusion takes them
    eager     the same formulas in torch, function by function
    compile   torch.compile of the same formulas (CUDA only)
    copy      `copy_` of as many bytes as the chain must move: the limit set by memory bandwidth

The chain is timed alone, without the GEMMs. It must read each input and write each output once: forward reads x and the
operands and writes y; backward reads dy, and x and the bias where a derivative depends on them, and writes dx and the
gradient of the bias. The gradient of an added tensor is dy itself, and a dropout mask can be recomputed, so neither
moves any bytes. A copy of n bytes reads n / 2 and writes n / 2.

All candidates use the same random inputs. Before timing, y and every gradient are compared with float64. With dropout,
each element must equal its kept or its dropped value, consistently in y and the gradients, and the share of kept ones
must match p. Timed interleaved in one process, several calls in a row, launches included; caches are as the previous
candidate leaves them. With --captured each step is a CUDA graph, so that only GPU time is measured.
"""

# R rows, F features of y, W features of x

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import TimedPass
from bench.results import add_json_argument, write_results
from bench.timing import Timing, time_interleaved
from bench.usage import UsageError, require_device, require_positive
from fuser import BasicOperation, Sequential, ops

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
# Relative norm of the error of an output or gradient against float64: a few units in the dtype's last place.
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# R, F
SHAPES = {"cuda": (16384, 4096), "cpu": (1024, 1024)}
# A smaller working set may fit in a GPU's L2 cache, and would not measure memory.
CACHE_BYTES = 60e6

SCALE = 0.7
P = 0.1  # of Dropout
# If the kept and the dropped value of y differ by more than this, rounding cannot confuse them.
CLEARLY_KEPT = 0.25


@dataclass(frozen=True)
class Chain:
    """A chain of operations, and the same as a formula in torch.

    operations: creates the operations for F features
    formula:    y as a function of x, the operands by name, and `drop`, a function that applies the dropout
    operands:   which of "bias" [W] and "extra" [R, F] it has
    width:      W / F
    reads_x:    whether backward needs x and the bias
    drops:      whether it has a dropout
    """

    operations: Callable[[int], list[BasicOperation]]
    formula: Callable[..., Tensor]
    operands: tuple[str, ...]
    width: int = 1
    reads_x: bool = False
    drops: bool = False

    def shapes(self, rows: int, features: int) -> dict[str, tuple[int, ...]]:
        """The shapes of x and the operands, by name."""
        wide = self.width * features
        shapes = {"x": (rows, wide), "bias": (wide,), "extra": (rows, features)}
        return {name: shapes[name] for name in ("x", *self.operands)}

    def numbers_moved(self, rows: int, features: int) -> tuple[int, int]:
        """The minimum number of elements that forward and backward must read and write."""
        sizes = {name: prod(shape) for name, shape in self.shapes(rows, features).items()}
        y = rows * features
        own = sizes["x"] + sizes.get("bias", 0)
        return sum(sizes.values()) + y, y + own + (own if self.reads_x else 0)


def _dropout(h: Tensor) -> Tensor:
    return F.dropout(h, P)


def _gelu(h: Tensor) -> Tensor:
    return F.gelu(h, approximate="tanh")


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return _gelu(x + bias)


def _bias_swiglu(x: Tensor, bias: Tensor) -> Tensor:
    gate, linear = (x + bias).chunk(2, -1)
    return F.silu(gate) * linear


def _scale_add(x: Tensor, extra: Tensor) -> Tensor:
    return x * SCALE + extra


def _bias_dropout_add(x: Tensor, bias: Tensor, extra: Tensor, drop: Callable[[Tensor], Tensor] = _dropout) -> Tensor:
    return drop(x + bias) + extra


def _bias_gelu_scale_dropout_add(
    x: Tensor, bias: Tensor, extra: Tensor, drop: Callable[[Tensor], Tensor] = _dropout
) -> Tensor:
    return drop(_gelu(x + bias) * SCALE) + extra


CHAINS = {
    "bias-gelu": Chain(lambda f: [ops.Bias(f), ops.GELU()], _bias_gelu, ("bias",), reads_x=True),
    "bias-swiglu": Chain(lambda f: [ops.Bias(2 * f), ops.SwiGLU()], _bias_swiglu, ("bias",), width=2, reads_x=True),
    "scale-add": Chain(lambda f: [ops.ConstantScale(SCALE), ops.AddExtraInput()], _scale_add, ("extra",)),
    "bias-dropout-add": Chain(
        lambda f: [ops.Bias(f), ops.Dropout(P), ops.AddExtraInput()], _bias_dropout_add, ("bias", "extra"), drops=True
    ),
    "bias-gelu-scale-dropout-add": Chain(
        lambda f: [ops.Bias(f), ops.GELU(), ops.ConstantScale(SCALE), ops.Dropout(P), ops.AddExtraInput()],
        _bias_gelu_scale_dropout_add,
        ("bias", "extra"),
        reads_x=True,
        drops=True,
    ),
}


@dataclass(frozen=True)
class Comparison:
    """One chain in one dtype: seconds per call of each candidate, and its error against float64.

    bytes:       the minimum that the passes must move
    working_set: bytes of all tensors that the passes read or write
    errors:      relative norms, the largest over y and the gradients
    """

    chain: str
    dtype: str
    passes: str
    bytes: int
    working_set: int
    times: dict[str, Timing]
    errors: dict[str, float]

    @property
    def rates(self) -> dict[str, float]:
        """GB/s, counting the bytes that must be moved."""
        return {name: self.bytes / timing.median / 1e9 for name, timing in self.times.items()}

    @property
    def percent_of_copy(self) -> dict[str, float]:
        """Memory throughput in % of that of the copy."""
        return {name: 100 * self.times["copy"].median / timing.median for name, timing in self.times.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """Our time divided by each other candidate's; below 1 we are faster."""
        ours = self.times["ours"].median
        return {name: ours / self.times[name].median for name in self.errors if name != "ours"}


@dataclass(frozen=True)
class CheckedPasses:
    """The checked steps of a chain by candidate, including "copy", with their errors."""

    passes: str
    bytes: int
    working_set: int
    steps: dict[str, Callable[[], Any]]
    errors: dict[str, float]


def compare_chain(
    name: str,
    dtype: str,
    *,
    rows: int,
    features: int,
    device: torch.device | str = "cpu",
    rounds: int = 30,
    calls: int = 10,
    captured: bool = False,
) -> list[Comparison]:
    """Check all candidates against float64, then time them interleaved. Raises AssertionError if one is wrong.

    Two comparisons: forward without grad mode, and forward + backward. captured: run each step as a CUDA graph.
    """
    comparisons = []
    for checked in checked_passes(name, dtype, rows=rows, features=features, device=device, captured=captured):
        times = time_interleaved(checked.steps, rounds=rounds, calls=calls, device=device)
        comparisons.append(
            Comparison(name, dtype, checked.passes, checked.bytes, checked.working_set, times, checked.errors)
        )
    return comparisons


def checked_passes(
    name: str,
    dtype: str,
    *,
    rows: int,
    features: int,
    device: torch.device | str = "cpu",
    captured: bool = False,
) -> Iterator[CheckedPasses]:
    """Forward without grad mode, and forward + backward, after all candidates were checked against float64."""
    chain = CHAINS[name]
    torch.manual_seed(0)
    layer = make_layer(name, dtype, features, device)
    inputs = {
        key: torch.randn(shape, device=device).to(DTYPES[dtype]).requires_grad_()
        for key, shape in chain.shapes(rows, features).items()
    }
    for bias in layer.parameters():
        with torch.no_grad():
            inputs["bias"] = bias.copy_(inputs["bias"])
    dy = torch.randn(rows, features, device=device).to(DTYPES[dtype])
    numbers = sum(tensor.numel() for tensor in (*inputs.values(), dy))  # dy also counts for y, of the same size
    forward, backward = chain.numbers_moved(rows, features)

    ways = _ways(chain, layer, inputs)
    for passes, make_step, moved, touched in (
        ("forward", _forward, forward, numbers),
        ("forward + backward", _forward_and_backward, forward + backward, numbers + inputs["x"].numel() + dy.numel()),
    ):
        steps: dict[str, Callable[[], Any]] = {way: make_step(call, inputs, dy) for way, call in ways.items()}
        errors = {way: _largest_error(chain, step(), inputs, dy) for way, step in steps.items()}
        for way, error in errors.items():
            limit = MAX_ERROR[dy.dtype]
            assert error <= limit, f"{name}, {passes}: {way} is off by {error:.2e} in {dtype}, more than {limit:.0e}"
        if captured:
            steps = {way: _captured(step) for way, step in steps.items()}
        size = dy.element_size()
        yield CheckedPasses(passes, moved * size, touched * size, {**steps, "copy": _copy(moved, dy)}, errors)


def make_layer(name: str, dtype: str, features: int, device: torch.device | str) -> Sequential:
    """The chain of that name, in training mode."""
    return Sequential(*CHAINS[name].operations(features)).to(device=device, dtype=DTYPES[dtype])


def _ways(chain: Chain, layer: Sequential, inputs: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    extras = {key: tensor for key, tensor in inputs.items() if key == "extra"}
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: layer(inputs["x"], **extras),
        "eager": lambda: chain.formula(**inputs),
    }
    if inputs["x"].is_cuda:
        torch.compiler.reset()  # earlier compilations count against the recompile limit
        compiled = torch.compile(chain.formula, fullgraph=True, dynamic=False)
        ways["compile"] = lambda: compiled(**inputs)
    return ways


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    """A replay of the step, captured after three warm-ups on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _forward(call: Callable[[], Tensor], inputs: Mapping[str, Tensor], dy: Tensor) -> TimedPass:
    def step() -> list[Tensor]:
        with torch.no_grad():
            return [call()]

    return step


def _forward_and_backward(call: Callable[[], Tensor], inputs: Mapping[str, Tensor], dy: Tensor) -> TimedPass:
    wanted = tuple(inputs.values())

    def step() -> list[Tensor]:
        y = call()
        return [y, *torch.autograd.grad(y, wanted, dy)]

    return step


def _copy(numbers: int, like: Tensor) -> TimedPass:
    """A copy that reads and writes this many elements in total."""
    source, target = (torch.randn(numbers // 2, device=like.device).to(like.dtype) for _ in range(2))
    return lambda: [target.copy_(source)]


def _largest_error(chain: Chain, found: list[Tensor], inputs: Mapping[str, Tensor], dy: Tensor) -> float:
    """The largest relative error norm of y, and of the gradients if there are any, against float64."""
    exact = {key: tensor.detach().double().requires_grad_() for key, tensor in inputs.items()}

    def reference(**drop: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = chain.formula(**exact, **drop)
        gradients = torch.autograd.grad(y, tuple(exact.values()), dy.double()) if len(found) > 1 else ()
        return [y.detach(), *gradients]

    if chain.drops:
        all_kept, all_dropped = reference(drop=lambda h: h / (1 - P)), reference(drop=lambda h: h * 0)
        factor = _kept(found, all_kept, all_dropped) / (1 - P)
        expected = reference(drop=lambda h: h * factor)
    else:
        expected = reference()
    return max(((got.double() - want).norm() / want.norm()).item() for got, want in zip(found, expected, strict=True))


def _kept(found: list[Tensor], all_kept: list[Tensor], all_dropped: list[Tensor]) -> Tensor:
    """[R, F] bool: which elements were kept. Raises AssertionError if they are too few or too many.

    Determined from y where its kept and dropped values differ enough, elsewhere from dx if there is one.
    """
    near_kept = [
        (got - kept).abs() < (got - dropped).abs()
        for got, kept, dropped in zip(found[:2], all_kept, all_dropped, strict=False)
    ]
    clear = (all_kept[0] - all_dropped[0]).abs() > CLEARLY_KEPT
    count = int(clear.sum())
    rate = near_kept[0][clear].double().mean().item()
    deviation = (P * (1 - P) / count) ** 0.5
    assert abs(rate - (1 - P)) <= 5 * deviation, f"{rate:.4f} of {count} elements were kept, expected {1 - P}"
    return torch.where(clear, near_kept[0], near_kept[-1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chain", default=",".join(CHAINS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--dtype", default="bf16", help=f"of {', '.join(DTYPES)}, by commas (default: %(default)s)")
    for index, name in enumerate(("rows", "features")):
        defaults = ", ".join(f"{shape[index]} on {device}" for device, shape in SHAPES.items())
        parser.add_argument(f"--{name}", type=int, help=f"of y (default: {defaults})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=10, help="calls on end in a turn (default: %(default)s)")
    parser.add_argument("--captured", action="store_true", help="time CUDA graphs of the steps, without the host")
    add_json_argument(parser, "elementwise")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench elementwise`."""
    require_device(arguments.device)
    require_positive(arguments, "rows", "features", "rounds", "calls")
    names = _listed("--chain", arguments.chain, CHAINS)
    dtypes = _listed("--dtype", arguments.dtype, DTYPES)
    default_rows, default_features = SHAPES[arguments.device]
    rows, features = arguments.rows or default_rows, arguments.features or default_features
    if arguments.captured and arguments.device != "cuda":
        raise UsageError("--captured needs --device cuda: there are no graphs on the CPU.")
    how = "CUDA graphs" if arguments.captured else "whole steps"
    print(f"element-wise chains, y [{rows}, {features}], on {arguments.device}, {how}; median (quartiles)")
    if arguments.device == "cpu":
        print("compile is left out: it is compared on CUDA only")
    comparisons = []
    for name in names:
        for dtype in dtypes:
            layer = make_layer(name, dtype, features, arguments.device)
            print(layer.explain(device=arguments.device, dtype=DTYPES[dtype]))
            for found in compare_chain(
                name, dtype, rows=rows, features=features,
                device=arguments.device, rounds=arguments.rounds, calls=arguments.calls, captured=arguments.captured,
            ):  # fmt: skip
                comparisons.append(found)
                _show(found)
    if arguments.json:
        figures = {
            "rows": rows,
            "features": features,
            "captured": arguments.captured,
            "comparisons": [
                asdict(found)
                | {"gb_per_s": found.rates, "percent_of_copy": found.percent_of_copy, "ratios": found.ratios}
                for found in comparisons
            ],
        }
        print(f"written: {write_results(arguments.json, 'elementwise', arguments.device, figures)}")
    return 0


def _listed(option: str, given: str, known: Mapping[str, object]) -> list[str]:
    names = given.split(",")
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{option} {unknown[0]} is unknown. Take {', '.join(known)}, or several by commas.")
    return names


def _show(found: Comparison) -> None:
    fits = f", which fits the cache of {CACHE_BYTES / 1e6:.0f} MB" if found.working_set <= CACHE_BYTES else ""
    print(
        f"{found.chain}, {found.dtype}, {found.passes}: {found.bytes / 1e6:.1f} MB to move, "
        f"working set {found.working_set / 1e6:.1f} MB{fits}"
    )
    for name, timing in found.times.items():
        error = f"  error {found.errors[name]:.1e}" if name in found.errors else ""
        print(
            f"  {name:8} {timing.median * 1e3:8.3f} ms ({timing.low * 1e3:.3f} - {timing.high * 1e3:.3f})  "
            f"{found.rates[name]:7.1f} GB/s  {found.percent_of_copy[name]:5.1f} % of copy{error}"
        )
    print("  " + ", ".join(f"ours / {name}: {ratio:.3f}" for name, ratio in found.ratios.items()))
