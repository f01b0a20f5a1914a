"""Branch: a module computed beside what follows it, such as the shared expert of a mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ops.torch_function import check_names


class Branch(nn.Module):
    """y = x, and the extra output `name` is module(x), which `ops.AddExtraInput(name)` adds further on.

        Sequential(Router, Branch("shared", expert), Dispatch, ..., Combine, AddExtraInput("shared"))

    Its gradients are autograd's. In `fuser.distributed.Overlapped` a Branch directly before a Dispatch over ranks runs
    while that sends its tokens.

    Raises TypeError for a module that is none, and for a name that is no text.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}, but must be a torch.nn.Module.")
        check_names("extra_outputs", (name,))
        self.extra_outputs = (name,)
        self.module = module

    def forward(self, x: Tensor, *, outputs: Sequence[str] = ()) -> Any:
        return (x, {name: self.module(x) for name in outputs}) if outputs else x

    def extra_repr(self) -> str:
        return repr(self.extra_outputs[0])
