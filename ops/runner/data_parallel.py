"""What torch's DistributedDataParallel does with the operations inside of it.

`LastWrapper` says in whose forward they run. In backward it reduces the gradients that autograd has accumulated by
then, of all parameters but those in its `parameters_to_ignore`. Before each forward it overwrites the buffers of all
ranks with those of rank 0, but for those named there (`broadcast_buffers`, on by default).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch.nn.parallel import DistributedDataParallel


class LastWrapper:
    """The DistributedDataParallel in whose forward something ran last, held weakly."""

    def __init__(self) -> None:
        self._last: Callable[[], Any] = _nothing

    def changed(self) -> Any:
        """The one whose forward runs, the innermost one, if it is not the last; else None."""
        active = DistributedDataParallel._active_ddp_module
        return active if active is not None and active is not self._last() else None

    def entered(self, wrapper: Any) -> None:
        """From now on this is the last one."""
        self._last = weakref.ref(wrapper)


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


def _nothing() -> None:
    return None
