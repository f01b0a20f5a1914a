"""The candidates of `bench parallel`, which describes them: all on the same x, router and experts' weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from bench.case import Call
from bench.exchange import exchanged_layer, experts_of, torch_experts
from bench.models import ExpertShape
from bench.schedule import BASELINE, recipe_named
from bench.whole_layer import LayerCase
from fuser import Sequential, autocast, ops
from fuser.distributed import Overlapped
from ops.kernels.routing import transports

ONE, OURS, OVERLAPPED, HAND, TORCH = "one rank", "ours", "overlapped", "hand-written", "torch"
ALLTOALL, SYMMETRIC = "alltoall", "symmetric"
OVERLAP = f"{SYMMETRIC}, overlap"
CAPTURED = {way: f"{way}, captured" for way in (SYMMETRIC, OVERLAP)}
PARTIAL_SUMS = {f"partial sums, {name}": name for name in transports.PARTIAL_SUMS}


@dataclass(frozen=True)
class Way:
    """A candidate. transport: None for "one rank"; recipe: that of `call`; captured: its step is replayed"""

    call: Call
    transport: str | None
    recipe: str = BASELINE
    partial_sums: str | None = None
    captured: bool = False


def make_ways(
    shape: ExpertShape,
    case: LayerCase,
    experts: list[nn.Parameter],
    partial_sums: Sequence[str],
    recipes: Sequence[str],
    capacity: int | None,
) -> dict[str, Way]:
    """All by name. experts: the weights of this rank's; capacity: of "symmetric", which is left out without it."""
    x, router = case.inputs["x"], case.weights[0]

    def by_hand(mlp: Any) -> Way:
        return Way(lambda: exchanged_layer(x, router, mlp, topk=shape.topk, num_experts=shape.num_experts), ALLTOALL)

    def over(transport: str, sums: str | None = None, overlap: bool = False) -> Way:
        rows = capacity if transport == SYMMETRIC else None
        sent = {"transport": transport, "partial_sums": sums}
        layer = sharded(shape, router, experts, sent, capacity=rows, overlap=overlap)
        return Way(lambda: layer(x), transport, partial_sums=sums)

    layer = sharded(shape, router, experts)
    overlapped = Overlapped(*layer)
    ways = {
        ONE: Way(case.ours(), None),
        OURS: Way(lambda: layer(x), ALLTOALL),
        OVERLAPPED: Way(lambda: overlapped(x), ALLTOALL),
        HAND: by_hand(experts_of(layer[2:5])),
        TORCH: by_hand(torch_experts(*experts)),
    }
    summed = {name: sums for name, sums in PARTIAL_SUMS.items() if sums in partial_sums}
    ways |= {name: over(ALLTOALL, sums) for name, sums in summed.items()}
    if capacity is not None:
        ways |= {SYMMETRIC: over(SYMMETRIC), OVERLAP: over(SYMMETRIC, overlap=True)}
        if x.is_cuda:
            ways |= {name: replace(ways[way], captured=True) for way, name in CAPTURED.items()}
        ways |= {f"{SYMMETRIC}, {name}": over(SYMMETRIC, sums) for name, sums in summed.items()}
    plain = {name: ways[name] for name in (ONE, OURS, OVERLAPPED, SYMMETRIC) if name in ways}
    for recipe in recipes:
        for name, way in plain.items():
            ways[f"{name}, {recipe}"] = replace(way, call=_under(recipe, way.call), recipe=recipe)
    return ways


def sharded(
    shape: ExpertShape,
    router: Tensor,
    weights: list[nn.Parameter],
    sent: Mapping[str, Any] | None = None,
    **to_experts: Any,
) -> Sequential:
    """The layer over all ranks, on these parameters. sent: how; to_experts: of `Dispatch` alone"""
    own = weights[0].shape[0]
    over_ranks: dict[str, Any] = {"group": dist.group.WORLD, **(sent or {})}
    options: dict[str, Any] = {"device": "meta", "dtype": router.dtype}
    layer = Sequential(
        ops.Router(shape.hidden, shape.num_experts, shape.topk, use_pre_softmax=False, **options),
        ops.Dispatch(shape.num_experts, **to_experts, **over_ranks),
        ops.GroupedLinear(own, shape.hidden, 2 * shape.intermediate, bias=False, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(own, shape.intermediate, shape.hidden, bias=False, **options),
        ops.Combine(**over_ranks),
    )
    layer[0].weight, layer[2].weight, layer[4].weight = router, *weights
    return layer


def _under(recipe: str, call: Call) -> Call:
    value = recipe_named(recipe)

    def run() -> Tensor:
        with autocast(recipe=value):
            return call()

    return run
