"""One grouped layer with its data, to run under any recipe, with torch's own grouped GEMM, and in fp32 as a reference.

    expert_mlp     GroupedLinear(E, H, 2F) -> ScaledSwiGLU -> GroupedLinear(E, F, H)
    expert_linear  GroupedLinear(E, H, 2F)

Without biases, in bf16 (the MLP optionally in fp32), with scales in fp32. The sizes are those of a model's expert
layer; its rows are divided by a routing of `bench.routing`, by default a random one.
"""

# R rows, E experts, H hidden, F expert width

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import DTYPE, Call, Case
from bench.models import ExpertShape
from bench.routing import split_sizes
from bench.schedule import recipe_named
from bench.sqnr import Sqnr
from fuser import Sequential, autocast, ops

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GroupedCase(Case):
    """A Case with split sizes, and with the layer as a formula.

    sizes:   rows of each expert
    formula: y from a function for x w^T, the inputs and the weights; for all rows, or for those of one expert
    """

    sizes: list[int]
    formula: Callable[..., Tensor]

    @property
    def rows(self) -> int:
        return self.dy.shape[0]

    def ours(self, label: str) -> Call:
        """The layer under the recipe of this label."""
        recipe = recipe_named(label)
        x, *_ = self.inputs.values()
        extras = {name: tensor for name, tensor in self.inputs.items() if name != "x"}
        sizes = torch.tensor(self.sizes, device=self.device)

        def call() -> Tensor:
            with autocast(recipe=recipe):
                return self.layer(x, split_sizes=sizes, **extras)

        return call

    def torchs(self, *, compiled: bool = False) -> Call:
        """The formula with `F.grouped_mm`, eager or compiled. Compiled once for all split sizes."""
        ends = torch.tensor(self.sizes, device=self.device).cumsum(0).int()
        way = _with_grouped_mm(self.formula, compiled)
        tensors = (*self.inputs.values(), *self.weights)
        return lambda: way(ends, *tensors)

    def padded(self, multiple: int) -> "GroupedCase":
        """The same layer and rows, with zero rows behind each group up to a multiple of so many rows."""
        sizes = [-(-size // multiple) * multiple for size in self.sizes]
        ends = itertools.accumulate(sizes, initial=0)
        places = [torch.arange(size) + start for size, start in zip(self.sizes, ends, strict=False)]
        place = torch.cat(places).to(self.device)

        def padded(tensor: Tensor) -> Tensor:
            return tensor.new_zeros(sum(sizes), *tensor.shape[1:]).index_copy_(0, place, tensor.detach())

        inputs = {name: padded(tensor).requires_grad_() for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, dy=padded(self.dy), sizes=sizes)

    def bytes_of(self, passes: str) -> int:
        """The minimum bytes that a pass must read and write: each input and output tensor once."""
        inputs = sum(tensor.nbytes for tensor in (*self.inputs.values(), *self.weights))
        return inputs + self.dy.nbytes if passes == "forward" else 2 * (inputs + self.dy.nbytes)

    def sqnr(self, found: list[Tensor]) -> dict[str, float]:
        """SQNR in dB of each result of a step (or only of y) by name, expert by expert, against the formula in fp32.

        An fp32 case is compared with float64.
        """
        sums = {name: Sqnr() for name in self.names[: len(found)]}
        for rows, expert, exact in self._reference(backward=len(found) > 1):
            for index, (name, got) in enumerate(zip(sums, found, strict=True)):
                part = got[rows] if index <= len(self.inputs) else got[expert]
                sums[name].add(part, exact[index])
        return {name: total.db for name, total in sums.items()}

    def _reference(self, *, backward: bool) -> Iterator[tuple[slice, int, list[Tensor]]]:
        """Yield each expert's rows, its number, and its part of the results; one expert at a time, to save memory."""
        wide = torch.float64 if self.dy.dtype == torch.float32 else torch.float32
        start = 0
        for expert, size in enumerate(self.sizes):
            rows = slice(start, start + size)
            start += size
            mine = [tensor[rows] for tensor in self.inputs.values()] + [weight[expert] for weight in self.weights]
            exact = [tensor.detach().to(wide).requires_grad_() for tensor in mine]
            y = self.formula(lambda x, w: x @ w.mT, *exact)
            gradients = torch.autograd.grad(y, exact, self.dy[rows].to(wide)) if backward else ()
            yield rows, expert, [y.detach(), *gradients]


def expert_mlp(
    shape: ExpertShape,
    *,
    device: torch.device | str = "cpu",
    tokens: int | None = None,
    routing: str = "random",
    dtype: torch.dtype = DTYPE,
) -> GroupedCase:
    """The grouped MLP of a model's expert layer, with R = tokens * topk rows."""
    experts, hidden, width = shape.num_experts, shape.hidden, shape.intermediate
    options = {"bias": False, "device": device, "dtype": dtype}
    layer = Sequential(
        ops.GroupedLinear(experts, hidden, 2 * width, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(experts, width, hidden, **options),
    )
    rows = (tokens or shape.tokens) * shape.topk
    sizes = split_sizes(experts, rows, routing)
    return _case(layer, _mlp, sizes, hidden, hidden, 6 * hidden * width, scaled=True)


def expert_linear(shape: ExpertShape, *, device: torch.device | str = "cpu", tokens: int | None = None) -> GroupedCase:
    """FC1 of a model's expert layer, alone."""
    hidden, features = shape.hidden, 2 * shape.intermediate
    layer = Sequential(ops.GroupedLinear(shape.num_experts, hidden, features, bias=False, device=device, dtype=DTYPE))
    sizes = split_sizes(shape.num_experts, (tokens or shape.tokens) * shape.topk, "random")
    return _case(layer, _linear, sizes, hidden, features, 2 * hidden * features, scaled=False)


@cache
def _with_grouped_mm(formula: Callable[..., Tensor], compiled: bool) -> Callable[..., Tensor]:
    def way(ends: Tensor, *tensors: Tensor) -> Tensor:
        return formula(lambda x, w: F.grouped_mm(x, w.mT, offs=ends), *tensors)

    return torch.compile(way, fullgraph=True, dynamic=False) if compiled else way


def _mlp(product: Product, x: Tensor, scales: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = product(x, w1).chunk(2, dim=-1)
    return product((F.silu(gate) * up * scales[:, None]).to(x.dtype), w2)


def _linear(product: Product, x: Tensor, w: Tensor) -> Tensor:
    return product(x, w)


def _case(
    layer: Sequential, formula: Callable[..., Tensor], sizes: list[int], in_features: int, out_features: int,
    flop_per_row: int, *, scaled: bool,
) -> GroupedCase:  # fmt: skip
    rows, weight = sum(sizes), next(layer.parameters())
    options = {"device": weight.device, "dtype": weight.dtype}
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    inputs = {"x": torch.randn(rows, in_features, **options)}
    if scaled:
        inputs["scales"] = torch.rand(rows, device=weight.device)
    return GroupedCase(
        layer,
        {name: tensor.requires_grad_() for name, tensor in inputs.items()},
        torch.randn(rows, out_features, **options),
        flop_per_row * rows,
        sizes,
        formula,
    )
