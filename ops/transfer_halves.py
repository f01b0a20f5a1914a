"""Dispatch and Combine over ranks in two halves each, between which other work runs while rows are on their way.

    Dispatch(E, group=g)  =  DispatchStart -> DispatchFinish            forward: rows to the experts, backward: and back
    Combine(group=g)      =  CombineStart -> CombineFinish              forward: rows to the tokens, backward: and back

In forward the first half starts the transfer and the second one awaits it, in backward the other way round. What is on
its way is held by the routing map; between the halves stands a tensor of zeros that has no memory, of the shape that
autograd needs. So the halves have the bits of the whole operation.

A second half begins a pipeline: the two halves are nodes of autograd, which runs what comes between them between them.
"""
# T tokens, H features, R rows for the experts of a rank

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ops.codes_on_wire import SentTokens, in_dtype_of_x
from ops.combine import Combine
from ops.dispatch import Dispatch
from ops.kernels.routing.all_to_all import ShardedRoutingMap
from ops.kernels.routing.permute import RoutingMap
from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from recipes.request import PlanRequest

NO_GROUP = "without a group nothing is transferred"


class Saved(NamedTuple):
    routing_map: RoutingMap


class DispatchStart(Dispatch):
    """A Dispatch with a group that starts the transfer of its tokens: y [R, H] is zeros. All else is there."""

    def __init__(self, whole: Dispatch) -> None:
        assert whole.group is not None, NO_GROUP
        super().__init__(
            whole.num_experts,
            group=whole.group.process_group,
            partial_sums=whole.partial_sums,
            send_codes=whole.send_codes,
        )
        _take_settings(self, whole)

    def hand_on(self, receiver: BasicOperation | None, request: PlanRequest) -> SentTokens:
        return in_dtype_of_x("between the halves of a Dispatch stands a tensor, in place of the values to come")

    def send_tokens(self, x: Tensor, routing_map: ShardedRoutingMap) -> Tensor:
        routing_map.start_tokens(x)
        return _stand_in(x, routing_map.row_of_arrived.shape[0])

    def sum_rows(self, dy: Tensor, routing_map: ShardedRoutingMap) -> Tensor:
        if not routing_map.under_way:  # no gradient has reached the second half
            routing_map.start_sums(dy)
        return routing_map.finish_sums(dy.dtype)


class CombineStart(Combine):
    """A Combine with a group that starts the way back of its rows: y [T, H] is zeros; in backward awaits dx."""

    def __init__(self, whole: Combine) -> None:
        assert whole.group is not None, NO_GROUP
        super().__init__(group=whole.group.process_group, partial_sums=whole.partial_sums)
        _take_settings(self, whole)

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        routing_map: ShardedRoutingMap = extras["routing_map"]
        self.check(x, routing_map)
        if ctx.needs_grad:
            ctx.saved = Saved(routing_map)
        routing_map.start_sums(x)
        return _stand_in(x, routing_map.row_of_slot.shape[0]), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        return ctx.saved.routing_map.finish_tokens(), {}, {}


class SecondHalf(BasicOperation):
    """What the second halves have in common."""

    extra_inputs = {"routing_map": RoutingMap}
    begins_pipeline = True
    awaits: str

    def __init__(self, whole: Dispatch | Combine) -> None:
        super().__init__()
        assert whole.group is not None, NO_GROUP
        self.group = whole.group
        self.why_in_full = whole.why_in_full
        _take_settings(self, whole)

    def kernel(self, request: PlanRequest) -> str:
        return self.awaits

    def features(self, incoming: int | None) -> int | None:
        return incoming

    def extra_repr(self) -> str:
        return f"group={self.group}"


class DispatchFinish(SecondHalf):
    """Awaits the tokens of a DispatchStart: y [R, H]; in backward starts the way back of their gradients."""

    awaits = "awaits the rows, copied by expert; starts the way back of their gradients"

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        if ctx.needs_grad:
            ctx.saved = Saved(extras["routing_map"])
        return extras["routing_map"].finish_tokens(), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        routing_map: ShardedRoutingMap = ctx.saved.routing_map
        if not routing_map.needed.x:
            return dy, {}, {}
        routing_map.start_sums(dy)
        return _stand_in(dy, dy.shape[0]), {}, {}


class CombineFinish(SecondHalf):
    """Awaits the rows of a CombineStart and sums them: y [T, H]; in backward starts the transfer of dy."""

    awaits = "awaits the rows and sums them; starts the transfer of dy"

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        routing_map: ShardedRoutingMap = extras["routing_map"]
        if ctx.needs_grad:
            ctx.saved = Saved(routing_map)
        return routing_map.finish_sums(x.dtype), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        ctx.saved.routing_map.start_tokens(dy)
        return _stand_in(dy, dy.shape[0]), {}, {}


def _stand_in(like: Tensor, rows: int) -> Tensor:
    """Zeros [rows, H] without memory of their own."""
    return like.new_zeros(()).expand(rows, like.shape[1])


def _take_settings(half: BasicOperation, whole: BasicOperation) -> None:
    """The recipe of the whole operation, and the names of its extra tensors."""
    names = {name: whole.extra_name(name) for name in (*half.extra_inputs, *half.extra_outputs)}
    half.rename_extras(**names)
    half.set_recipe(whole.recipe)
