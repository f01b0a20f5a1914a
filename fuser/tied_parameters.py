"""Tied parameters: those that a model holds in more than one place."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Place(NamedTuple):
    """Where a parameter is: under `name` in `module`, which is `path` in the model."""

    path: str
    module: nn.Module
    name: str

    def __str__(self) -> str:
        return ".".join(filter(None, (self.path, self.name)))


def tied_parameters(model: nn.Module) -> dict[Tensor, list[Place]]:
    """Each parameter that modules of `model` hold in several places, with these, in the model's order."""
    places: dict[Tensor, list[Place]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append(Place(path, module, name))
    return {parameter: found for parameter, found in places.items() if len(found) > 1}
