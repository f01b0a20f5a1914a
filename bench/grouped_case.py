"""One grouped layer with its data: run under any recipe, by torch's own grouped products, and in fp32 as the reference.

    expert_mlp     GroupedLinear(E, H, 2F) -> ScaledSwiGLU -> GroupedLinear(E, F, H)
    expert_linear  GroupedLinear(E, H, 2F)

Without biases, in bf16, the scales in fp32; the sizes are those of a model's expert layer, its rows divided at random.
"""

# R rows, E experts, H hidden, F expert width

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.bench_grouped_mlp import split_sizes
from bench.models import ExpertShape
from bench.schedule import recipe_named
from bench.sqnr import Sqnr
from fuser import Sequential, autocast, ops

DTYPE = torch.bfloat16
PASSES = ("forward", "forward + backward")

Call = Callable[[], Tensor]
Step = Callable[[], list[Tensor]]
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GroupedCase:
    """A layer that stays, its inputs and split sizes, and the same as a formula.

    inputs:  by name, [R, ...]; "x" first, the others are extra inputs
    sizes:   rows of each expert
    formula: y of a product x w^T, the inputs and the weights; for all rows, or for those of one expert
    flop:    of forward; backward has twice as many
    """

    layer: Sequential
    inputs: dict[str, Tensor]
    sizes: list[int]
    dy: Tensor
    formula: Callable[..., Tensor]
    flop: int

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple(self.layer.parameters())

    @property
    def device(self) -> torch.device:
        return self.dy.device

    @property
    def rows(self) -> int:
        return self.dy.shape[0]

    @property
    def names(self) -> list[str]:
        """Of what a forward + backward gives, in order."""
        return ["y", *(f"d{name}" for name in self.inputs), *(f"dw{n}" for n in range(1, len(self.weights) + 1))]

    def ours(self, label: str) -> Call:
        """The layer, as it is, under the recipe of this label."""
        recipe = recipe_named(label)
        x, *_ = self.inputs.values()
        extras = {name: tensor for name, tensor in self.inputs.items() if name != "x"}
        sizes = torch.tensor(self.sizes, device=self.device)

        def call() -> Tensor:
            with autocast(recipe=recipe):
                return self.layer(x, split_sizes=sizes, **extras)

        return call

    def torchs(self, *, compiled: bool = False) -> Call:
        """The formula with `F.grouped_mm`, eager or compiled."""
        ends = torch.tensor(self.sizes, device=self.device).cumsum(0).int()

        def formula(*tensors: Tensor) -> Tensor:
            return self.formula(lambda x, w: F.grouped_mm(x, w.mT, offs=ends), *tensors)

        way = torch.compile(formula, fullgraph=True, dynamic=False) if compiled else formula
        tensors = (*self.inputs.values(), *self.weights)
        return lambda: way(*tensors)

    def step(self, call: Call, passes: str) -> Step:
        """One of `PASSES`: the output, and with "backward" the gradients of all inputs and weights."""
        wanted = (*self.inputs.values(), *self.weights)

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [call()]

        def forward_and_backward() -> list[Tensor]:
            y = call()
            return [y.detach(), *torch.autograd.grad(y, wanted, self.dy)]

        return forward if passes == "forward" else forward_and_backward

    def flop_of(self, passes: str) -> int:
        return self.flop * (1 if passes == "forward" else 3)

    def bytes_of(self, passes: str) -> int:
        """What a pass must read and write at least: each tensor that goes in or comes out, once."""
        inputs = sum(tensor.nbytes for tensor in (*self.inputs.values(), *self.weights))
        return inputs + self.dy.nbytes if passes == "forward" else 2 * (inputs + self.dy.nbytes)

    def sqnr(self, found: list[Tensor]) -> dict[str, float]:
        """dB of each tensor of a step (or of y alone) by name, against the formula in fp32, expert by expert."""
        sums = {name: Sqnr() for name in self.names[: len(found)]}
        for rows, expert, exact in self._reference():
            for index, (name, got) in enumerate(zip(sums, found, strict=True)):
                part = got[rows] if index <= len(self.inputs) else got[expert]
                sums[name].add(part, exact[index])
        return {name: total.db for name, total in sums.items()}

    def _reference(self) -> Iterator[tuple[slice, int, list[Tensor]]]:
        """The rows of each expert, its number, and its part of the results; one expert at a time, to save memory."""
        start = 0
        for expert, size in enumerate(self.sizes):
            rows = slice(start, start + size)
            start += size
            mine = [tensor[rows] for tensor in self.inputs.values()] + [weight[expert] for weight in self.weights]
            exact = [tensor.detach().float().requires_grad_() for tensor in mine]
            y = self.formula(lambda x, w: x @ w.mT, *exact)
            yield rows, expert, [y.detach(), *torch.autograd.grad(y, exact, self.dy[rows].float())]


def expert_mlp(shape: ExpertShape, *, device: torch.device | str = "cpu", tokens: int | None = None) -> GroupedCase:
    """The grouped MLP of a model's expert layer, with R = tokens * topk rows."""
    experts, hidden, width = shape.num_experts, shape.hidden, shape.intermediate
    options = {"bias": False, "device": device, "dtype": DTYPE}
    layer = Sequential(
        ops.GroupedLinear(experts, hidden, 2 * width, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(experts, width, hidden, **options),
    )
    return _case(layer, _mlp, shape, hidden, 6 * hidden * width, device, tokens, scaled=True)


def expert_linear(shape: ExpertShape, *, device: torch.device | str = "cpu", tokens: int | None = None) -> GroupedCase:
    """FC1 of a model's expert layer by itself."""
    hidden, features = shape.hidden, 2 * shape.intermediate
    layer = Sequential(ops.GroupedLinear(shape.num_experts, hidden, features, bias=False, device=device, dtype=DTYPE))
    return _case(layer, _linear, shape, features, 2 * hidden * features, device, tokens, scaled=False)


def _mlp(product: Product, x: Tensor, scales: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = product(x, w1).chunk(2, dim=-1)
    return product((F.silu(gate) * up * scales[:, None]).to(x.dtype), w2)


def _linear(product: Product, x: Tensor, w: Tensor) -> Tensor:
    return product(x, w)


def _case(
    layer: Sequential, formula: Callable[..., Tensor], shape: ExpertShape, out_features: int, flop_per_row: int,
    device: torch.device | str, tokens: int | None, *, scaled: bool,
) -> GroupedCase:  # fmt: skip
    rows = (tokens or shape.tokens) * shape.topk
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    inputs = {"x": torch.randn(rows, shape.hidden, device=device, dtype=DTYPE)}
    if scaled:
        inputs["scales"] = torch.rand(rows, device=device)
    return GroupedCase(
        layer,
        {name: tensor.requires_grad_() for name, tensor in inputs.items()},
        split_sizes(shape.num_experts, rows, "random"),
        torch.randn(rows, out_features, device=device, dtype=DTYPE),
        formula,
        flop_per_row * rows,
    )
