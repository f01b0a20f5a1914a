"""Calls within transforms of torch: torch.func.grad and vjp run what torch.compile traces, others are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor
from torch.autograd import forward_ad

_REFUSED = (TransformType.Vmap, TransformType.Jvp)


def is_transformed() -> bool:
    """Whether torch.func.grad or vjp is around this call, or functionalize without gradients: an operation of torch
    stands for it then.

    Raises NotImplementedError within torch.func.vmap, jvp, and what these make: jacrev, jacfwd, hessian; and for
    gradients with functionalize.
    """
    if not torch._C._are_functorch_transforms_active():
        return False
    transforms = [interpreter.key() for interpreter in get_interpreter_stack() or ()]
    if any(transform in _REFUSED for transform in transforms):
        refuse_batches()
    if TransformType.Grad not in transforms:
        return not torch.is_grad_enabled()
    if TransformType.Functionalize in transforms:
        refuse_functionalize()
    return True


def refuse_batches(*operands: Any) -> NoReturn:
    """Raise NotImplementedError for what torch.func.vmap and jvp give, or would."""
    raise NotImplementedError(
        "Operations of fuser have no rules for torch.func.vmap and jvp, nor for jacrev, jacfwd and hessian, which "
        "use these. Give a batch as rows of x, and differentiate by torch.func.grad or vjp, or by backward()."
    )


def refuse_functionalize() -> None:
    """Raise NotImplementedError for gradients within torch.func.functionalize, which torch has for no Function."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "Operations of fuser have no gradients within torch.func.functionalize, because torch has no rule for "
            "theirs. Call it under torch.no_grad(), or record the call with make_fx."
        )


def refuse_gradients_within() -> None:
    """Raise NotImplementedError in an operation of torch that torch.func.grad or vjp differentiates: a Function may not
    be called there."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "Operations of fuser have gradients by torch.func.grad and vjp where these run eagerly, but not within "
            "what torch.compile traces, nor around what its backend 'eager' runs. Compile the function that is "
            "differentiated, by another backend: grad(torch.compile(loss))."
        )


def within_dual_level() -> bool:
    """Whether tensors may have tangents: torch.autograd.forward_ad.dual_level is entered."""
    return forward_ad._current_level >= 0


def refuse_tangents(tensors: Iterable[Any]) -> None:
    """Raise NotImplementedError for one with a tangent, which kernels and casts would lose."""
    if any(isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(
            "Operations of fuser have no rules for forward-mode differentiation, and a tensor has a tangent of "
            "torch.autograd.forward_ad. Differentiate by backward(), or by torch.func.grad or vjp."
        )


def refuse_gradients(gradients: Sequence[Tensor | None]) -> None:
    """Raise NotImplementedError for gradients of a transform in eager mode: with tangents, or a batch of them."""
    if within_dual_level():
        refuse_tangents(gradients)
    if any(gradient is not None and is_legacy_batchedtensor(gradient) for gradient in gradients):
        raise NotImplementedError(
            "Operations of fuser have no rules for a batch of gradients: torch.autograd.grad(is_grads_batched=True), "
            "and jacobian and hessian with vectorize=True. Leave these out, or call backward once for each gradient."
        )
