"""Other libraries' mixture-of-experts layers, on our weights. Those that are installed, correct and run are timed.

    SonicMoE  `moe_TC_softmax_topk_layer`, as its authors time it, with its own router; gate and up interleaved (rows 0,
              2, ... are the gate). `sonicmoe.MoE` would compute a loss of the load as well, which no other way does
    Liger     `LigerFusedMoEFunction`, after the same router in torch's operations

Their routers may compute in bf16 and choose other experts for a few tokens, so they only need to reach `PEER_FLOOR`.
torchao is not included: its grouped products for training are prototypes whose names change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from bench.case import Call, TimedPass, make_step
from bench.whole_layer import LayerCase, route

PEER_FLOOR = 20.0  # dB


@dataclass(frozen=True)
class Peer:
    """A peer's layer, prepared for a case.

    wanted: x and the weights of the router, FC1 and FC2, as the peer stores them
    as_fc1: converts the peer's layout of FC1's weight to ours
    """

    call: Call
    wanted: tuple[Tensor, ...]
    as_fc1: Callable[[Tensor], Tensor] = lambda weight: weight

    def step(self, case: LayerCase, passes: str) -> TimedPass:
        return make_step(self.call, self.wanted, case.dy, passes)

    def sqnr(self, case: LayerCase, found: list[Tensor]) -> dict[str, float]:
        """SQNR in dB of the results of a step, as in `LayerCase.sqnr`."""
        y, *gradients = found
        if gradients:
            dx, drouter, dw1, dw2 = gradients
            gradients = [dx, drouter, self.as_fc1(dw1), dw2]
        return case.sqnr([y, *gradients])


def make_sonicmoe(case: LayerCase) -> Peer:
    sonicmoe, enums = import_module("sonicmoe"), import_module("sonicmoe.enums")
    x, (router, fc1, fc2) = case.inputs["x"], case.weights
    interleaved = in_turn(fc1.detach()).requires_grad_()
    stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0

    def call() -> Tensor:
        # Weights are [2F, H, E] and [H, F, E] by strides; for inference it writes no pre-activation.
        y, _, _ = sonicmoe.moe_TC_softmax_topk_layer(
            x,
            router,
            interleaved.permute(1, 2, 0),
            None,
            fc2.permute(1, 2, 0),
            None,
            case.topk,
            stream,
            enums.ActivationType.SWIGLU,
            is_inference_mode_enabled=not torch.is_grad_enabled(),
        )
        return y

    return Peer(call, (x, router, interleaved, fc2), as_fc1=in_halves)


def make_liger(case: LayerCase) -> Peer:
    fused_moe = import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction.apply
    x, (router, fc1, fc2) = case.inputs["x"], case.weights

    def call() -> Tensor:
        probs, indices = route(x, router, case.topk)
        return fused_moe(x, fc1, fc2, indices.int(), probs.to(x.dtype))

    return Peer(call, (x, router, fc1, fc2))


# name -> (the required module, the function that creates its layer)
PEERS = {"SonicMoE": ("sonicmoe", make_sonicmoe), "Liger": ("liger_kernel", make_liger)}


def why_no_peer(name: str) -> str | None:
    """What is missing, as a sentence; None if nothing is."""
    module, _ = PEERS[name]
    return None if find_spec(module) else f"{module} is not installed."


def in_turn(weight: Tensor) -> Tensor:
    """[E, 2F, H] with all gate rows before all up rows  ->  gate and up rows interleaved."""
    return weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def in_halves(weight: Tensor) -> Tensor:
    """The inverse of `in_turn`."""
    return weight.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
