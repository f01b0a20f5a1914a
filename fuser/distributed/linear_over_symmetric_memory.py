"""A Linear's product and the transfer of its rows in one: torch's symmetric memory transfers parts during the product.

    AllGatherLinear        y = all_gather(x) W^T        `torch.ops.symm_mem.fused_all_gather_matmul`
    LinearReduceScatter    y = reduce_scatter(x W^T)    `torch.ops.symm_mem.fused_matmul_reduce_scatter`

Forwards of Linears with sequence_parallel. Neither is built in: give them to `fuser.register_fusion` or a Sequential.
"""
# n ranks, T rows of a rank, K in features, N out features

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch

# It defines the operations of torch.ops.symm_mem.
import torch.distributed._symmetric_memory
from torch import Tensor

from ops.linear import Linear
from ops.runner.operation import BasicOperation, FusedOperation, OperationContext
from recipes.recipe import Role
from recipes.request import PlanRequest


class LinearOverSymmetricMemory(FusedOperation):
    """What both have in common: one Linear, in forward, which saves what it saves itself.

    All ranks of the group need to reach each other's memory (one NVLink domain): that is known when it runs, and then
    torch raises RuntimeError. Sums are made in the order of the library, of parts that are rounded as unfused, and so
    results are equal within the order of summation.
    """

    pattern = (Linear,)
    passes = "forward"
    handles_transfers = True
    mode: ClassVar[str]
    library: ClassVar[str]

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        linear = cast(Linear, operations[0])
        parallel = linear.parallel
        if parallel is None or parallel.mode != cls.mode or not parallel.sequence_parallel:
            return f"only a Linear with tensor_parallel={cls.mode!r} and sequence_parallel transfers these rows."
        if request.device.type != "cuda":
            return f"symmetric memory is that of GPUs, but x is on {request.device.type}."
        backend = parallel.group.backends.get("cuda")
        if backend != "nccl":
            return f"symmetric memory is set up over NCCL, but the group has {backend or 'no backend'} for cuda."
        if request.recipe.quantizer(Role.INPUT) is not None or request.recipe.quantizer(Role.WEIGHT) is not None:
            return f"recipe {request.recipe.name} quantizes the operands, and this product takes high precision."
        if request.recipe.batch_invariant:
            return "it multiplies the rows in parts, whose bits depend on how many there are."
        if linear.as_one_group:
            return "as_one_group=True multiplies by the kernel of grouped products, and this is the library's."
        if linear.use_bias and not parallel.is_row:
            return "the bias is added in the product, before its one rounding. Give bias=False."
        return None

    def kernel(self, request: PlanRequest) -> str:
        return f"{self.library} (torch.ops.symm_mem){self.operations[0].transfers(request)}"

    def fuser_forward(
        self, ctxs: Sequence[OperationContext], x: Any, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        linear, ctx = cast(Linear, self.operations[0]), ctxs[0]
        assert linear.parallel is not None, "why_not says so"
        linear.check_input(ctx, x)
        y = self.product(x, ctx.param("weight").to(ctx.dtype).t(), linear.parallel.group.process_group.group_name)
        if ctx.needs_grad:
            kept = x.reshape(-1, x.shape[-1]) if linear.parallel.is_row else x
            ctx.saved = Linear.Saved(kept if "weight" in ctx.needs.params else None)
        return y.add_(ctx.param("bias")) if linear.use_bias else y, {}

    def product(self, x: Tensor, w_KN: Tensor, group_name: str) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no product.")


class AllGatherLinear(LinearOverSymmetricMemory):
    """y = all_gather(x) W^T [n T, ..., N/n], for x [T, ..., K] and a column-parallel Linear with sequence_parallel.

    Rows are multiplied as soon as they have arrived. For refusals see `LinearOverSymmetricMemory.why_not`.
    """

    mode, library = "column", "fused_all_gather_matmul"

    def product(self, x: Tensor, w_KN: Tensor, group_name: str) -> Tensor:
        # With the gathered rows as a result torch does not choose its multicast.
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w_KN], 0, group_name, return_A=True)
        return y


class LinearReduceScatter(LinearOverSymmetricMemory):
    """y = reduce_scatter(x W^T) [T/n, ..., N], for x [T, ..., K/n] and a row-parallel Linear with sequence_parallel.

    Rows are sent as soon as they are multiplied. For refusals see `LinearOverSymmetricMemory.why_not`.
    """

    mode, library = "row", "fused_matmul_reduce_scatter"

    def product(self, x: Tensor, w_KN: Tensor, group_name: str) -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w_KN, "sum", 0, group_name)
