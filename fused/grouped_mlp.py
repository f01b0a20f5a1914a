"""The grouped MLP of a mixture-of-experts layer, forward and backward, as one operation.

    h   = x W1_g^T + b1_g                      FC1, the pre-activation
    act = f(h) * scales                        (Scaled)SwiGLU and similar activations
    y   = act W2_g^T + (scales) b2_g           FC2

A joint fusion: it saves x, h and the scales for backward, and recomputes act there. FC1 and the activation, which is
stored as values or quantized with given scales, are one kernel unless `why_apart` says why; where nothing needs a
gradient h is not stored, unless `why_pre_activation` does.
Every value that the unfused operations would store is rounded as they round it, so both give the same codes and, where
the order of summation is the same, the same bits. Adapters (`ops.lora`) of FC1 and FC2 are their own affair: they add
their products in `fprop` and `dgrad`, for which act and dh are there as values, too.
"""
# T rows, G groups, K in features of FC1, I features of the activation

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ops.activations import (
    ActivationOperation,
    ClampedSwiGLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiTUGLU,
    SwiGLU,
)
from ops.grouped_linear import GroupedLinear
from ops.kernels.elementwise.activation import (
    Activation,
    activation,
    activation_cast,
    activation_shape,
    activation_step,
    dactivation,
)
from ops.kernels.elementwise.dactivation_cast import fits
from ops.kernels.grouped_gemm.float8_activation import why_not_cast_at_once
from ops.kernels.grouped_gemm.grouped_activation import why_not_at_once, why_not_both_stored
from ops.kernels.grouped_gemm.tile_rules import QUEUED_ROWS
from ops.products.paths import (
    Path,
    casts_in_backward,
    casts_with_given_scales,
    choose_path,
    how_cast_as_computed,
)
from ops.runner.built_in import why_not_method
from ops.runner.operation import BackwardOfFused, BasicOperation, FusedOperation, OperationContext
from ops.runner.parameters import parameter_dtype
from recipes.recipe import Role
from recipes.request import PlanRequest
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.splits import Splits


