"""What torch's DistributedDataParallel does with the operations inside of it.

While its forward runs, `active_wrapper` gives it. In backward it reduces the gradients that autograd has accumulated
by then, of all parameters but those in its `parameters_to_ignore`. Before each forward it overwrites the buffers of all
ranks with those of rank 0, but for those named there (`broadcast_buffers`, on by default).
"""

from __future__ import annotations

from collections.abc import Collection
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


def leave_states(wrapper: Any, names: Collection[str]) -> None:
    """Let it broadcast no buffer of these names, made or not, of any operation in it: the state of quantizers is each
    rank's own. On all ranks in the same forward, since they have to agree on what they broadcast."""
    if not names:
        return
    for path, module in wrapper.module.named_modules():
        if hasattr(module, "quantized_roles"):
            wrapper.parameters_to_ignore.update(f"{path}.{name}".removeprefix(".") for name in names)
    wrapper._assign_modules_buffers()  # now: a broadcast fails that finds none left
