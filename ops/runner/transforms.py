"""Calls within the transforms of torch.func: grad and vjp run what torch.compile traces, others are refused."""

from __future__ import annotations

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

_REFUSED = (TransformType.Vmap, TransformType.Jvp)


def is_transformed() -> bool:
    """Whether torch.func.grad or vjp is around this call, which an operation of torch then stands for.

    Raises NotImplementedError within torch.func.vmap, jvp, and what these make: jacrev, jacfwd, hessian.
    """
    if not torch._C._are_functorch_transforms_active():
        return False
    transforms = [interpreter.key() for interpreter in get_interpreter_stack() or ()]
    if any(transform in _REFUSED for transform in transforms):
        raise NotImplementedError(
            "Operations of fuser have no rules for torch.func.vmap and jvp, nor for jacrev, jacfwd and hessian, which "
            "use these. Give a batch as rows of x, and differentiate by torch.func.grad or vjp, or by backward()."
        )
    return TransformType.Grad in transforms
