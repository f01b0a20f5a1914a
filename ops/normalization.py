"""The base of RMSNorm and LayerNorm: their settings and parameters, and x flattened to rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ops.kernels.norm.norm_triton import runs_in_triton
from ops.runner.checked import Checked
from ops.runner.operation import BasicOperation, OperationContext
from ops.runner.set_once import SetOnce
from ops.runner.shapes import check_features, check_parameter_dtype, check_shape
from recipes.arguments import as_flag, as_integer, as_number
from recipes.request import PlanRequest


def as_epsilon(name: str, eps: object) -> float:
    """eps as a float. Raises TypeError if it is not a number, ValueError unless it is positive and finite."""
    epsilon = as_number(name, eps)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"{name} is {eps}, but must be positive and finite: a row of zeros would be divided by zero.")
    return epsilon


class Normalization(BasicOperation):
    """Normalises over the trailing dimensions `normalized_shape`, and multiplies by a learned weight of that shape.

    learned: the names of its parameters, all of that shape

    Raises TypeError for arguments of another type, ValueError for dimensions or an eps that are not positive.
    """

    learned: ClassVar[tuple[str, ...]] = ("weight",)
    weight: nn.Parameter

    normalized_shape = SetOnce[tuple[int, ...]]()
    eps = Checked(as_epsilon)
    zero_centered_gamma = Checked(as_flag)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__()
        one = isinstance(normalized_shape, str) or not isinstance(normalized_shape, Sequence)
        given: Any = (normalized_shape,) if one else normalized_shape
        shape = tuple(as_integer("normalized_shape", size) for size in given)
        check_parameter_dtype(dtype)
        if not shape or min(shape) <= 0:
            raise ValueError(f"normalized_shape is {normalized_shape}, but needs one dimension or more, all positive.")
        self.normalized_shape = shape
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        for name in self.learned:
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that gamma is one."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def kernel(self, request: PlanRequest) -> str:
        return "rows in registers (Triton)" if runs_in_triton(request.device, request.dtype) else "torch"

    def check(self, ctx: OperationContext, x: Tensor) -> None:
        """Raise ValueError for an x with other trailing dimensions, or parameters of another shape."""
        if x.shape[-len(self.normalized_shape) :] != self.normalized_shape:
            raise ValueError(
                f"x has shape {list(x.shape)}, but must end in {list(self.normalized_shape)}. "
                "Check the operation before this one."
            )
        for name in self.learned:
            check_shape(name, ctx.held(name), self.normalized_shape)

    def features(self, incoming: int | None) -> int | None:
        check_features(incoming, self.normalized_shape[-1])
        return self.normalized_shape[-1]

    def flat(self, x: Tensor) -> Tensor:
        """x with the normalised (trailing) dimensions flattened into one."""
        dims = len(self.normalized_shape)
        return x if dims == 1 else x.flatten(-dims)

    def extra_repr(self) -> str:
        shape = self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape
        return f"{shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
