"""Router: chooses the experts of each token and their probabilities."""
# T tokens

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ops.kernels.grouped_gemm.high_precision import grouped_gemm_tn
from ops.kernels.norm.norm_triton import runs_in_triton
from ops.kernels.routing.router_product import gradients_of, logits_of, without_tf32
from ops.kernels.routing.routing import describe_kernels, droute, route
from ops.kernels.routing.z_loss import dz_loss, z_loss
from ops.router_arguments import (
    as_coefficient,
    as_number_of_groups,
    as_positive,
    as_score_function,
    check_choice,
    check_scores,
)
from ops.runner.checked import Checked
from ops.runner.nested_backward import within_backward
from ops.runner.not_traced import not_traced
from ops.runner.operation import BackwardOfBasic, BasicOperation, IndexTensor, OperationContext
from ops.runner.parameters import parameter_names
from ops.runner.set_once import SetOnce
from ops.runner.shapes import check_features, check_matrix, check_parameter_dtype, check_shape
from recipes.amax_reduction import check_group
from recipes.arguments import as_flag, as_integer, as_number, check_flags, positive_integers
from recipes.request import PlanRequest
from recipes.tensors.quantized_handle import at_values
from recipes.tensors.splits import Splits


class Router(BasicOperation):
    """y = x [T, hidden_size]; the routing is returned as extra outputs.

        logits = x W^T + b, in float32 (float64 for float64)    weight: [num_experts, hidden_size]; bias: [num_experts]

    probs   [T, topk] float32 (float64): the factors of the chosen experts, in the order of indices
    indices [T, topk] int64: the chosen experts, that of the largest score (with expert_bias) first; among equal ones
            the lower index, on every device
    logits  [T, num_experts] float32 (float64)
    tokens_per_expert [num_experts] int64: how many tokens chose each expert
    load_balancing_loss (): num_experts sum_e f_e P_e, with f_e the share of the (token, slot) pairs that chose e and
            P_e the mean probability of e over the tokens; 1 for even routing, 0 without tokens
    z_loss  (), if z_loss is given: z_loss mean_t (logsumexp logits[t])^2, to be added to the loss as it is

    bias: add a trained b to the logits.
    score_function: "softmax": the scores are the softmax over all experts. "sigmoid": they are the sigmoids of the
                     logits; P_e is then the mean of a token's score over the sum of its scores.
    use_pre_softmax: True: softmax over all experts, then the topk largest. False: softmax over the topk logits.
    normalize_probs: divide the probabilities by their sum, with sigmoid by the sum + 1e-20; no effect with
                     use_pre_softmax=False, where the sum is already 1.
    scaling_factor:  probs are multiplied by it, last.
    num_groups, topk_groups: cut the experts into num_groups runs of equal length, and choose among those of the best
                     topk_groups of them. A group is as good as its best expert with softmax, and as the sum of its two
                     best with sigmoid. The choice among all is num_groups=1.
    expert_bias:     choose by score + expert_bias, a float32 buffer [num_experts] that starts at zero, which
                     `update_expert_bias` moves towards an even load; probs are without it. Needs sigmoid.
    z_loss:          the coefficient of the extra output z_loss.

    Models, as in Hugging Face transformers 5.23.0:

        Qwen3-MoE, Mixtral   normalize_probs=True
        OLMoE                the defaults
        gpt-oss              use_pre_softmax=False, bias=True
        DeepSeek-V2          num_groups=8, topk_groups=3, scaling_factor=16.0
        DeepSeek-V3          score_function="sigmoid", expert_bias=True, normalize_probs=True, num_groups=8,
                             topk_groups=4, scaling_factor=2.5
        Kimi-K2              score_function="sigmoid", expert_bias=True, normalize_probs=True, scaling_factor=2.827
        GLM-4.5              score_function="sigmoid", expert_bias=True, normalize_probs=True, scaling_factor=2.5

    There `expert_bias` is `e_score_correction_bias`. In 16-bit dtypes transformers computes the logits of gpt-oss,
    Qwen3-MoE, Mixtral and OLMoE in that dtype; here they are float32.

    The products are those of full float32 under every recipe, torch.autocast and TF32 setting, because a small error in
    a logit can change the choice; tensor cores compute those of 16-bit numbers (`ops.kernels.routing.router_product`).
    Under torch.autocast x arrives in autocast's dtype; W and b are not cast.

    The buffers stay float32 and int64 when the module is converted. Weights are initialised as in `torch.nn.Linear`.
    Raises TypeError for arguments of another kind, and ValueError for sizes that are not positive, a topk above
    num_experts, groups that do not divide num_experts or hold too few experts, settings that do not go together, an x
    that is not [T, hidden_size], and parameters or an expert_bias for another number of experts; NotImplementedError
    for expert_bias with softmax.
    """

    repeatable = True

    hidden_size = SetOnce[int]()
    num_experts = SetOnce[int]()
    topk = Checked(as_integer)
    score_function = Checked(as_score_function)
    use_pre_softmax = Checked(as_flag)
    normalize_probs = Checked(as_flag)
    scaling_factor = Checked(as_positive)
    num_groups = Checked(as_number_of_groups)
    topk_groups = Checked(as_number_of_groups)
    z_loss = Checked(as_coefficient)

    extra_outputs: Mapping[str, type] = {
        "probs": Tensor,
        "indices": IndexTensor,
        "load_balancing_loss": Tensor,
        "logits": Tensor,
        "tokens_per_expert": IndexTensor,
    }

    class Saved(NamedTuple):
        x: Tensor | None  # None if the weight needs no gradient
        probs: Tensor  # before scaling_factor
        indices: Tensor
        scores: Tensor
        fractions: Tensor
        logits: Tensor | None  # None without z_loss

    expert_bias: Tensor | None
    tokens_since_update: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        bias: bool = False,
        score_function: str = "softmax",
        use_pre_softmax: bool = True,
        normalize_probs: bool = False,
        scaling_factor: float = 1.0,
        num_groups: int = 1,
        topk_groups: int = 1,
        expert_bias: bool = False,
        z_loss: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size, num_experts = positive_integers("Router", hidden_size=hidden_size, num_experts=num_experts)
        check_flags(bias=bias, expert_bias=expert_bias)
        check_parameter_dtype(dtype)
        positive_integers("Router", num_groups=num_groups, topk_groups=topk_groups)
        counts = torch.empty(num_experts, device=device, dtype=torch.int64) if expert_bias else None
        self.register_buffer("expert_bias", None if counts is None else torch.empty_like(counts, dtype=torch.float32))
        self.register_buffer("tokens_since_update", counts, persistent=False)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        vars(self).update(_FIRST)
        # In an order in which each can be checked with those before it.
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.topk = topk
        self.score_function = score_function
        self.use_pre_softmax = use_pre_softmax
        self.normalize_probs = normalize_probs
        self.scaling_factor = scaling_factor
        if z_loss is not None:
            self.extra_outputs = {**self.extra_outputs, "z_loss": Tensor}
        self.z_loss = z_loss
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight and bias: uniform in +-1/sqrt(hidden_size), as in `torch.nn.Linear`. expert_bias, its counts: zero."""
        bound = self.hidden_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
        if self.expert_bias is not None and self.tokens_since_update is not None:
            # By functions that transformers' from_pretrained stands in for, which leave alone what was loaded.
            nn.init.zeros_(self.expert_bias)
            nn.init.zeros_(self.tokens_since_update)

    def check_set(self, name: str, value: Any) -> None:
        given = {**vars(self), name: value}
        if name in _CHOICE:
            check_choice(**{name: given[name] for name in _CHOICE})
        if name in ("score_function", "use_pre_softmax"):
            check_scores(given["score_function"], given["use_pre_softmax"], self.expert_bias is not None)
        if name == "z_loss" and (value is not None) is not ("z_loss" in self.extra_outputs):
            raise AttributeError(
                f"z_loss cannot be set to {value}: whether there is one is read where a Router is made. Make another "
                "one, and put it in its place."
            )

    @property
    def normalized(self) -> bool:
        """Whether the probabilities of a token sum to one, before scaling_factor."""
        return self.normalize_probs or not self.use_pre_softmax

    @torch.no_grad()
    @not_traced(
        "Forwards count tokens, and read the bias, past torch's tracing, which would run the update before or behind "
        "them. Call it outside of the compiled function, or leave out fullgraph=True."
    )
    def update_expert_bias(self, rate: float = 1e-3, group: dist.ProcessGroup | None = None) -> None:
        """expert_bias += rate sign(mean load - load), and start counting anew; to be called after `optimizer.step()`.

        The load of an expert is the number of tokens that chose it in the forwards in training mode since the last
        update, one that a checkpoint computes again counted once. It is kept in the buffer `tokens_since_update`, which
        is not in the state dict: loading one starts at zero. Forward changes nothing else.

        rate: 1e-3 in DeepSeek-V3; 0 only starts counting anew. group: a torch.distributed process group, over which the
        loads are summed first; all of its ranks call this. Without a host synchronization.

        Under DistributedDataParallel set broadcast_buffers=False: it overwrites the loads of all ranks with rank 0's.

        Raises RuntimeError without expert_bias, for one on another device than the counts, and for one in 16 bits, in
        which small steps vanish (a block of `fuser.hf` uses the model's own, in the model's dtype); the counts stay.
        ValueError for a rate that is negative or not finite, TypeError for a group that is not a process group.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, algorithm 1;
        Megatron Core's `moe_router_bias_update_rate`.
        """
        bias, load = self.expert_bias, self.tokens_since_update
        if bias is None or load is None:
            raise RuntimeError("This Router has no expert bias to update. Make it with expert_bias=True.")
        rate = as_number("rate", rate)
        if not 0 <= rate < math.inf:
            raise ValueError(f"rate is {rate}, but must be finite and not negative. Pass one like 1e-3.")
        check_group("group", group)
        if bias.dtype.itemsize < torch.float32.itemsize:
            raise RuntimeError(
                f"expert_bias is {bias.dtype}, in which steps of {rate} vanish beside larger numbers. Keep it in "
                "float32, as transformers does when it loads a model: gate.e_score_correction_bias = "
                "gate.e_score_correction_bias.float(). The counts stay as they are."
            )
        if load.device != bias.device:
            raise RuntimeError(
                f"expert_bias is on {bias.device}, but the tokens were counted on {load.device}. Move the module as a "
                "whole (.to), or load its state dict, which counts anew."
            )
        if group is not None:
            dist.all_reduce(load, group=group)
        bias.add_((load.sum() - load * self.num_experts).sign(), alpha=rate)
        load.zero_()

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        check_matrix(x, "tokens", self.hidden_size)
        check_shape("weight", ctx.held("weight"), (self.num_experts, self.hidden_size))
        bias = _wide(ctx, "bias") if "bias" in ctx.parameter_slots else None
        for name, of_experts in (("bias", bias), ("expert_bias", self.expert_bias)):
            if of_experts is not None:
                check_shape(name, of_experts, (self.num_experts,))
        if ctx.recipe.batch_invariant:
            logits = _row_by_row(x, _wide(ctx, "weight"), bias)
        else:
            logits = logits_of(x, at_values(ctx.held("weight")), bias)
        routing = route(
            logits, self.topk, normalized=self.normalized, score_function=self.score_function,
            expert_bias=self.expert_bias, num_groups=self.num_groups, topk_groups=self.topk_groups,
        )  # fmt: skip
        probs = routing.probs
        made = {
            "probs": probs if self.scaling_factor == 1 else probs * self.scaling_factor,
            "indices": routing.indices,
            "load_balancing_loss": routing.loss,
            "logits": logits,
            "tokens_per_expert": routing.counts,
        }
        if self.z_loss is not None:
            made["z_loss"] = z_loss(logits, self.z_loss)
        if self.tokens_since_update is not None and self.training and not within_backward():
            self.tokens_since_update.add_(routing.counts)  # not an assignment, which would change the settings
        if ctx.needs_grad:
            kept = None if self.z_loss is None else logits
            rows = x if "weight" in ctx.needs.params else None
            ctx.saved = self.Saved(rows, probs, routing.indices, routing.scores, routing.fractions, kept)
        return x, made

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        dlogits = self._dlogits(ctx, d_extra_outputs)
        if dlogits is None:
            return dy, {}, {}
        weight = at_values(ctx.held("weight")) if ctx.needs.input else None
        dx, dweight = gradients_of(dlogits, weight=weight, x=ctx.saved.x, dy=dy)
        gradients = {"weight": dweight}
        if "bias" in ctx.needs.params:
            gradients["bias"] = dlogits.sum(0)
        return dx, gradients, {}

    def _dlogits(self, ctx: OperationContext, d_extra_outputs: Mapping[str, Tensor]) -> Tensor | None:
        _, probs, indices, scores, fractions, logits = ctx.saved
        dprobs, dloss = d_extra_outputs.get("probs"), d_extra_outputs.get("load_balancing_loss")
        if dprobs is not None and self.scaling_factor != 1:
            dprobs = dprobs * self.scaling_factor
        summands = [
            droute(
                dprobs, dloss, probs, indices, scores, fractions,
                normalized=self.normalized, score_function=self.score_function,
            ),
            d_extra_outputs.get("logits"),
        ]  # fmt: skip
        if self.z_loss is not None and "z_loss" in d_extra_outputs:
            summands.append(dz_loss(d_extra_outputs["z_loss"], logits, self.z_loss))
        present = [summand for summand in summands if summand is not None]
        return sum(present[1:], present[0]) if present else None

    def kernel(self, request: PlanRequest) -> str:
        if not runs_in_triton(request.device, torch.promote_types(request.dtype, torch.float32)):
            return "torch, logits by products of one row" if request.recipe.batch_invariant else "torch"
        choice = describe_kernels(self.num_experts, self.score_function, self.topk_groups < self.num_groups)
        return f"{choice}, logits by the grouped GEMM (Triton)" if request.recipe.batch_invariant else choice

    def flops(self, rows: int) -> int:
        return 2 * rows * self.hidden_size * self.num_experts

    def features(self, incoming: int | None) -> int | None:
        check_features(incoming, self.hidden_size)
        return self.hidden_size

    def extra_repr(self) -> str:
        shown = (
            f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, topk={self.topk}, "
            f"use_pre_softmax={self.use_pre_softmax}, normalize_probs={self.normalize_probs}"
        )
        defaults = {
            "bias": ("bias" in parameter_names(self), False),
            "score_function": (self.score_function, "softmax"),
            "scaling_factor": (self.scaling_factor, 1.0),
            "num_groups": (self.num_groups, 1),
            "topk_groups": (self.topk_groups, 1),
            "expert_bias": (self.expert_bias is not None, False),
            "z_loss": (self.z_loss, None),
        }
        return shown + "".join(f", {name}={now!r}" for name, (now, default) in defaults.items() if now != default)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        bias, counts = self.expert_bias, self.tokens_since_update
        super()._apply(fn, recurse)
        moved, moved_counts = self.expert_bias, self.tokens_since_update
        if bias is not None and moved is not None and moved.dtype != torch.float32:
            self.expert_bias = bias.to(moved.device)  # steps of 1e-3 vanish in 16 bits
        if counts is not None and moved_counts is not None and moved_counts.dtype != torch.int64:
            self.tokens_since_update = counts.to(moved_counts.device)  # module.type() converts integers, too
        if counts is not None and counts.is_meta and self.tokens_since_update is not None:
            self.tokens_since_update.zero_()  # what to_empty made of no numbers
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.expert_bias is not None and self.tokens_since_update is not None:
            self.expert_bias = self.expert_bias.float()  # with assign=True it is what was loaded
            # where the bias is now: with assign=True it may have been on the meta device
            self.tokens_since_update = torch.zeros_like(self.tokens_since_update, device=self.expert_bias.device)


_CHOICE = ("num_experts", "topk", "score_function", "num_groups", "topk_groups")
_FIRST = {"topk": 1, "score_function": "softmax", "use_pre_softmax": True, "num_groups": 1, "topk_groups": 1}


def _wide(ctx: OperationContext, name: str) -> Tensor:
    """The parameter in at least float32, not in torch.autocast's dtype."""
    return ctx.param(name, torch.promote_types(ctx.dtype, torch.float32))


def _row_by_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits, each row of them whatever the others are: the grouped product of one group."""
    rows = x if x.dtype == torch.float64 else x.float()
    with without_tf32(rows):
        return grouped_gemm_tn(
            rows, weight.to(rows.dtype)[None], Splits.whole(len(rows), rows.device),
            bias_GN=None if bias is None else bias[None], batch_invariant=True,
        )  # fmt: skip
