"""The norm of all gradients of a model on several ranks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fuser.distributed.experts import divided_parameters
from ops.kernels.collectives import RankGroup, all_gather
from ops.products.main_grad import OperationWithWeights


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients of `model` so that their norm over all ranks is at most max_norm. Returns that norm, ().

        grad *= min(1, max_norm / (norm + 1e-6)),    norm = (sum over all elements of all parameters |grad|^p)^(1/p)

    As `torch.nn.utils.clip_grad_norm_`, which it equals to the bit without ranks. Experts divided among ranks count
    once each, and so do shares of weights that tensor_parallel divides, all other parameters once, whatever the number
    of ranks; parameters may be DTensors, over meshes that differ. A collective of each group that divides anything: all
    ranks call it, also one whose experts are frozen.

    The gradient of a weight whose operation has `accumulate_into_main_grad` is its `main_grad`, of others `.grad`.

    norm_type: p, also inf. foreach: as torch's.

    Raises RuntimeError, on all ranks, for a norm that is not finite with error_if_nonfinite, before anything is
    scaled; and what `fuser.distributed.experts.shares` does.
    """
    parts = _parts(model)
    norms = []
    for (groups, _), owners in parts.items():
        gradients = [owner.grad for owner in owners if owner.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if groups:
            # Without a gradient here torch gives a float32 zero on the CPU.
            wide = torch.promote_types(owners[0].dtype, torch.float32)
            norm = norm.to(owners[0].device, wide)[None]
        for group in groups:
            norm = all_gather(norm, group)
        norms.append(norm)
    total = norms[0] if len(norms) == 1 and norms[0].dim() == 0 else _norm_of(norms, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"The norm of order {norm_type} of all gradients is {float(total)}. Leave out this step, or give "
            "error_if_nonfinite=False to scale by it all the same."
        )
    for owners in parts.values():
        torch.nn.utils.clip_grads_with_norm_(owners, max_norm, total, foreach)
    return total


class _OfMainGrad(NamedTuple):
    """A parameter whose gradient is its main_grad, as far as torch's clipping reads it."""

    grad: Tensor | None
    dtype: torch.dtype
    device: torch.device


def _norm_of(norms: list[Tensor], norm_type: float) -> Tensor:
    first = norms[0]
    return torch.linalg.vector_norm(torch.cat([norm.to(first.device).reshape(-1) for norm in norms]), norm_type)


def _parts(model: nn.Module) -> dict[tuple[tuple[RankGroup, ...], DeviceMesh | None], list[Any]]:
    """What has the gradients, by what their norm is summed over: groups, a mesh. Alike on all ranks."""
    divided = divided_parameters(model)
    with_main_grad = {
        id(weight)
        for module in model.modules()
        if isinstance(module, OperationWithWeights) and module.accumulate_into_main_grad
        for name, weight in module.named_parameters(recurse=False)
        if name in module.weight_names
    }
    parts: dict[tuple[tuple[RankGroup, ...], DeviceMesh | None], list[Any]] = {}
    for name, parameter in model.named_parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        owner: Any = parameter
        if id(parameter) in with_main_grad:
            owner = _OfMainGrad(getattr(parameter, "main_grad", None), parameter.dtype, parameter.device)
        parts.setdefault((divided.get(name, ()), mesh), []).append(owner)
    return parts
