"""Torch: any function or module of torch between operations, with autograd's backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ops.runner.callers_extras import check_extras
from ops.runner.input import as_input
from ops.runner.named_extras import NamedExtras


class Torch(NamedExtras, nn.Module):
    """y = function(x, **extra inputs), or y, *extra outputs = function(x, **extra inputs).

        Sequential(ops.Linear(8, 8), ops.Torch(torch.erf), ops.Linear(8, 8))
        ops.Torch(lambda x, scales: x * scales[:, None], extra_inputs=("scales",))
        ops.Torch(lambda x: (x, x.norm()), extra_outputs=("norm",))

    function:      a function, or a module, whose parameters are then registered under `function`
    extra_inputs:  names of extra tensors that it receives by keyword, as tensors: of split sizes, [num_groups]
    extra_outputs: names of the extra tensors that it returns behind y, in order

    It is not an operation: it is called by itself, between two pipelines, and autograd differentiates the function, so
    torch.autocast, random numbers and checkpoints are torch's own, and no recipe changes it. Where y takes more than a
    line, a module that declares `extra_inputs` and `extra_outputs` itself does as well (see `fuser.layout`).

    Raises TypeError for a function that cannot be called, names that are no strings, an x that is no tensor, and
    results that are not one tensor for y and each extra output; ValueError for a name that is given twice.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        extra_inputs: Sequence[str] = (),
        extra_outputs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not callable(function):
            raise TypeError(f"function is {function!r}, which cannot be called. Give a function or a module.")
        self.function = function
        for argument, names in (("extra_inputs", extra_inputs), ("extra_outputs", extra_outputs)):
            check_names(argument, names)
        self.extra_inputs = dict.fromkeys(extra_inputs, Tensor)
        self.extra_outputs = dict.fromkeys(extra_outputs, Tensor)

    def forward(self, x: Tensor, *, outputs: Sequence[str] = (), **extras: Any) -> Any:
        """y, or (y, {name: extra output}) if `outputs` names some."""
        x = as_input(x)
        consumed, produced = ([self.extra_name(n) for n in names] for names in (self.extra_inputs, self.extra_outputs))
        check_extras(consumed, produced, extras, outputs)
        result = self.function(x, **{name: extras[self.extra_name(name)] for name in self.extra_inputs})
        values = result if isinstance(result, tuple) else (result,)
        if len(values) != 1 + len(produced) or not all(isinstance(value, Tensor) for value in values):
            given = ", ".join(type(value).__name__ for value in values)
            needed = ", ".join(("y", *self.extra_outputs))
            raise TypeError(
                f"The function of Torch returned ({given}), but tensors ({needed}) are needed. Return these."
            )
        made = dict(zip(produced, values[1:], strict=True))
        return (values[0], {name: made[name] for name in outputs}) if outputs else values[0]

    def extra_repr(self) -> str:
        own = "" if isinstance(self.function, nn.Module) else getattr(self.function, "__name__", repr(self.function))
        named = {"extra_inputs": tuple(self.extra_inputs), "extra_outputs": tuple(self.extra_outputs)}
        return ", ".join(part for part in (own, *(f"{key}={names}" for key, names in named.items() if names)) if part)


def check_names(argument: str, names: object) -> None:
    """Raise TypeError unless `names` is a sequence of strings, ValueError if one is there twice."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} is {names!r}, but must be names of extra tensors. Pass a tuple of strings.")
    if len(set(names)) < len(names):
        raise ValueError(f"{argument} is {tuple(names)!r}, which holds a name twice. Name each extra tensor once.")
