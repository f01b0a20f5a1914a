"""MasterWeights: float32 copies of quantized parameters, which an optimizer of torch steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recipes.tensors.quantized_parameter import QuantizedParameter
from recipes.tensors.quantized_shard import QuantizedShard, local_shard, with_local


class MasterWeights:
    """Float32 masters of the quantized parameters of a model, for an optimizer that knows nothing of them.

        masters = fuser.MasterWeights(model.parameters())
        optimizer = masters.attach(torch.optim.AdamW(masters.parameters(), lr=1e-3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Before each step a master receives the gradient of its parameter: `.grad`, or `main_grad` where the parameter has
    one, and `.grad` of the parameter is set to None. After it the parameter is quantized from its master: to nearest,
    once, from float32. Masters begin with the values before quantization, if the parameter has kept them
    (`preserve_high_precision_init_val=True`; they are cleared), else with the dequantized ones. `read()` takes these
    later, after a load into the model.

    Of parameters that FSDP2 shards the masters are sharded alike: make them after `fully_shard`, on all ranks. Each
    rank steps and quantizes its own rows; where one scale is of all ranks' rows, `step()` is a collective.

    parameters: of a model; those that are not quantized go to the optimizer as they are

    Raises ValueError if none is quantized and requires grad.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        given = list(parameters)
        self._masters: dict[int, nn.Parameter] = {}
        for parameter in given:
            held = parameter if isinstance(parameter, QuantizedParameter) else local_shard(parameter)
            if held is not None and parameter.requires_grad:
                self._masters[id(parameter)] = _master(parameter, held)
        if not self._masters:
            raise ValueError(
                "MasterWeights got no quantized parameter that requires grad. Use to_quantized(model) before."
            )
        self._given = given

    def parameters(self) -> list[Tensor]:
        """What the optimizer steps: a master in place of each quantized parameter."""
        return [self._masters.get(id(parameter), parameter) for parameter in self._given]

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let `step()` of this optimizer take the gradients before, and quantize after; returns it."""
        optimizer.register_step_pre_hook(lambda *_: self.take_gradients())
        optimizer.register_step_post_hook(lambda *_: self.quantize())
        return optimizer

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give each master the gradient of its parameter, in float32."""
        for parameter, master in self._pairs():
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            master.grad = None if gradient is None else gradient.view(master.shape).to(torch.float32)
            parameter.grad = None

    @torch.no_grad()
    def quantize(self) -> None:
        """Quantize each parameter from its master."""
        for parameter, master in self._pairs():
            parameter.copy_(master)

    @torch.no_grad()
    def read(self) -> None:
        """Give each master the dequantized values of its parameter: after a load into the model, which the next step
        would otherwise overwrite from the masters."""
        for parameter, master in self._pairs():
            master.copy_(parameter)

    def _pairs(self) -> Iterable[tuple[Any, nn.Parameter]]:
        return (
            (parameter, self._masters[id(parameter)]) for parameter in self._given if id(parameter) in self._masters
        )


def _master(parameter: Tensor, held: QuantizedParameter | QuantizedShard) -> nn.Parameter:
    """held: the parameter itself, or this rank's part of it."""
    values = held.get_high_precision_init_val()
    values = held.quantized.dequantize() if values is None else values.to(held.device)
    held.clear_high_precision_init_val()
    master = values.to(torch.float32, copy=True)
    return nn.Parameter(with_local(parameter, master) if isinstance(held, QuantizedShard) else master)
