"""What torch's DistributedDataParallel does with the operations inside of it.

While its forward runs, `active_wrapper` gives it. In backward it reduces the gradients that autograd has accumulated
by then, of all parameters but those in its `parameters_to_ignore`.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def active_wrapper() -> Any:
    """The DistributedDataParallel whose forward runs, the innermost one, or None."""
    return DistributedDataParallel._active_ddp_module


def reduced_parameters(wrapper: Any) -> set[int]:
    """The `id`s of the parameters whose gradients it reduces, named as its reducer names them."""
    return {
        id(parameter)
        for path, module in wrapper.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if f"{path}.{name}" not in wrapper.parameters_to_ignore
    }