class GroupedMLP(FusedOperation):
    """GroupedLinear -> an activation from `pattern` -> GroupedLinear."""

    pattern = (
        GroupedLinear,
        (SwiGLU, ScaledSwiGLU, SiTUGLU, ScaledSiTUGLU, ClampedSwiGLU, ScaledClampedQGeGLU, ScaledSReLU),
        GroupedLinear,
    )
    passes = "joint"
    handles_wgrad_accumulation = True
    handles_transfers = True
    handles_adapters = True
    accepts_quantized = True
    accepts_gathered = True
    repeatable = True

    class Saved(NamedTuple):
        """Of the activation; the linear operations save their own."""

        h: Tensor  # pre-activation
        scales: Tensor | None
        act_scale: Tensor | None  # the scale that act was quantized with, if it is state that changes between steps
        act_meetings: Tensor | None  # where its amaxes were found, if its scales follow from them

    def __init__(self, operations: Sequence[BasicOperation]) -> None:
        super().__init__(operations)
        self.fc1 = cast(GroupedLinear, operations[0])
        self.fc2 = cast(GroupedLinear, operations[2])

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        fc1, act, fc2 = operations
        assert isinstance(fc1, GroupedLinear) and isinstance(fc2, GroupedLinear), "the pattern says so"
        assert isinstance(act, ActivationOperation), "the pattern says so"
        if fc1.num_groups != fc2.num_groups:
            return f"FC1 has {fc1.num_groups} groups, but FC2 has {fc2.num_groups}."
        dtypes = [parameter_dtype(linear, linear.weight_names[0]) for linear in (fc1, fc2)]
        if dtypes[0] != dtypes[1]:
            return f"FC1's weights are {dtypes[0]}, but FC2's are {dtypes[1]}."
        if fc1.scale_bias:
            return "FC1 scales its bias, and the scales belong to the activation and to FC2's bias."
        if act.cache_quantized_input:
            return f"{type(act).__name__} caches its input quantized, but the fused operation keeps it in full."
        if fc2.scale_bias and "scales" not in act.extra_inputs:
            return f"FC2 scales its bias, but {type(act).__name__} takes no scales."
        return _why_not_divided(fc1, act, fc2)

    @property
    def activation(self) -> Activation:
        return cast(ActivationOperation, self.operations[1]).activation

    @property
    def scaled(self) -> bool:
        return "scales" in self.operations[1].extra_inputs

    @property
    def _runs(self) -> int | None:
        """How many columns of h lie beside each other, of the gate or of the linear part; None: all."""
        if not self.activation.gated:
            return None
        return self.activation.glu_interleave_size or self.fc2.own_in_features

    def kernel(self, request: PlanRequest) -> str:
        ways = dict.fromkeys(linear.kernel(request) for linear in (self.fc1, self.fc2))
        act = f"{self.activation.kind} {self._how_cast(request)}recomputed in backward"
        return f"{', then '.join(ways)}, {act}{self._in_modes(request)}{self.operations[1].transfers(request)}"

    def _how_cast(self, request: PlanRequest) -> str:
        """In words, where the activation's kernel quantizes."""
        if choose_path(request).name != "grouped":
            return ""
        inputs, gradients = (request.recipe.quantizer(role) for role in (Role.INPUT, Role.GRAD_OUTPUT))
        about = request.device, request.dtype
        forward = how_cast_as_computed(inputs, *about, self.fc2.own_in_features)
        step = activation_step(self.activation, self.scaled)
        alone = casts_in_backward(step, request.dtype, self.fc2.own_in_features, request.device, gradients, inputs)
        if forward == how_cast_as_computed(gradients, *about, runs=self._runs, alone=alone):
            return "" if forward is None else f"{forward}, "
        return "" if forward is None else f"{forward} in forward, "

    def _in_modes(self, request: PlanRequest) -> str:
        """In words, where the activation is FC1's kernel: in training, and in no-grad mode. Nothing where there are no
        kernels."""
        if request.device.type != "cuda":
            return ""
        path = choose_path(request)
        why, why_in_no_grad = self.why_apart(path, request.dtype), self.why_pre_activation(path, request.dtype)
        together = f"in the kernel of FC1 from {QUEUED_ROWS} rows a group on"
        training = f"apart from FC1: {why}" if why else together
        no_grad = together if self._quantizes(path) else "in the kernel of FC1"
        no_grad = f"apart from FC1: {why_in_no_grad}" if why_in_no_grad else no_grad
        if training == no_grad:
            return f"; in training and in no-grad mode {training}"
        return f"; in training {training}; in no-grad mode {no_grad}"

    def why_pre_activation(self, path: Path, dtype: torch.dtype) -> str | None:
        """Why h is stored although neither backward nor a buffer of the caller's needs it, as a sentence; None: FC1 and
        the activation are one kernel."""
        if self._quantizes(path):
            return self.why_apart(path, dtype)
        return self._why_two_kernels(path) or why_not_at_once(dtype, self._weights, self.activation, path.capability)

    def why_apart(self, path: Path, dtype: torch.dtype) -> str | None:
        """Why FC1 and the activation are two kernels where h is stored, for any number of rows, as a sentence."""
        if why := self._why_two_kernels(path):
            return why
        if self._quantizes(path) and (why := self._why_cast_apart(path)):
            return why
        if self.fc1.use_bias:
            return "The kernel that stores both adds no bias, and FC1 has one."
        if self.fc1.parallel is not None:
            return "The kernel that stores both is for layers that ranks do not divide."
        if self.fc2.reads_values:
            return "The adapter of FC2 reads the activation."
        if self._quantizes(path):
            split = path.recipe.split_accumulator("fprop")
            return why_not_cast_at_once(dtype, self._weights, self.activation, split, path.capability)
        return why_not_both_stored(dtype, self._weights, self.activation, path.capability)

    @property
    def _weights(self) -> tuple[int, int, int]:
        """The shape of FC1's."""
        return self.fc1.num_groups, self.fc1.own_out_features, self.fc1.own_in_features

    def _why_two_kernels(self, path: Path) -> str | None:
        """Why FC1 and the activation are two kernels in either mode, as a sentence, or None."""
        if path.name == "split":
            return "The SplitPath multiplies group by group."
        if path.recipe.batch_invariant:
            return "A batch-invariant recipe multiplies with the kernel of training."
        if self.fc1.reads_values:
            return "The adapter's product is added to FC1's before the activation."
        return why_not_method(self.fc1, "fprop")

    @staticmethod
    def _quantizes(path: Path) -> bool:
        return any(path.recipe.quantizer(role) is not None for role in (Role.INPUT, Role.WEIGHT))

    @staticmethod
    def _why_cast_apart(path: Path) -> str | None:
        """Why the activation is not quantized in the kernel of FC1 under this recipe, as a sentence, or None."""
        inputs, weights = (path.recipe.quantizer(role) for role in (Role.INPUT, Role.WEIGHT))
        if inputs is None or weights is None:
            return "Its kernel multiplies values or codes, and this recipe quantizes one operand alone."
        if not casts_with_given_scales(inputs):
            return "Its kernel quantizes with one scale a group that is given before, as delayed scaling has it."
        if weights.float8_scaling(False) != "tensor":
            return "Its kernel multiplies codes with one scale a group, and this recipe quantizes weights otherwise."
        return None

    def fuser_forward(
        self, ctxs: Sequence[OperationContext], x: Any, extras: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        fc1_ctx, act_ctx, fc2_ctx = ctxs
        splits, _ = self.fc1.check(fc1_ctx, x, extras)
        scales = extras.get("scales")
        path = fc1_ctx.path
        needs_grad = any(ctx.needs_grad for ctx in ctxs)
        scales_of_bias = scales if self.fc2.scale_bias else None
        quantizer = fc2_ctx.quantizer(Role.INPUT)
        stores_h = needs_grad or "output" in fc1_ctx.buffers
        if quantizer is None and not (stores_h or self.why_pre_activation(path, fc1_ctx.dtype)):
            x_q = self.fc1.input_operand(fc1_ctx, x, splits)
            act = self.fc1.fprop_activation(fc1_ctx, x_q, self.activation, scales if self.scaled else None)
            act_q = path.quantize(act, splits, None, rowwise=True, columnwise=False)
            return self.fc2.fprop(fc2_ctx, act_q, act, splits, scales_of_bias), {}
        h, act_q, rows, meetings = self._hidden(fc1_ctx, x, splits, scales, quantizer, stores_h=stores_h)
        y = self.fc2.fprop(fc2_ctx, act_q, x if rows is None else rows, splits, scales_of_bias, keeps_x=False)
        if needs_grad:
            act_scale = None if quantizer is None else quantizer.snapshot(x.device)
            assert h is not None, "it was to be stored"
            act_ctx.saved = self.Saved(h, scales, act_scale, meetings)
        return y, {}

    def _hidden(
        self,
        ctx: OperationContext,
        x: Any,
        splits: Splits,
        scales: Tensor | None,
        quantizer: Quantizer | None,
        *,
        stores_h: bool,
    ) -> tuple[Tensor | None, Any, Tensor | None, Tensor | None]:
        """FC1 and the activation, as FC2 multiplies it: the rowwise copy alone, since act is not saved and backward
        makes the other. Returns h, which may be None if it is not to be stored, act's copy, its values where they are
        in memory, and where its amaxes were found. ctx: FC1's; quantizer: of act."""
        path = ctx.path
        of_act = scales if self.scaled else None
        copies: dict[str, Any] = {"rowwise": True, "columnwise": False}
        together = self.why_apart(path, ctx.dtype) is None
        x_q = self.fc1.input_operand(ctx, x, splits)
        h: Tensor | None
        rows: Tensor | None = None
        if together and quantizer is None:
            h, rows = self.fc1.fprop_and_activation(ctx, x_q, x, splits, self.activation, of_act)
        elif together:
            shape = activation_shape(torch.Size((splits.rows, self.fc1.own_out_features)), self.activation)
            room = partial(path.quantized_buffers, shape, ctx.dtype, splits, quantizer, **copies, whole_rows=True)
            h, into = self.fc1.fprop_and_cast(
                ctx, x_q, x, splits, self.activation, of_act, room, stores_h=stores_h
            )  # fmt: skip
            if into is not None:
                return h, into.copies, None, None
        else:
            h = self.fc1.fprop(ctx, x_q, x, splits, None)
            if self.fc2.reads_values:
                rows = activation(h, self.activation, of_act)
        del x_q  # but for what is saved of it, so that its memory serves what FC2 multiplies
        if rows is not None:
            return h, path.quantize(rows, splits, quantizer, **copies), rows, None
        assert h is not None, "act was computed, too, where it is not stored"
        act_q, meetings = self._act(path, h, scales, splits, quantizer, **copies)
        return h, act_q, None, meetings

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], dy: Any, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfFused:
        fc1_ctx, act_ctx, fc2_ctx = ctxs
        saved: GroupedMLP.Saved = act_ctx.saved
        fc1, fc2, path, splits = self.fc1, self.fc2, fc1_ctx.path, fc2_ctx.saved.splits
        # FC2
        wgrad, reads_act = fc2.needs_weight_grad(fc2_ctx), fc2.reads_input_again(fc2_ctx)
        scales_of_bias = saved.scales if fc2.scale_bias else None
        d_fc2, dscales = fc2.bias_gradients(fc2_ctx, dy, splits, scales_of_bias)
        dx: Tensor | None = None
        d_fc1: dict[str, Tensor | None] = {}
        dy_q = act = None
        if fc2_ctx.needs.input or wgrad:
            gradients = fc2_ctx.quantizer(Role.GRAD_OUTPUT)
            dy_q = path.quantize(dy, splits, gradients, **fc2.copies_of_grad(fc2_ctx, dy, splits))
        inputs = fc2_ctx.quantizer(Role.INPUT, saved.act_scale) if wgrad else None
        act_copy, found = {"rowwise": False, "columnwise": True}, saved.act_meetings
        step = activation_step(self.activation, self.scaled)
        if not fc2_ctx.needs.input:
            if wgrad:
                act_q, _ = self._act(path, saved.h, saved.scales, splits, inputs, **act_copy, meetings=found)
                d_fc2 |= fc2.accumulate(fc2_ctx, partial(path.wgrad, dy_q, act_q))
            if reads_act:
                act = activation(saved.h, self.activation, saved.scales if self.scaled else None)
            d_fc2 |= fc2.adapter_gradients(fc2_ctx, dy, act)
            return dx, (d_fc1, {}, d_fc2), {"scales": dscales}
        dact = fc2.dgrad(fc2_ctx, dy_q, dy)

        # The activation, whose kernel quantizes act and dh where it can. A quantizer draws a random seed or records an
        # amax: only if a product reads the result, as unfused.
        act_into = dh_into = None
        dh_copies = fc1.copies_of_grad(fc1_ctx, dact, splits)
        gradients = fc1_ctx.quantizer(Role.GRAD_OUTPUT) if any(dh_copies.values()) else None
        alone = False
        if not reads_act and (wgrad or dh_copies["columnwise"]) and fits(step, saved.h, dact):
            quantizers = (gradients, inputs) if wgrad else (gradients,)
            alone = casts_in_backward(step, dact.dtype, dact.shape[1], dact.device, *quantizers)
        if wgrad:
            act_into = path.quantized_buffers(
                dact.shape, dact.dtype, splits, inputs, **act_copy, meetings=found, alone=alone
            )
        if gradients is not None:
            dh_into = path.quantized_buffers(
                saved.h.shape, saved.h.dtype, splits, gradients, **dh_copies, runs=self._runs, alone=alone
            )
        dh, d_act_scales, act = dactivation(
            dact, saved.h, self.activation, saved.scales if self.scaled else None,
            need_dh=dh_into is None or fc1.needs_bias_grad(fc1_ctx) or fc1.has_adapter,
            need_act=reads_act or (wgrad and act_into is None),
            need_dscales="scales" in act_ctx.needs.extras, dh_into=dh_into, act_into=act_into,
        )  # fmt: skip
        del dact
        dscales = _sum(cast(ActivationOperation, self.operations[1]).reduce_operand_gradient(d_act_scales), dscales)
        if wgrad:
            act_q = path.quantize(act, splits, inputs, **act_copy) if act_into is None else act_into.copies
            d_fc2 |= fc2.accumulate(fc2_ctx, partial(path.wgrad, dy_q, act_q))
            del act_q, act_into
        d_fc2 |= fc2.adapter_gradients(fc2_ctx, dy, act)
        del act, dy_q

        # FC1
        if dh is not None and fc1_ctx.needs_grad:
            d_fc1, _ = fc1.bias_gradients(fc1_ctx, dh, splits, None)
        if any(dh_copies.values()):
            dh_q = path.quantize(dh, splits, gradients, **dh_copies) if dh_into is None else dh_into.copies
            if fc1_ctx.needs.input:
                read = dh if dh is not None else dh_q.rowwise.codes
                dx = fc1.dgrad(fc1_ctx, dh_q, read)
            spare = fc1.release(fc1_ctx)
            if fc1.needs_weight_grad(fc1_ctx):
                d_fc1 |= fc1.accumulate(fc1_ctx, partial(path.wgrad, dh_q, fc1.kept_input(fc1_ctx), spare=spare))
        if dh is not None:
            d_fc1 |= fc1.adapter_gradients(fc1_ctx, dh, None)
        return dx, (d_fc1, {}, d_fc2), {"scales": dscales}

    def _act(
        self,
        path: Path,
        h: Tensor,
        scales: Tensor | None,
        splits: Splits,
        quantizer: Quantizer | None,
        *,
        rowwise: bool,
        columnwise: bool,
        meetings: Tensor | None = None,
    ) -> tuple[Any, Tensor | None]:
        """The activation, as the path multiplies it, and where its amaxes were found. meetings: where they were before,
        in forward."""
        copies = {"rowwise": rowwise, "columnwise": columnwise}
        scales = scales if self.scaled else None
        shape = activation_shape(h.shape, self.activation)
        into = path.quantized_buffers(shape, h.dtype, splits, quantizer, **copies, whole_rows=True, meetings=meetings)
        if into is None:
            return path.quantize(activation(h, self.activation, scales), splits, quantizer, **copies), None
        activation_cast(h, self.activation, scales, into)
        return into.copies, into.meetings


def _why_not_divided(fc1: GroupedLinear, act: ActivationOperation, fc2: GroupedLinear) -> str | None:
    """Why layers that ranks divide are not fused, or None: FC1 by column and FC2 by row, over one group, are."""
    if fc1.parallel is None and fc2.parallel is None:
        return None
    modes = [layer.parallel and layer.parallel.mode for layer in (fc1, fc2)]
    if modes != ["column", "row"]:
        return f"FC1 has tensor_parallel={modes[0]!r} and FC2 {modes[1]!r}; fused are 'column' and 'row'."
    groups = [fc1.divides_output, fc2.parallel and fc2.parallel.group]
    if groups[0] != groups[1]:
        return f"FC1 is divided among {groups[0]}, but FC2 among {groups[1]}."
    if "scales" in act.extra_inputs and act.group != groups[0]:
        return f"{type(act).__name__} has group={act.group}, but FC1 is divided among {groups[0]}."
    return None


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
