"""What one operation knows while it runs: its recipe, dtype, path, parameters, and what forward keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recipes.quantizer import Quantizer
from recipes.recipe import Recipe
from recipes.request import Needs


class IndexTensor:
    """Kind of an extra tensor of integers: it carries no gradient. Used in `extra_inputs` and `extra_outputs`."""


class OperationContext:
    """The state of one operation in one pass.

    Forward gets a new one; backward gets another new one, with the same values, so nothing that backward does can
    reach a second backward. Numbers, bools and strings set on it in forward are there in backward.

    recipe:  the recipe of this call, never None (`HighPrecision()` is "no recipe")
    dtype:   the dtype to compute in; x arrives in it and y leaves in it
    needs:   which gradients are wanted (`Needs`); needs_grad: whether any is, and so whether to set `saved`
    path:    where grouped products run (`ops.paths`)
    saved:   a NamedTuple of the operation's own class; fields are tensors, None, or containers with `tensors()`
             and `rebuild(tensors)`. Never parameters: `param(name)` reads those from the operation.
    buffers: the caller's own tensors for this operation, by name
    next_input_quantizer, previous_grad_quantizer: what the neighbours would quantize their operand with
    """

    operation: Any
    index: int
    recipe: Recipe
    dtype: torch.dtype
    needs: Needs
    needs_grad: bool
    path: Any
    buffers: dict[str, torch.Tensor]
    next_input_quantizer: Quantizer | None
    previous_grad_quantizer: Quantizer | None
    saved: Any = None
    recorded: dict[str, tuple[torch.Tensor, int]] | None = None

    def param(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The operation's parameter, in `dtype` or by default in `ctx.dtype`.

        In backward it must be the very tensor that forward used, unchanged; otherwise RuntimeError.
        """
        parameter = self._held(name)
        if self.recorded is not None:
            self._check_unchanged(name, parameter)
        return parameter.to(dtype or self.dtype)

    def record(self, names: Sequence[str]) -> None:
        """Note which parameters forward has seen, and in which version."""
        parameters = [self._held(name) for name in names]
        self.recorded = {name: (p, p._version) for name, p in zip(names, parameters, strict=True)}

    def _held(self, name: str) -> torch.Tensor:
        parameter = self.operation._parameters.get(name)
        return self.operation.get_parameter(name) if parameter is None else parameter  # a dotted name, or torch's error

    def _check_unchanged(self, name: str, parameter: torch.Tensor) -> None:
        assert self.recorded is not None
        forward_parameter, version = self.recorded[name]
        if parameter is not forward_parameter:
            happened = "was replaced"
        elif parameter._version != version:
            happened = f"was changed in place (version {version} in forward, {parameter._version} now)"
        else:
            return
        raise RuntimeError(
            f"Parameter {name!r} {happened} between forward and backward, so its gradients would be wrong. "
            "Run backward before the optimizer step or any other change of the weights."
        )
