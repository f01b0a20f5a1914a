"""GroupedLinear: one linear layer for each group of rows."""
# T rows, G groups, K in features, N out features

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.kernels.collectives import BACKENDS_ORDER, NOT_REPEATED, NOT_TRACED, RankGroup, Ranks
from ops.kernels.elementwise.activation import Activation
from ops.kernels.grouped_gemm.operands import accumulator_like
from ops.products.held_weights import HeldAs, explain_held
from ops.products.main_grad import OperationWithWeights
from ops.products.paths import SplitTensors, choose_path
from ops.products.tensor_parallel import TensorParallel, fill
from ops.products.tile_words import explain_dequantized, explain_tiles
from ops.products.weights import quantized_weights
from ops.runner.callers_buffers import overlap
from ops.runner.checked import Checked
from ops.runner.context import at_tensor
from ops.runner.operation import BackwardOfBasic, OperationContext
from ops.runner.parameters import parameter_names
from ops.runner.set_once import SetOnce
from ops.runner.shapes import check_features, check_matrix, check_parameter_dtype
from recipes.arguments import as_flag, check_factors, check_flags, positive_integers
from recipes.recipe import Recipe, Role
from recipes.request import PlanRequest
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_parameter import QuantizedParameter
from recipes.tensors.quantizer import QuantizedBuffers, Quantizer
from recipes.tensors.splits import Splits
from recipes.triton.tape import call_again


