"""A complete mixture-of-experts layer, from tokens to tokens, and the same in torch's own operations.

    ours   Router -> Dispatch -> GroupedLinear -> ScaledSwiGLU -> GroupedLinear -> Combine
    torch  product, topk, softmax, sort, gather, grouped_mm, SwiGLU, grouped_mm, gather, sum

Neither synchronizes. Without biases, in bf16, ours also under a recipe; logits and probabilities (a softmax over the
chosen logits) in fp32. The routing is controlled through the data: the first feature of x is 1, so the router's first
column acts as a bias.
"""

# T tokens, R = T topk rows, E experts, H hidden, F expert width

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import DTYPE, Call, Case
from bench.models import ExpertShape
from bench.routing import zipf_shares
from bench.schedule import BASELINE, recipe_named
from bench.sqnr import sqnr_db
from fuser import Sequential, autocast, ops

# The bias of experts that no token should choose.
NEVER = -30.0


@dataclass(frozen=True)
class LayerCase(Case):
    """A Case with the number of experts per token."""

    topk: int

    @property
    def rows(self) -> int:
        return len(self.dy) * self.topk

    @property
    def names(self) -> list[str]:
        return ["y", "dx", "drouter", "dw1", "dw2"]

    def ours(self, label: str = BASELINE) -> Call:
        """The layer under the recipe of this label."""
        x, recipe = self.inputs["x"], recipe_named(label)

        def call() -> Tensor:
            with autocast(recipe=recipe):
                return self.layer(x)

        return call

    def torchs(self, *, compiled: bool = False) -> Call:
        """The layer in torch's operations, eager or compiled."""
        way = _torch_layer(compiled)
        return lambda: way(self.inputs["x"], *self.weights, self.topk)

    def sqnr(self, found: list[Tensor]) -> dict[str, float]:
        """SQNR in dB of each result of a step (or only of y) by name, against a loop over the experts in fp32."""
        exact = self._reference(backward=len(found) > 1)
        return {
            name: sqnr_db(got, want) for name, got, want in zip(self.names[: len(found)], found, exact, strict=True)
        }

    def _reference(self, *, backward: bool) -> list[Tensor]:
        wanted = [tensor.detach().float().requires_grad_() for tensor in (self.inputs["x"], *self.weights)]
        x, router, fc1, fc2 = wanted
        probs, indices = route(x, router, self.topk)
        y = torch.zeros_like(x)
        for expert, (w1, w2) in enumerate(zip(fc1.unbind(), fc2.unbind(), strict=True)):
            tokens, slots = (indices == expert).nonzero(as_tuple=True)
            act = scaled_swiglu(x[tokens] @ w1.mT, probs[tokens, slots])
            y = y.index_add(0, tokens, act @ w2.mT)
        return [y.detach(), *(torch.autograd.grad(y, wanted, self.dy.float()) if backward else ())]


def whole_layer(
    shape: ExpertShape, *, device: torch.device | str = "cpu", tokens: int | None = None, routing: str = "random"
) -> LayerCase:
    """The layer of a model, with random routing, or "skewed" by `zipf_shares`."""
    experts, hidden, width = shape.num_experts, shape.hidden, shape.intermediate
    options = {"device": device, "dtype": DTYPE}
    layer = Sequential(
        ops.Router(hidden, experts, shape.topk, use_pre_softmax=False, **options),
        ops.Dispatch(experts),
        ops.GroupedLinear(experts, hidden, 2 * width, bias=False, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(experts, width, hidden, bias=False, **options),
        ops.Combine(),
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
        bias = zipf_shares(experts).log().clamp(min=NEVER) if routing == "skewed" else torch.zeros(experts)
        next(layer.parameters())[:, 0] = bias
    tokens = tokens or shape.tokens
    x = torch.randn(tokens, hidden, **options)
    x[:, 0] = 1
    flop = 6 * tokens * shape.topk * hidden * width
    return LayerCase(layer, {"x": x.requires_grad_()}, torch.randn_like(x), flop, shape.topk)


def route(x: Tensor, router: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    logits, indices = (x.float() @ router.float().mT).topk(topk, dim=-1)
    return logits.softmax(-1), indices


def scaled_swiglu(h: Tensor, scales: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return (F.silu(gate) * up * scales[:, None]).to(h.dtype)


@cache
def _torch_layer(compiled: bool) -> Callable[..., Tensor]:
    def way(x: Tensor, router: Tensor, fc1: Tensor, fc2: Tensor, topk: int) -> Tensor:
        probs, indices = route(x, router, topk)
        by_row, slot_of_row = indices.flatten().sort(stable=True)
        row_of_slot = slot_of_row.argsort()
        ends = torch.searchsorted(by_row, torch.arange(len(fc1), device=x.device), right=True).int()
        h = F.grouped_mm(x.index_select(0, slot_of_row // topk), fc1.mT, offs=ends)
        act = scaled_swiglu(h, probs.flatten().index_select(0, slot_of_row))
        rows = F.grouped_mm(act, fc2.mT, offs=ends)
        return rows.index_select(0, row_of_slot).view(*indices.shape, -1).sum(1)

    return torch.compile(way, fullgraph=True, dynamic=False) if compiled else way
