"""Linear: y = x W^T + b, quantized as the recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.kernels.collectives import BACKENDS_ORDER, NOT_REPEATED, NOT_TRACED, RankGroup, Ranks
from ops.kernels.grouped_gemm.bias_grad import grouped_bias_grad
from ops.products.held_weights import explain_held
from ops.products.main_grad import OperationWithWeights
from ops.products.product import for_wgrad, gemm, quantized, wgrad
from ops.products.tensor_parallel import TensorParallel, fill
from ops.products.tile_words import explain_dequantized
from ops.products.weights import quantized_weights
from ops.runner.checked import Checked
from ops.runner.context import at_tensor
from ops.runner.operation import BackwardOfBasic, OperationContext
from ops.runner.parameters import parameter_names
from ops.runner.set_once import SetOnce
from ops.runner.shapes import check_features, check_parameter_dtype
from recipes.arguments import as_flag, check_flags, positive_integers
from recipes.recipe import Recipe, Role
from recipes.request import PlanRequest
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.splits import Splits


class Linear(OperationWithWeights):
    """y = x W^T + b, for x [..., in_features].

    weight: [out_features, in_features]; bias: [out_features]. Initialised as `torch.nn.Linear`.
    Under a recipe x, W and dy are quantized for the three products: x and W along in_features for the forward pass,
    dy and W along out_features for dx, dy and x along the rows for dW. The bias gradient is the sum of the
    unquantized dy over the rows, accumulated in float32.

    accumulate_into_main_grad, delay_wgrad_compute: where and when the weight gradient goes: `ops.products.main_grad`.
    as_one_group: multiply by the kernel of `GroupedLinear`, as its only group, and sum the bias gradient as that does.
        On a GPU the library's product sums in another order; with it a `GroupedLinear` has the bits of such Linears,
        one for each group. Not in float64 on a GPU, which is the library's there too.

    tensor_parallel: "column" or "row": the ranks of `group` divide the layer. in_features and out_features are those of
        the whole layer. Rank r of n holds, and computes with,

            "column": rows [r N/n, (r + 1) N/n) of W [N, K] and of b: y is [..., N/n], dx is summed over the ranks
            "row":    columns [r K/n, (r + 1) K/n) of W: x is [..., K/n], x W_r^T is summed over the ranks, and then b,
                      which all of them hold, is added once

        Behind a column-parallel layer and an element-wise activation stands a row-parallel one.
    group: a torch.distributed ProcessGroup, or a DeviceMesh of one dimension (mesh["tp"])
    sequence_parallel: the rows, the first dimension of x, are divided outside of the pair of layers. "column": x is
        this rank's rows; those of all ranks are gathered before the product, and dx is scattered. "row": y is this
        rank's rows of the sum; dy is gathered. For the weight gradient this rank's rows of x are kept, which
        backward gathers again; under a recipe, the quantized copy of all rows.
    gated: "column", for an activation of [gate | linear part] without interleaving: W's rows are two halves, and a rank
        holds the rows [r N/2n, (r + 1) N/2n) of each. Interleaved halves, in runs that N/n holds whole, need no more
        than "column".

    Each rank has the same gradients as the whole layer, for its share of W and b; those of the b of a row-parallel
    layer are alike on all ranks. A share is initialised as part of the whole layer, so give all ranks the same random
    state; for that moment W is there as a whole. `ops.products.tensor_parallel` states what is exchanged, and what a
    recipe's scales belong to. Forward and backward are collectives: every rank makes the same calls in the same order,
    also without rows. A CUDA graph can hold NCCL's, but not gloo's.

    Raises TypeError for arguments of another kind, ValueError for features that are not positive or that the ranks do
    not divide, tensor_parallel without group, an x whose last dimension is not in_features (or its share), parameters
    assigned in another shape, and, with sequence_parallel, rows that the ranks do not divide, before anything is sent.
    For CPU tensors RuntimeError, on every rank, where ranks differ in x's shape or dtype, or in the gradients that they
    need; on GPUs that is not compared, and they wait for each other or receive wrong values.
    """

    accepts_quantized = True

    repeatable = True

    in_features = SetOnce[int]()
    out_features = SetOnce[int]()
    tensor_parallel = SetOnce[str | None]()
    group = SetOnce[RankGroup | None]()
    sequence_parallel = SetOnce[bool]()
    gated = SetOnce[bool]()
    as_one_group = Checked(as_flag)

    class Saved(NamedTuple):
        # Tensor (this rank's rows, where they are gathered) | QuantizedTensor (columnwise copy only); None if no weight
        # gradient is needed
        x: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        as_one_group: bool = False,
        tensor_parallel: str | None = None,
        group: Ranks | None = None,
        sequence_parallel: bool = False,
        gated: bool = False,
    ) -> None:
        super().__init__(accumulate_into_main_grad=accumulate_into_main_grad, delay_wgrad_compute=delay_wgrad_compute)
        sizes = positive_integers("Linear", in_features=in_features, out_features=out_features)
        check_flags(bias=bias)
        check_parameter_dtype(dtype)
        self.in_features, self.out_features = in_features, out_features = sizes
        self.as_one_group = as_one_group
        self.parallel = TensorParallel.of(
            tensor_parallel, group, in_features=in_features, out_features=out_features, gated=gated,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        self.tensor_parallel, self.sequence_parallel, self.gated = tensor_parallel, sequence_parallel, gated
        self.group = None if self.parallel is None else self.parallel.group
        self.own_in_features, self.own_out_features = in_features, out_features
        if self.parallel is not None:
            self.why_in_full = NOT_REPEATED
            self.divides_output = self.parallel.divides_output
            self.own_in_features, self.own_out_features = self.parallel.in_features, self.parallel.out_features
        shape = self.own_out_features, self.own_in_features
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[:1], device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(in_features), weight and bias, as `torch.nn.Linear`."""
        bound = self.in_features**-0.5
        uniform = partial(nn.init.uniform_, a=-bound, b=bound)
        fill(self.weight, uniform, self.parallel)
        if self.bias is not None:
            fill(self.bias, uniform, self.parallel, is_bias=True)
        self.hold_quantized()

    @property
    def use_bias(self) -> bool:
        """Whether it has a bias, which is not computed for this."""
        return "bias" in parameter_names(self)

    def input_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return recipe.quantizer(Role.INPUT)

    def grad_output_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return recipe.quantizer(Role.GRAD_OUTPUT)

    def kernel(self, request: PlanRequest) -> str:
        as_one_group = "grouped GEMM of one group (Triton)"
        way = "torch" if self._multiplies_in_torch(request) else as_one_group
        if way == "torch" and request.recipe.batch_invariant:
            way = f"fprop by {'products of one row' if request.device.type == 'cpu' else as_one_group}, else torch"
        return way + explain_dequantized(request) + self._held(request) + self.transfers(request)

    def _multiplies_in_torch(self, request: PlanRequest) -> bool:
        return not self.as_one_group or request.device.type != "cuda" or request.dtype == torch.float64

    def _held(self, request: PlanRequest) -> str:
        return explain_held(self, self.weight_names, request.recipe)

    def transfers(self, request: PlanRequest) -> str:
        return "" if self.parallel is None else self.parallel.explain(request.device)

    def why_not_batch_invariant(self, request: PlanRequest) -> str | None:
        return BACKENDS_ORDER if self.parallel is not None and self.parallel.is_row else None

    def why_not_captured(self, request: PlanRequest) -> str | None:
        if self.parallel is None:
            return super().why_not_captured(request)
        return self.parallel.group.why_not_captured(request.device)

    def why_not_traced(self, path: str) -> str | None:
        return super().why_not_traced(path) if self.parallel is None else NOT_TRACED

    def fuser_forward(self, ctx: OperationContext, x: Any, extras: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        return self.fprop(ctx, x), {}

    def fuser_backward(self, ctx: OperationContext, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> BackwardOfBasic:
        if self.gathers_grad_output:
            dy = self.parallel.gather_grad_output(at_tensor(dy))  # type: ignore[union-attr]
        dx, gradients = self.dgrad_and_wgrad(ctx, dy)
        if "bias" in ctx.needs.params:
            gradients["bias"] = self.bias_gradient(at_tensor(dy))
        return dx, gradients, {}

    def bias_gradient(self, dy: Tensor) -> Tensor:
        """The sum of dy [..., N] over its rows, [N], accumulated in float32 or better."""
        if not self.as_one_group or (dy.is_cuda and dy.dtype == torch.float64):
            return column_sums(dy)
        rows, wide = at_tensor(_matrix(dy)), torch.promote_types(dy.dtype, torch.float32)
        return grouped_bias_grad(rows, Splits.whole(len(rows), rows.device), out_dtype=wide)[0]

    @property
    def gathers_grad_output(self) -> bool:
        """Whether dy is a rank's share of the rows, and all of them are gathered before anything is computed."""
        return self.parallel is not None and self.parallel.exchange.dy is not None

    def fprop(
        self, ctx: OperationContext, x: Tensor | QuantizedTensor, alpha: float = 1.0, extra: Tensor | None = None
    ) -> Tensor:
        """x W^T + b, or without b and ranks that divide it alpha x W^T + extra, in memory of its own, rounded once.

        extra: of y's shape. Sets `ctx.saved`.
        """
        self.check_input(ctx, x)
        parallel = self.parallel
        if parallel is not None and parallel.exchange.x is not None:
            own_rows = at_tensor(x)
            x = parallel.gather_input(own_rows)
        need_wgrad = "weight" in ctx.needs.params
        rows = quantized(_matrix(x), ctx.quantizer(Role.INPUT), rowwise=True, columnwise=need_wgrad)
        w = self._weight(ctx, rowwise=True)
        bias = ctx.param("bias") if "bias" in ctx.parameter_slots else None
        added = None if parallel is not None and parallel.is_row else bias
        if extra is not None:
            added = at_tensor(_matrix(extra))
        split = ctx.recipe.split_accumulator("fprop")
        capability = ctx.path.capability
        y = gemm(
            "TN", rows, w, ctx.dtype, capability=capability, added=added, alpha=alpha, split_accumulator=split,
            as_one_group=self.as_one_group, batch_invariant=ctx.recipe.batch_invariant,
        )  # fmt: skip
        if ctx.needs_grad:
            kept = for_wgrad(rows) if need_wgrad else None
            ctx.saved = self.Saved(own_rows if need_wgrad and self._gathers_again(ctx) else kept)
        y = y.view(*x.shape[:-1], self.own_out_features)
        if parallel is not None:
            y = parallel.reduce_output(y)
        return y if bias is None or bias is added else y.add_(bias)

    def check_input(self, ctx: OperationContext, x: Any) -> None:
        """Raise ValueError for an x, a weight or a bias without the features, and what `TensorParallel.check` does. A
        collective then."""
        why = None
        if x.shape[-1:] != (self.own_in_features,):
            needed = f"[..., {self.own_in_features}] is needed. Check the operation before this one."
            why = f"x has shape {list(x.shape)}, but {needed}"
        why = why or self._why_not_parameters(ctx)
        if self.parallel is not None:
            self.parallel.check(ctx, x, why)
        elif why is not None:
            raise ValueError(why)

    def _why_not_parameters(self, ctx: OperationContext) -> str | None:
        shape = self.own_out_features, self.own_in_features
        for name, needed in (("weight", shape), ("bias", shape[:1])):
            if name in ctx.parameter_slots and ctx.held(name).shape != needed:
                return (
                    f"{name} has shape {list(ctx.held(name).shape)}, but {list(needed)} is needed, of the features "
                    "that the Linear was made with. Make another one for parameters of other shapes."
                )
        return None

    def dgrad_and_wgrad(
        self, ctx: OperationContext, dy: Tensor | QuantizedTensor, alpha: float = 1.0
    ) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        """alpha dy W, in memory of its own, and alpha dy^T x by its parameter's name; what is needed of both.

        The second is what autograd gets, see `ops.products.main_grad`. dy: of all rows, `gathers_grad_output`.
        """
        saved: Linear.Saved = ctx.saved
        needs = ctx.needs
        need_wgrad = "weight" in needs.params
        dx = None
        gradients: dict[str, Tensor | None] = {}
        if not (needs.input or need_wgrad):
            return dx, gradients  # dy is not quantized: that would draw a random seed or record an amax
        rows = quantized(_matrix(dy), ctx.quantizer(Role.GRAD_OUTPUT), rowwise=needs.input, columnwise=need_wgrad)
        capability = ctx.path.capability
        if needs.input:
            w = self._weight(ctx, columnwise=True)
            split = ctx.recipe.split_accumulator("dgrad")
            dx = gemm(
                "NN", rows, w, ctx.dtype, capability=capability, alpha=alpha, split_accumulator=split,
                as_one_group=self.as_one_group,
            )  # fmt: skip
            dx = dx.view(*dy.shape[:-1], self.own_in_features)
            if self.parallel is not None:
                dx = self.parallel.reduce_grad_input(dx)
        if need_wgrad:
            split = ctx.recipe.split_accumulator("wgrad")
            x = saved.x
            if self._gathers_again(ctx):
                x = _matrix(self.parallel.gather_input(x))  # type: ignore[union-attr]
            product = partial(
                wgrad, rows, x, dtype=ctx.dtype, capability=capability, alpha=alpha, split_accumulator=split,
                as_one_group=self.as_one_group,
            )  # fmt: skip
            gradients |= self.accumulate(ctx, product)
        return dx, gradients

    def _gathers_again(self, ctx: OperationContext) -> bool:
        """Whether a rank's own rows of x are kept for wgrad, and gathered in backward: in high precision."""
        gathers = self.parallel is not None and self.parallel.exchange.x is not None
        return gathers and ctx.recipe.quantizer(Role.INPUT) is None

    def _weight(self, ctx: OperationContext, *, rowwise: bool = False, columnwise: bool = False) -> Any:
        """The weight as an operand: rowwise for fprop, columnwise for dgrad; both if both will be needed."""
        quantizer = ctx.quantizer(Role.WEIGHT)
        if quantizer is None:
            return ctx.param("weight")

        def quantize(rowwise: bool, columnwise: bool) -> Any:
            return quantizer.quantize(ctx.param("weight"), rowwise=rowwise, columnwise=columnwise)

        columnwise = columnwise or ctx.needs.input
        return quantized_weights(ctx, ("weight",), quantizer, quantize, rowwise=rowwise, columnwise=columnwise)

    def prepare_weights(self, ctx: OperationContext) -> Any:
        return None if ctx.quantizer(Role.WEIGHT) is None else self._weight(ctx, rowwise=True)

    def flops(self, rows: int) -> int:
        return 2 * rows * self.own_in_features * self.own_out_features

    def features(self, incoming: int | None) -> int | None:
        check_features(incoming, self.own_in_features)
        return self.own_out_features

    def extra_repr(self) -> str:
        own = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
        own += ", as_one_group=True" if self.as_one_group else ""
        own += "" if self.parallel is None else self.parallel.extra_repr()
        return own + super().extra_repr()


def column_sums(dy: Tensor) -> Tensor:
    """The gradient of a bias, [features]: the sum of dy [..., features] over its rows, in float32 or better."""
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))


def _matrix(x: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
    return x.reshape(-1, x.shape[-1]) if isinstance(x, Tensor) else x