class GroupedLinear(OperationWithWeights):
    """y_g = x_g W_g^T + b_g on the rows of each group g, for x [T, in_features].

    Extra input split_sizes: [num_groups] int32 or int64, on the host or the device; the rows of x belong to the groups
    in order. Any sizes: groups may be empty, sizes need be no multiple of anything, and x may have more rows than
    their sum. Rows past the sum are zero in y and dx. An empty group's weight gradient is exactly zero.

    scale_bias: adds scales[t] b_g in place of b_g, with the extra input scales [T]; needs bias. Then
                db_g = sum_t scales[t] dy[t] and dscales[t] = dy[t] . b_g.
    stacked:    one parameter `weight` [G, N, K]; False: one a group, `weight0`, `weight1`, ...
    stacked_bias: one parameter `bias` [G, N]; False: one a group, `bias0`, ...; None: as `stacked`.
                A state dict of any form loads into the others. Biases may be assigned later, in this form, or None.
    save_original_input: keeps x for the weight gradients as it was given, in place of codes, and quantizes it again in
                backward, with the same bits. It takes less memory where something else keeps x anyway, and behind a
                `Dispatch`, whose tokens are kept then: the rows, topk times as many, are made again in backward. Not of
                an x that a fusion computes again, as FC2's in the grouped MLP. (TransformerEngine's name.)
    accumulate_into_main_grad, delay_wgrad_compute: where and when weight gradients go: `ops.products.main_grad`.
    buffers:    "output" [T, N] and "grad_input" [T, K], the caller's, contiguous, in the computing dtype. They may be
                slices of one arena. What would be overwritten while something needs it is a ValueError before anything
                is written (`ops.runner.callers_buffers`); a later forward over what an earlier one keeps is
                autograd's error.

    tensor_parallel: "column" or "row": the ranks of `group` divide each layer, as those of `Linear`. in_features K and
        out_features N are those of the whole layers. Rank r of n holds

            "column": rows [r N/n, (r + 1) N/n) of each W_g [N, K] and b_g: y is [T, N/n], dx is summed over the ranks
            "row":    columns [r K/n, (r + 1) K/n) of each W_g: x is [T, K/n], the products are summed over the ranks,
                      and b_g, which all of them hold, is added once, in the product of the group's first rank

        All ranks have the same split sizes and scales. An activation with scales between the two has this group too.
    group: a torch.distributed ProcessGroup, or a DeviceMesh of one dimension (mesh["tp"])
    gated: "column", for an activation of [gate | linear part] without interleaving: a rank holds the same rows of both
        halves. Interleaved halves, in runs that N/n holds whole, need no more than "column".

    Under a recipe x, W and dy are quantized as for `Linear`, each group by itself. Weights are initialised as
    `torch.nn.Linear`, biases with zeros (as TransformerEngine). Of a stacked weight `torch.nn.init` would take N K as
    the inputs of a feature: in its place initialise each group's, `for w in layer.weight: init.xavier_uniform_(w)`.

    Divided layers are initialised, exchange and refuse as a divided `Linear` does.

    Raises TypeError for arguments of another kind, ValueError for features or groups that are not positive or that the
    ranks do not divide, tensor_parallel without group, scale_bias without bias, parameters assigned in another form, an
    x, split sizes, scales or a buffer of the wrong shape, and a buffer in memory of something else.
    """

    accepts_quantized = True
    accepts_gathered = True
    is_grouped = True
    buffer_names = ("output", "grad_input")
    repeatable = True

    num_groups = SetOnce[int]()
    in_features = SetOnce[int]()
    out_features = SetOnce[int]()
    scale_bias = SetOnce[bool]()
    stacked = SetOnce[bool]()
    stacked_bias = SetOnce[bool]()
    tensor_parallel = SetOnce[str | None]()
    group = SetOnce[RankGroup | None]()
    gated = SetOnce[bool]()
    save_original_input = Checked(as_flag)

    class Saved(NamedTuple):
        x: Tensor | GroupedTensor | SplitTensors | None  # columnwise copy only, where quantized
        splits: Splits
        scales: Tensor | None
        input_scale: Tensor | None = None  # with which x was quantized, if it is state that changes between steps

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scale_bias: bool = False,
        stacked: bool = True,
        stacked_bias: bool | None = None,
        save_original_input: bool = False,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        tensor_parallel: str | None = None,
        group: Ranks | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__(accumulate_into_main_grad=accumulate_into_main_grad, delay_wgrad_compute=delay_wgrad_compute)
        num_groups, in_features, out_features = positive_integers(
            "GroupedLinear", num_groups=num_groups, in_features=in_features, out_features=out_features
        )
        stacked_bias = stacked if stacked_bias is None else stacked_bias
        check_flags(bias=bias, scale_bias=scale_bias, stacked=stacked, stacked_bias=stacked_bias)
        check_parameter_dtype(dtype)
        if scale_bias and not bias:
            raise ValueError("scale_bias=True needs a bias to scale. Give bias=True, or leave scale_bias out.")
        self.num_groups = self.num_scales = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.scale_bias = scale_bias
        self.stacked = stacked
        self.stacked_bias = stacked_bias
        self.save_original_input = save_original_input
        self.weight_names = _names("weight", num_groups, stacked)
        self._names_of_biases = _names("bias", num_groups, stacked_bias)
        self.extra_inputs = {"split_sizes": Splits, "scales": Tensor} if scale_bias else {"split_sizes": Splits}
        self.parallel = TensorParallel.of(
            tensor_parallel, group, in_features=in_features, out_features=out_features, gated=gated
        )  # fmt: skip
        self.tensor_parallel, self.gated = tensor_parallel, gated
        self.group = None if self.parallel is None else self.parallel.group
        self.own_in_features, self.own_out_features = in_features, out_features
        if self.parallel is not None:
            self.why_in_full = NOT_REPEATED
            self.divides_output = self.parallel.divides_output
            self.own_in_features, self.own_out_features = self.parallel.in_features, self.parallel.out_features
        shape: tuple[int, ...] = (self.own_out_features, self.own_in_features)
        forms = (self.weight_names, shape, stacked), (self._names_of_biases, shape[:1], stacked_bias)
        for names, each, as_one in forms if bias else forms[:1]:
            lead = (num_groups,) if as_one else ()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.empty(*lead, *each, device=device, dtype=dtype)))
        if not bias:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights uniform in +-1/sqrt(in_features); biases zero."""
        bound = self.in_features**-0.5
        for name in self.weight_names:
            fill(self.get_parameter(name), partial(nn.init.uniform_, a=-bound, b=bound), self.parallel)
        for name in self.bias_names:
            nn.init.zeros_(self.get_parameter(name))
        self.hold_quantized()

    @property
    def use_bias(self) -> bool:
        """Whether biases are added: whether it has any."""
        return not set(self._names_of_biases).isdisjoint(parameter_names(self))

    @property
    def bias_names(self) -> tuple[str, ...]:
        """The names of its biases, of which it may have none."""
        return self._names_of_biases if self.use_bias else ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        kind = name.rstrip("0123456789")
        names = {"weight": self.weight_names, "bias": self._names_of_biases}.get(kind, (name,))
        if param is not None and name not in names:
            needed = names[0] if len(names) == 1 else f"{names[0]}, ..., {names[-1]}"
            raise ValueError(
                f"{name!r} is given, but this GroupedLinear has its {kind} as {needed}, and reads nothing else. Assign "
                "that, or make it with other `stacked` and `stacked_bias`."
            )
        if param is None and self.scale_bias and name in self._names_of_biases:
            raise ValueError(f"{name!r} is set to None, but scale_bias=True needs a bias to scale. Give zeros.")
        super().register_parameter(name, param)

    def input_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return recipe.quantizer(Role.INPUT)

    def grad_output_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return recipe.quantizer(Role.GRAD_OUTPUT)

    def gathers(self, role: Role, request: PlanRequest) -> str | None:
        of_input = role is Role.INPUT
        if self.reads_values or (not of_input and self.scale_bias):  # the gradient of the scales multiplies values
            return None
        quantizer = (self.input_quantizer if of_input else self.grad_output_quantizer)(request.recipe)
        reads = quantizer is not None and quantizer.gathers and choose_path(request).name == "grouped"
        how = "read where they lie" if reads and request.device.type == "cuda" else "copied"
        if of_input and self.save_original_input:
            return f"{how} in forward, and again in backward"
        return f"{how} by the cast that takes them" if reads else None

    def kernel(self, request: PlanRequest) -> str:
        in_torch = request.device.type != "cuda"
        if choose_path(request).name == "split":
            way = "a product a group (torch)" if in_torch else "a product a group"
        elif in_torch:
            way = "grouped GEMM (torch)"
        else:
            weights = (self.num_groups, self.own_out_features, self.own_in_features)
            way = f"grouped GEMM (Triton: {explain_tiles(request, weights, accumulate=self.accumulate_into_main_grad)})"
        held = explain_held(self, self.weight_names, request.recipe)
        return way + explain_dequantized(request) + held + self.transfers(request)

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

    def weight_operand(self, ctx: OperationContext, *, rowwise: bool = False, columnwise: bool = False) -> Any:
        """The weights as the path multiplies them: rowwise for fprop, columnwise for dgrad.

        Quantized, they may have both copies, if both will be needed.
        """
        quantizer = ctx.quantizer(Role.WEIGHT)
        if quantizer is None:
            return ctx.path.weight(self.read(ctx, self.weight_names), None, rowwise=rowwise, columnwise=columnwise)

        def quantize(rowwise: bool, columnwise: bool, once: bool = False) -> Any:
            weights = self.read(ctx, self.weight_names)
            return ctx.path.weight(weights, quantizer, rowwise=rowwise, columnwise=columnwise, once=once)

        columnwise = columnwise or ctx.needs.input
        return quantized_weights(
            ctx, self.weight_names, quantizer, quantize, rowwise=rowwise, columnwise=columnwise,
            once=partial(quantize, once=True),
        )  # fmt: skip

    def prepare_weights(self, ctx: OperationContext) -> Any:
        return None if ctx.quantizer(Role.WEIGHT) is None else self.weight_operand(ctx, rowwise=True)

    def biases(self, ctx: OperationContext) -> Tensor | None:
        """[G, N], or None without a bias."""
        if ctx.parameter_slots.keys().isdisjoint(self._names_of_biases):
            return None
        tensors = self.read(ctx, self._names_of_biases)
        return tensors if isinstance(tensors, Tensor) else torch.stack(tensors)

    def read(self, ctx: OperationContext, names: tuple[str, ...]) -> Tensor | list[Tensor]:
        """The parameters of these names: stacked, or a list with one a group.

        A subclass that stores weights in another layout returns them as [G, N, K] here, and their gradients as they
        are stored in `weight_gradients`.
        """
        stacked = self.stacked if names == self.weight_names else self.stacked_bias
        return ctx.param(names[0]) if stacked else [ctx.param(name) for name in names]

    def check_can_be_held(self, held_as: HeldAs) -> None:
        super().check_can_be_held(held_as)
        if type(self).read is not GroupedLinear.read:
            raise ValueError(
                f"{type(self).__name__} stores its weights in another layout than products read, so they cannot be "
                "held quantized. Use a GroupedLinear, and convert its state dict."
            )

    def needs_weight_grad(self, ctx: OperationContext) -> bool:
        """Whether any weight needs a gradient."""
        return not ctx.needs.params.isdisjoint(self.weight_names)

    def needs_bias_grad(self, ctx: OperationContext) -> bool:
        """Whether any bias needs a gradient."""
        return not ctx.needs.params.isdisjoint(self._names_of_biases)

    def bias_gradients(
        self, ctx: OperationContext, dy: Any, splits: Splits, scales: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Tensor | None]:
        """The biases' gradients by name, and that of scales if the bias is scaled and it is needed."""
        gradients: dict[str, Tensor | None] = {}
        if self.needs_bias_grad(ctx):
            db = ctx.path.bias_grad(dy, splits, scales)
            gradients = (
                {"bias": db} if self.stacked_bias else dict(zip(self._names_of_biases, db.unbind(), strict=True))
            )
        dscales = None
        if scales is not None and "scales" in ctx.needs.extras:
            biases = self.biases(ctx)
            assert biases is not None, "scales are there only with scale_bias, which needs a bias"
            last = splits.num_groups - 1  # rows past the sum: dy is masked, any group does
            of_row = accumulator_like(biases).index_select(0, splits.group_of_row.clamp(max=last))
            products = (accumulator_like(at_tensor(dy)) * of_row).sum(-1)
            dscales = products.masked_fill(splits.group_of_row > last, 0).to(scales.dtype)
            if self.parallel is not None:
                dscales = self.parallel.sum_scale_gradients(dscales)
        return gradients, dscales

    @property
    def reads_values(self) -> bool:
        """Whether `fprop` reads x itself, besides what the path multiplies of it."""
        return False

    def reads_input_again(self, ctx: OperationContext) -> bool:
        """Whether `adapter_gradients` reads x."""
        return False

    def adapter_gradients(self, ctx: OperationContext, dy: Any, x: Tensor | None) -> dict[str, Tensor | None]:
        """The gradients of parameters that are neither weights nor biases. x: None where forward has kept it.

        Called behind `dgrad`, where dx is needed.
        """
        return {}

    def fuser_forward(self, ctx: OperationContext, x: Any, extras: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        splits, scales = self.check(ctx, x, extras)
        return self.fprop(ctx, self.input_operand(ctx, x, splits), x, splits, scales), {}

    def input_operand(self, ctx: OperationContext, x: Any, splits: Splits) -> Any:
        """x as fprop multiplies it, with the copy for wgrad if that is kept."""
        kept = self.needs_weight_grad(ctx) and not self.save_original_input
        return ctx.path.quantize(x, splits, ctx.quantizer(Role.INPUT), rowwise=True, columnwise=kept, saved=True)

    def kept_input(self, ctx: OperationContext) -> Any:
        """What forward has kept of x, as wgrad multiplies it."""
        saved: GroupedLinear.Saved = ctx.saved
        if not self.save_original_input:
            return saved.x
        quantizer = ctx.quantizer(Role.INPUT, saved.input_scale)
        x_q = ctx.path.quantize(saved.x, saved.splits, quantizer, rowwise=False, columnwise=True)
        return ctx.path.for_wgrad(x_q)

    def copies_of_grad(self, ctx: OperationContext, dy: Any, splits: Splits) -> dict[str, bool]:
        """Which copies of dy, or of what has its shape, backward multiplies."""
        wgrad = self.needs_weight_grad(ctx)
        shape = self.own_out_features, self.own_in_features
        in_rows = wgrad and ctx.path.wgrad_reads_rows(dy, splits, shape) and self.adds_in_float32(ctx)
        return {"rowwise": ctx.needs.input or in_rows, "columnwise": wgrad and not in_rows}

    def fuser_backward(self, ctx: OperationContext, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> BackwardOfBasic:
        saved: GroupedLinear.Saved = ctx.saved
        needs, path = ctx.needs, ctx.path
        wgrad = self.needs_weight_grad(ctx)
        gradients, dscales = self.bias_gradients(ctx, dy, saved.splits, saved.scales)
        dx = None
        if needs.input or wgrad:
            quantizer = ctx.quantizer(Role.GRAD_OUTPUT)
            dy_q = path.quantize(dy, saved.splits, quantizer, **self.copies_of_grad(ctx, dy, saved.splits))
            if needs.input:
                dx = self.dgrad(ctx, dy_q, dy)
            spare = self.release(ctx)
            if wgrad:
                gradients |= self.accumulate(ctx, partial(path.wgrad, dy_q, self.kept_input(ctx), spare=spare))
        gradients |= self.adapter_gradients(ctx, dy, None)
        return dx, gradients, {"scales": dscales}

    def fprop(
        self, ctx: OperationContext, x_q: Any, x: Any, splits: Splits, scales: Tensor | None, *, keeps_x: bool = True
    ) -> Tensor:
        """x_g W_g^T + (scales) b_g, in the caller's buffer if there is one. Sets `ctx.saved`.

        x: what x_q was made of if `reads_values` or `save_original_input`, else anything of its rows and device
        keeps_x: whether x is kept for the gradients of parameters; if not, backward gives it again
        """
        out = self.buffer(ctx, "output", x, self.own_out_features)
        parallel = self.parallel
        adds_bias = parallel is None or not parallel.is_row or parallel.group.rank == 0
        y = ctx.path.fprop(
            x_q,
            self.weight_operand(ctx, rowwise=True),
            bias=self.biases(ctx) if adds_bias else None,
            scales=scales if adds_bias else None,
            out=out,
        )
        self._keep(ctx, x_q, x, splits, scales, keeps_x)
        return y if parallel is None else parallel.reduce_output(y, out)

    def _keep(
        self, ctx: OperationContext, x_q: Any, x: Any, splits: Splits, scales: Tensor | None, keeps_x: bool
    ) -> None:
        """Sets `ctx.saved`, as `fprop` says."""
        if ctx.needs_grad:
            keeps_x = keeps_x and self.needs_weight_grad(ctx)
            if keeps_x and self.save_original_input:
                quantizer = ctx.quantizer(Role.INPUT)
                scale = None if quantizer is None else quantizer.snapshot(x.device)
                ctx.saved = self.Saved(x, splits, scales, input_scale=scale)
            else:
                ctx.saved = self.Saved(ctx.path.for_wgrad(x_q) if keeps_x else None, splits, scales)

    def fprop_and_activation(
        self, ctx: OperationContext, x_q: Any, x: Any, splits: Splits, spec: Activation, scales: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """h as `fprop` gives it and f(h) scales, for rows and weights that are not quantized; of a layer without bias
        and adapter that ranks do not divide. Sets `ctx.saved`."""
        out = self.buffer(ctx, "output", x, self.own_out_features)
        h, act = ctx.path.fprop_and_activation(x_q, self.weight_operand(ctx, rowwise=True), spec, scales)
        self._keep(ctx, x_q, x, splits, None, True)
        return h if out is None else out.copy_(h), act

    def fprop_and_cast(
        self,
        ctx: OperationContext,
        x_q: Any,
        x: Any,
        splits: Splits,
        spec: Activation,
        scales: Tensor | None,
        room: Callable[[], QuantizedBuffers | None],
        *,
        stores_h: bool,
    ) -> tuple[Tensor | None, QuantizedBuffers | None]:
        """The same for rows and weights that are codes, f(h) scales quantized into the buffers that `room` makes, or
        not computed if it makes none. h may be None if f(h) is computed and h is not to be stored.

        The weights are cast before: ranks that take other ways record their amaxes in this order, too."""
        out = self.buffer(ctx, "output", x, self.own_out_features)
        weights = self.weight_operand(ctx, rowwise=True)
        into = room()
        if into is None:
            h = ctx.path.fprop(x_q, weights, out=out)
        else:
            h = ctx.path.fprop_and_cast(x_q, weights, spec, scales, into, stores_h=stores_h)
            h = h if out is None or h is None else out.copy_(h)
        self._keep(ctx, x_q, x, splits, None, True)
        return h, into

    def fprop_activation(self, ctx: OperationContext, x_q: Any, spec: Activation, scales: Tensor | None) -> Tensor:
        """f(x_g W_g^T + b_g) scales, for rows and weights that are not quantized; not of a layer divided by row."""
        weights = self.weight_operand(ctx, rowwise=True)
        return ctx.path.fprop_activation(x_q, weights, spec, bias=self.biases(ctx), scales=scales)

    def dgrad(self, ctx: OperationContext, dy_q: Any, dy: Any) -> Tensor:
        """dy_g W_g, in the caller's buffer if there is one. dy: of the rows and device of dy_q."""
        out = self.buffer(ctx, "grad_input", dy, self.own_in_features)
        dx = ctx.path.dgrad(dy_q, self.weight_operand(ctx, columnwise=True), out=out)
        return dx if self.parallel is None else self.parallel.reduce_grad_input(dx, out)

    def release(self, ctx: OperationContext) -> int:
        """Let the operation before transfer dx, if that lies in its memory, while weight gradients are computed.
        Returns how many multiprocessors these leave to it."""
        if ctx.lent is None or ctx.lent.ready is None:
            return 0
        call_again(ctx.lent.ready)
        return 0 if self.delay_wgrad_compute else ctx.lent.multiprocessors

    def check(self, ctx: OperationContext, x: Any, extras: Mapping[str, Any]) -> tuple[Splits, Tensor | None]:
        """The extra inputs, once x and they fit each other, and other ranks have such too."""
        if self.parallel is None:
            return self._check(x, extras)
        try:
            checked = self._check(x, extras)
        except ValueError as error:
            self.parallel.check(ctx, x, str(error))
            raise
        self.parallel.check(ctx, x, None)
        return checked

    def _check(self, x: Any, extras: Mapping[str, Any]) -> tuple[Splits, Tensor | None]:
        check_matrix(x, "rows", self.own_in_features)
        splits: Splits = extras["split_sizes"]
        if splits.num_groups != self.num_groups:
            raise ValueError(
                f"split_sizes has {splits.num_groups} entries, but num_groups is {self.num_groups}. "
                "Give one size for each group, 0 for an empty one."
            )
        scales: Tensor | None = extras.get("scales") if self.scale_bias else None
        if scales is not None and scales.shape != x.shape[:1]:
            raise ValueError(
                f"scales has shape {list(scales.shape)}, but x has {x.shape[0]} rows. Give one scale a row."
            )
        if scales is not None:
            check_factors("scales", scales.dtype)
        return splits, scales

    def buffer(self, ctx: OperationContext, name: str, like: Any, features: int) -> Tensor | None:
        """The caller's buffer of that name, checked; None if there is none."""
        buffer = ctx.buffers.get(name)
        if buffer is None:
            return None
        needed = ((like.shape[0], features), ctx.dtype, like.device)
        given = (tuple(buffer.shape), buffer.dtype, buffer.device)
        if given != needed or not buffer.is_contiguous() or buffer.requires_grad:
            raise ValueError(
                f"The buffer {name!r} has shape {list(buffer.shape)}, {buffer.dtype}, on {buffer.device}, "
                f"contiguous={buffer.is_contiguous()}, requires_grad={buffer.requires_grad}. Needed: shape "
                f"{list(needed[0])}, {ctx.dtype}, on {like.device}, contiguous, without requires_grad."
            )
        read = [like] if isinstance(like, Tensor) else like.tensors()
        if any(tensor is not None and overlap(buffer, tensor) for tensor in read):
            raise ValueError(f"The buffer {name!r} shares memory with what is read while it is written. Give another.")
        return buffer

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        *_, errors = args
        own = self._parameters
        _convert(state_dict, prefix + "weight", self.num_groups, self.stacked, own.get("weight"), errors)
        if self.use_bias:
            _convert(state_dict, prefix + "bias", self.num_groups, self.stacked_bias, own.get("bias"), errors)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def flops(self, rows: int) -> int:
        return 2 * rows * self.own_in_features * self.own_out_features

    def features(self, incoming: int | None) -> int | None:
        check_features(incoming, self.own_in_features)
        return self.own_out_features

    def extra_repr(self) -> str:
        bias_form = f", stacked_bias={self.stacked_bias}" if self.stacked_bias != self.stacked else ""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, scale_bias={self.scale_bias}, stacked={self.stacked}{bias_form}"
            f"{', save_original_input=True' if self.save_original_input else ''}"
            f"{'' if self.parallel is None else self.parallel.extra_repr()}{super().extra_repr()}"
        )


def _names(name: str, num_groups: int, stacked: bool) -> tuple[str, ...]:
    return (name,) if stacked else tuple(f"{name}{group}" for group in range(num_groups))


def _convert(
    state_dict: dict[str, Any], key: str, num_groups: int, stacked: bool, own: Tensor | None, errors: list[str]
) -> None:
    """Bring an entry of the other form into this one's: `key` [G, ...] against `key0`, `key1`, ... [...].

    own: the parameter, if it is stacked; errors: those that torch collects, of groups with another shape, too
    """
    single = [f"{key}{group}" for group in range(num_groups)]
    if stacked and key not in state_dict and all(name in state_dict for name in single):
        weights = {name: state_dict.pop(name) for name in single}
        shapes = {tuple(weight.shape) for weight in weights.values()}
        if len(shapes) == 1 or own is None:
            state_dict[key] = _stack([*weights.values()])
            return
        state_dict[key] = own  # as it is
        errors += [
            f"size mismatch for {name}: copying a param with shape {weight.shape} from checkpoint, the shape in "
            f"current model is {own.shape[1:]}."
            for name, weight in weights.items()
            if weight.shape != own.shape[1:]
        ]
    elif not stacked and key in state_dict and state_dict[key].shape[:1] == (num_groups,):
        state_dict.update(zip(single, _unbind(state_dict.pop(key)), strict=True))


def _stack(weights: Sequence[Tensor]) -> Tensor:
    """Of weights that are held quantized alike, the codes."""
    first = weights[0]
    if not all(isinstance(w, QuantizedParameter) and w.quantizer == first.quantizer for w in weights):  # type: ignore[attr-defined]
        return torch.stack(list(weights))
    return first.over(first.quantized.stacked([w.quantized for w in weights[1:]]))  # type: ignore[attr-defined]


def _unbind(weights: Tensor) -> list[Tensor]:
    if isinstance(weights, QuantizedParameter):
        return [weights.over(member) for member in weights.quantized.unbind()]
    return [w.clone() for w in weights.unbind()]
