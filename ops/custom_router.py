"""CustomRouter: a router of the user's own, any module that returns probabilities and experts."""
# T tokens, H features

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ops.runner.callers_extras import check_extras
from ops.runner.context import IndexTensor
from ops.runner.input import as_input
from ops.runner.named_extras import NamedExtras


class CustomRouter(NamedExtras, nn.Module):
    """y = x [T, H]; what `module(x)` returns are the extra outputs, and stand where those of `Router` do.

        Sequential(ops.CustomRouter(mine), ops.Dispatch(num_experts), ..., ops.Combine())

    module:  any module. mine(x) is a tuple of tensors: by default (probs, indices).
    returns: the names of what it returns, in order, with "probs" and "indices" among them:
             probs   [T, topk] of a floating dtype: the factor of each chosen expert
             indices [T, topk] integers in [0, num_experts): the chosen experts
             Others (logits, a loss) are extra outputs as they are. So a router of Hugging Face transformers 5 is
             `CustomRouter(gate, returns=("logits", "probs", "indices"))`.

    It is not an operation: it is called by itself, between two pipelines, and autograd differentiates the module. So
    its hooks, buffers, random numbers, checkpoints and torch.autocast are torch's own, and no recipe changes it.
    `CustomRouter(mine)(x, outputs=("probs", "indices"))` works too.

    Raises TypeError for a module that is none, and for results that are not as `returns` says or of other dtypes;
    ValueError for names that lack one of the two, an x that is not [T, H], and results of other shapes.
    """

    def __init__(self, module: nn.Module, *, returns: Sequence[str] = ("probs", "indices")) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}, but must be a torch.nn.Module. Wrap it in one.")
        names = (returns,) if isinstance(returns, str) else tuple(returns)
        if not {"probs", "indices"} <= set(names) or len(set(names)) < len(names):
            raise ValueError(
                f"returns is {names!r}, but must name 'probs' and 'indices', and nothing twice. "
                "Name what the module returns, in order."
            )
        self.module = module
        self.returns = names
        self.extra_outputs = {name: IndexTensor if name == "indices" else Tensor for name in names}

    def forward(self, x: Tensor, *, outputs: Sequence[str] = ()) -> Any:
        """x, or (x, {name: extra output}) if `outputs` names some."""
        x = as_input(x)
        check_extras((), [self.extra_name(name) for name in self.returns], {}, outputs)
        if x.dim() != 2:
            raise ValueError(
                f"x has shape {list(x.shape)}, but a router needs [tokens, features]. Flatten leading dimensions: "
                "give x.reshape(-1, x.shape[-1])."
            )
        results = self.module(x)
        self._check(x, results)
        made = {self.extra_name(name): result for name, result in zip(self.returns, results, strict=True)}
        return (x, {name: made[name] for name in outputs}) if outputs else x

    def _check(self, x: Tensor, results: object) -> None:
        owner = type(self.module).__name__
        needed = f"({', '.join(self.returns)})"
        if not isinstance(results, tuple | list) or len(results) != len(self.returns):
            given = f"{len(results)} values" if isinstance(results, tuple | list) else f"a {type(results).__name__}"
            raise TypeError(
                f"{owner} returned {given}, but {needed} is needed. "
                "Return these, or name what it returns with CustomRouter(..., returns=...)."
            )
        made = dict(zip(self.returns, results, strict=True))
        probs, indices = made["probs"], made["indices"]
        for name, value in made.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{owner} returned a {type(value).__name__} as {name}, but it must be a tensor.")
        if not probs.is_floating_point() or indices.is_floating_point() or indices.is_complex():
            raise TypeError(
                f"{owner} returned probs as {probs.dtype} and indices as {indices.dtype}, but a floating dtype and "
                f"integers are needed. Return them as {needed}."
            )
        if indices.dtype == torch.bool:
            raise TypeError(f"{owner} returned a mask as indices. Return the index of each chosen expert, [T, topk].")
        if probs.shape != indices.shape or probs.dim() != 2 or probs.shape[0] != x.shape[0]:
            raise ValueError(
                f"{owner} returned probs of shape {list(probs.shape)} and indices of shape {list(indices.shape)} for "
                f"{x.shape[0]} tokens, but both must be [{x.shape[0]}, topk]. Return the chosen experts of each token."
            )

    def extra_repr(self) -> str:
        return "" if self.returns == ("probs", "indices") else f"returns={self.returns!r}"
