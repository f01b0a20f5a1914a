"""LoRA: linear layers with an adapter of low rank beside weights that are frozen."""
# T rows, G groups, K in features, N out features, r rank

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.grouped_linear import GroupedLinear
from ops.kernels.elementwise.chain import elementwise
from ops.kernels.elementwise.chain_steps import dropout_step
from ops.linear import Linear
from ops.products.constant_weights import FrozenWeights
from ops.products.main_grad import OperationWithWeights
from ops.products.product import gemm
from ops.runner.checked import Checked
from ops.runner.context import at_tensor
from ops.runner.in_place import writable
from ops.runner.operation import OperationContext
from ops.runner.parameters import is_computed, requires_grad
from ops.runner.set_once import SetOnce
from recipes.arguments import as_number
from recipes.recipe import Role
from recipes.request import PlanRequest
from recipes.tensors.quantized_handle import QuantizedHandle, copied
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.splits import Splits
from recipes.triton.philox import new_seed

A, B = "lora_A.weight", "lora_B.weight"
_MERGED = "lora_merged"  # in the metadata of a state dict: its weights hold the adapter's product


class Factor(nn.Module):
    """One factor of an adapter: a parameter `weight`, so that its name is that of peft, `lora_A.weight`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def extra_repr(self) -> str:
        return f"shape={list(self.weight.shape)}"


def as_alpha(name: str, alpha: object) -> float:
    """A finite number. Raises TypeError for another kind, ValueError for another number."""
    number = as_number(name, alpha)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, but must be finite. Give a multiple of the rank.")
    return number


def as_dropout(name: str, dropout: object) -> float:
    """A probability below 1. Raises TypeError for another kind, ValueError for another number."""
    number = as_number(name, dropout)
    if not 0 <= number < 1:
        raise ValueError(f"{name} is {number}. It is the probability of a zero, from 0 to below 1.")
    return number


class LowRankAdapter(OperationWithWeights):
    """What `LoRALinear` and `LoRAGroupedLinear` share: y = base(x) + (alpha / rank) (dropout(x) A^T) B^T.

    It takes the place of an operation: its parameters, states, hooks, settings and recipe are those of `base`. A begins
    uniform in +-1/sqrt(K), B with zeros, so that y is that of `base`. Both are of the weights' dtype, but at least
    float32, and are computed with in the dtype of the operation, without the recipe, which is that of the base alone.
    (alpha / rank) is applied to x A^T and to dy B, each of which is rounded to that dtype, as is each product.

    While no weight requires grad, weights are taken to stand still: under a recipe they are quantized once, as in
    `ops.products.constant_weights`, until merge, unmerge, load_state_dict, a move, or a change that torch counts. What
    torch.compile made of it quantizes them in each forward.

    dropout: the probability with which an element of x is zero for the adapter, in training (`ops.Dropout`)
    merged: whether the weights hold the adapter's product, so that forward adds none
    """

    has_adapter = True
    merged = False
    rank = SetOnce[int]()
    alpha = Checked(as_alpha)
    dropout = Checked(as_dropout)
    _frozen: FrozenWeights | None = None
    _trained: tuple[bool, ...] = ()  # of each factor, where they are merged

    def __init__(self, base: OperationWithWeights, rank: int, alpha: float, dropout: float) -> None:
        self.__setstate__(_copied_state(base))
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        weight = self.get_parameter(self.weight_names[0])
        *groups, out_features, in_features = self.adapted_shape
        make = partial(torch.empty, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
        bound = in_features**-0.5
        self.lora_A = Factor(nn.init.uniform_(make(*groups, rank, in_features), -bound, bound))
        self.lora_B = Factor(nn.init.zeros_(make(*groups, out_features, rank)))

    @property
    def adapted_shape(self) -> tuple[int, ...]:
        """Of the adapter's product B A, and of all weights: [N, K] or [G, N, K]."""
        raise NotImplementedError

    @property
    def factor(self) -> float:
        """alpha / rank, by which the adapter's product is multiplied."""
        return self.alpha / self.rank

    def plain(self) -> OperationWithWeights:
        """The operation without its adapter, with the weights as they are now."""
        raise NotImplementedError

    # Merging

    def merge(self) -> None:
        """Add (alpha / rank) B A to the weights, computed in float32 or better and rounded once to their dtype.

        Weights that are held quantized are quantized once, from these sums. The weights as they were are kept, held as
        before, as buffers that no state dict holds. Its metadata say that they are merged.
        """
        with torch.no_grad():
            for name, weight, a, b in list(self._members()):
                self.register_buffer(_kept(name), copied(weight), persistent=False)
                wide = torch.promote_types(weight.dtype, torch.float32)
                is_held = isinstance(weight, QuantizedHandle)
                merged = weight.dequantize().to(wide) if is_held else weight
                for w, a_w, b_w in zip(*((t[None] if t.dim() == 2 else t) for t in (merged, a, b)), strict=True):
                    w.copy_(torch.addmm(w.to(wide), b_w.to(wide), a_w.to(wide), alpha=self.factor))
                if is_held:
                    weight.copy_(merged)
        self.merged = True
        factors = self._factors()
        self._trained = tuple(factor.requires_grad for factor in factors)
        for factor in factors:  # which take no part: where nothing else is trained, torch says so
            factor.requires_grad_(False)
        self.forget_quantized_weights()

    def unmerge(self) -> None:
        """Put the weights back that merge kept: the same bits."""
        with torch.no_grad():
            for name in self.weight_names:
                self.get_parameter(name).copy_(self.get_buffer(_kept(name)))
                del self._buffers[_kept(name)]
        self.merged = False
        for factor, trained in zip(self._factors(), self._trained, strict=True):
            factor.requires_grad_(trained)
        self.forget_quantized_weights()

    def _factors(self) -> list[nn.Parameter]:
        """What A and B are, or are computed from."""
        return [*self.lora_A.parameters(), *self.lora_B.parameters()]

    def _members(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Each weight with its name and factors."""
        a, b = self.lora_A.weight, self.lora_B.weight
        if self.stacked:
            yield self.weight_names[0], self.get_parameter(self.weight_names[0]), a, b
        else:
            for name, a_g, b_g in zip(self.weight_names, a, b, strict=True):
                yield name, self.get_parameter(name), a_g, b_g

    # Quantized weights

    @property
    def weights_scope(self) -> Any:
        opened = super().weights_scope
        own = self._scope_of_frozen()
        return own if opened is None else opened

    def note_unseen_use(self) -> None:
        self._scope_of_frozen()

    def _scope_of_frozen(self) -> FrozenWeights | None:
        """None while a weight is trained, or has a gradient (or main_grad) from then that an optimizer may step, which
        gives up the copies: should it be frozen again, it is another."""
        if self.is_stand_in:
            return None
        if any(self._parameters.get(name) is None and not is_computed(self, name) for name in self.weight_names):
            return self._frozen  # they are being moved, or something is about to compute them
        if any(requires_grad(self, name) or self._has_gradient(name) for name in self.weight_names):
            self._frozen = None
        elif self._frozen is None:
            self._frozen = FrozenWeights()
        return self._frozen

    def _has_gradient(self, name: str) -> bool:
        weight = self._parameters.get(name)
        main_grad = getattr(weight, "main_grad", None) if self.accumulate_into_main_grad else None
        return weight is not None and (weight.grad is not None or main_grad is not None)

    def prepare_weights(self, ctx: OperationContext) -> Any:
        quantizer = ctx.recipe.quantizer(Role.WEIGHT)
        if quantizer is not None and quantizer.keeps_state and isinstance(self.weights_scope, FrozenWeights):
            return None  # it keeps none of these
        return super().prepare_weights(ctx)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if self.merged and metadata is not None:
            metadata[prefix.removesuffix(".")][_MERGED] = True

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        name = prefix.removesuffix(".") or "an operation"
        if self.merged:
            raise RuntimeError(
                f"A state dict is loaded into {name} while its adapter is merged, so unmerge would undo it. Call "
                "fuser.lora.unmerge(model) before."
            )
        if local_metadata.get(_MERGED, False):
            raise RuntimeError(
                f"The state dict for {name} was saved while its adapter was merged, so its weights hold what the "
                "adapter would add again. Save it after fuser.lora.unmerge(model), or load it, without the names with "
                "'lora_', into a model without adapters."
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_frozen"}

    # Running

    def add_product(self, ctx: OperationContext, y: Tensor, x: Any, splits: Splits | None, *, keeps_x: bool) -> Tensor:
        """y plus the adapter's product, in the memory of y; what backward needs is added to `ctx.saved`."""
        self._scope_of_frozen()
        ctx.adds_adapter = not self.merged
        if self.merged:
            return y
        products, trained = self.products(ctx, splits), ctx.needs.params
        rows = _matrix(x)
        seed = new_seed(rows.device) if self.training and self.dropout else None
        u = self._scaled(products.fprop(self._dropped(rows, seed), ctx.param(A)))
        delta = products.fprop(u, ctx.param(B)).view(y.shape)
        if ctx.needs_grad:
            kept_x, kept_u = rows if keeps_x and A in trained else None, u if B in trained else None
            ctx.saved = ctx.saved._replace(adapter_x=kept_x, u=kept_u, seed=seed)
        return (y if "output" in ctx.buffers else writable(y)).add_(delta)

    def add_grad_input(self, ctx: OperationContext, dx: Tensor, dy: Any) -> Tensor:
        """dx plus the adapter's, in the memory of dx."""
        if not ctx.adds_adapter:
            return dx
        products = self.products(ctx)
        du = self._grad_of_u(ctx, dy)
        ctx.saved = ctx.saved._replace(du=du)
        added = self._dropped(products.dgrad(du, ctx.param(A)), ctx.saved.seed).view(dx.shape)
        return (dx if "grad_input" in ctx.buffers else writable(dx)).add_(added)

    def adapter_gradients(self, ctx: OperationContext, dy: Any, x: Tensor | None) -> dict[str, Tensor | None]:
        """dB = dy^T u and dA = du^T dropout(x), what is needed of them. x: None where forward has kept it."""
        trained = ctx.needs.params
        if not ctx.adds_adapter or trained.isdisjoint((A, B)):
            return {}
        saved, products = ctx.saved, self.products(ctx)
        gradients: dict[str, Tensor | None] = {}
        if B in trained:
            gradients[B] = products.wgrad(_matrix(dy), saved.u)
        if A in trained:
            du = self._grad_of_u(ctx, dy) if saved.du is None else saved.du
            gradients[A] = products.wgrad(du, self._dropped(saved.adapter_x if x is None else x, saved.seed))
        return gradients

    def _grad_of_u(self, ctx: OperationContext, dy: Any) -> Tensor:
        products = self.products(ctx)
        return self._scaled(products.dgrad(_matrix(dy), ctx.param(B)))

    def _scaled(self, product: Tensor) -> Tensor:
        return product if self.factor == 1 else writable(product).mul_(self.factor)

    def why_not_batch_invariant(self, request: PlanRequest) -> str | None:
        if self.training and self.dropout and not self.merged:
            return "in training its dropout is by the position in the batch. Call eval(), or take dropout=0."
        return super().why_not_batch_invariant(request)

    def products(self, ctx: OperationContext, splits: Splits | None = None) -> Products | GroupedProducts:
        """The products of the adapter. splits: of grouped ones, in forward."""
        raise NotImplementedError

    def _dropped(self, x: Tensor, seed: Tensor | None) -> Tensor:
        return x if seed is None else elementwise(x, (dropout_step(self.dropout),), (seed,))

    def flops(self, rows: int) -> int:
        return super().flops(rows) + (0 if self.merged else self._flops_of_adapter(rows))

    def wgrad_flops(self, rows: int, names: Collection[str]) -> int:
        base = super().flops(rows) if any(name in names for name in self.weight_names) else 0
        return base + (0 if self.merged else self._flops_of_adapter(rows, names))

    def _flops_of_adapter(self, rows: int, names: Collection[str] = (A, B)) -> int:
        """Of the products with these factors."""
        *_, out_features, in_features = self.adapted_shape
        return 2 * rows * self.rank * ((A in names) * in_features + (B in names) * out_features)

    def kernel(self, request: PlanRequest) -> str:
        state = "merged into the weights" if self.merged else f"rank {self.rank}, in high precision"
        return f"{super().kernel(request)}; adapter: {state}"

    def extra_repr(self) -> str:
        own = f", rank={self.rank}, alpha={self.alpha:g}, dropout={self.dropout:g}, merged={self.merged}"
        return super().extra_repr() + own


class LoRALinear(LowRankAdapter, Linear):
    """y = x W^T + b + (alpha / rank) (dropout(x) A^T) B^T: a `Linear` with an adapter, see `LowRankAdapter`.

    lora_A.weight: [rank, in_features]; lora_B.weight: [out_features, rank]
    """

    repeatable = True

    class Saved(NamedTuple):
        x: Any  # of the base
        adapter_x: Tensor | None = None  # before dropout
        u: Tensor | None = None  # (alpha / rank) dropout(x) A^T
        seed: Tensor | None = None
        du: Tensor | None = None  # in backward, of x A^T

    @property
    def adapted_shape(self) -> tuple[int, ...]:
        return self.out_features, self.in_features

    def plain(self) -> Linear:
        return _without_adapter(self, Linear)

    def fprop(
        self, ctx: OperationContext, x: Tensor | QuantizedTensor, alpha: float = 1.0, extra: Tensor | None = None
    ) -> Tensor:
        assert alpha == 1 and extra is None, "fusions that scale products do not take adapters"
        return self.add_product(ctx, super().fprop(ctx, x), x, None, keeps_x=True)

    def dgrad_and_wgrad(
        self, ctx: OperationContext, dy: Tensor | QuantizedTensor, alpha: float = 1.0
    ) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        assert alpha == 1, "fusions that scale products do not take adapters"
        dx, gradients = super().dgrad_and_wgrad(ctx, dy)
        if dx is not None:
            dx = self.add_grad_input(ctx, dx, dy)
        return dx, gradients | self.adapter_gradients(ctx, dy, None)

    def products(self, ctx: OperationContext, splits: Splits | None = None) -> Products:
        return Products(ctx, self.as_one_group)


class LoRAGroupedLinear(LowRankAdapter, GroupedLinear):
    """y_g = x_g W_g^T + b_g + (alpha / rank) (dropout(x_g) A_g^T) B_g^T: a `GroupedLinear` with an adapter a group.

    lora_A.weight: [G, rank, in_features]; lora_B.weight: [G, out_features, rank], also where the weights are not
    stacked. Their products are grouped under the same split sizes: an empty group's gradients are zero, and rows of no
    group stay zero. See `LowRankAdapter`.
    """

    repeatable = True

    class Saved(NamedTuple):
        x: Any  # of the base
        splits: Splits
        scales: Tensor | None
        input_scale: Tensor | None = None
        adapter_x: Tensor | None = None  # before dropout
        u: Tensor | None = None  # (alpha / rank) dropout(x) A^T
        seed: Tensor | None = None
        du: Tensor | None = None  # in backward, of x A^T

    @property
    def adapted_shape(self) -> tuple[int, ...]:
        return self.num_groups, self.out_features, self.in_features

    def plain(self) -> GroupedLinear:
        return _without_adapter(self, GroupedLinear)

    @property
    def reads_values(self) -> bool:
        return not self.merged

    def reads_input_again(self, ctx: OperationContext) -> bool:
        return ctx.adds_adapter and A in ctx.needs.params

    def fprop(
        self, ctx: OperationContext, x_q: Any, x: Any, splits: Splits, scales: Tensor | None, *, keeps_x: bool = True
    ) -> Tensor:
        y = super().fprop(ctx, x_q, x, splits, scales, keeps_x=keeps_x)
        return self.add_product(ctx, y, x, splits, keeps_x=keeps_x)

    def dgrad(self, ctx: OperationContext, dy_q: Any, dy: Any) -> Tensor:
        return self.add_grad_input(ctx, super().dgrad(ctx, dy_q, dy), dy)

    def products(self, ctx: OperationContext, splits: Splits | None = None) -> GroupedProducts:
        return GroupedProducts(ctx, ctx.saved.splits if splits is None else splits)


class Products(NamedTuple):
    """Products of matrices that are not quantized."""

    ctx: OperationContext
    as_one_group: bool

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        return self._gemm("TN", x, w)

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        return self._gemm("NN", dy, w)

    def wgrad(self, dy: Tensor, x: Tensor) -> Tensor:
        return self._gemm("NT", dy, x)

    def _gemm(self, layout: Any, a: Tensor, b: Tensor) -> Tensor:
        capability = self.ctx.path.capability
        invariant = layout == "TN" and self.ctx.recipe.batch_invariant
        return gemm(
            layout, a, b, self.ctx.dtype, capability=capability, as_one_group=self.as_one_group,
            batch_invariant=invariant,
        )  # fmt: skip


class GroupedProducts(NamedTuple):
    """The same, grouped: those of the path."""

    ctx: OperationContext
    splits: Splits

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        return self.ctx.path.fprop(self._rows(x), self._weight(w))

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        return self.ctx.path.dgrad(self._rows(dy), self._weight(w))

    def wgrad(self, dy: Tensor, x: Tensor) -> Tensor:
        return self.ctx.path.wgrad(self._rows(dy), self.ctx.path.for_wgrad(self._rows(x)))

    def _rows(self, x: Tensor) -> Any:
        return self.ctx.path.quantize(x, self.splits, None, rowwise=True, columnwise=True)

    def _weight(self, w: Tensor) -> Any:
        return self.ctx.path.weight(w, None, rowwise=True, columnwise=True)


ADAPTED: Mapping[type[nn.Module], type[LowRankAdapter]] = {Linear: LoRALinear, GroupedLinear: LoRAGroupedLinear}


def _matrix(x: Any) -> Tensor:
    """The rows of x, as values."""
    return at_tensor(x).reshape(-1, x.shape[-1])


def _kept(name: str) -> str:
    return f"{name}_before_merge"


def _copied_state(operation: OperationWithWeights) -> dict[str, Any]:
    """Its state, without what would be shared with it but parameters, buffers and modules themselves."""
    state = operation.__getstate__()
    return {key: copy(value) if isinstance(value, dict | set) else value for key, value in state.items()}


def _without_adapter(operation: LowRankAdapter, kind: type[OperationWithWeights]) -> Any:
    plain = kind.__new__(kind)
    own = {"rank", "alpha", "dropout", "merged", "_trained"}
    plain.__setstate__({key: value for key, value in _copied_state(operation).items() if key not in own})
    for name in ("lora_A", "lora_B"):
        del plain._modules[name]
    for name in operation.weight_names:
        plain._buffers.pop(_kept(name), None)
        plain._non_persistent_buffers_set.discard(_kept(name))
    return plain
