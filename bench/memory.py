"""The memory that a step saves for backward, and its peak memory."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(call: Callable[[], Tensor], *, but: Iterable[Tensor] = ()) -> int:
    """Bytes that a call saves with `save_for_backward`: each storage once, except those of `but` (parameters).

    Saved inputs of the caller are counted.
    """
    left_out = {tensor.untyped_storage().data_ptr() for tensor in but}
    # All are alive, so each storage has its own address.
    storages = {(at := tensor.untyped_storage()).data_ptr(): at.nbytes() for tensor in saved_tensors(call)}
    return sum(size for address, size in storages.items() if address not in left_out)


def saved_tensors(call: Callable[[], Tensor]) -> list[Tensor]:
    """The tensors that a call saves with `save_for_backward`."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return saved


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Peak bytes of torch's allocator in a step, minus those before the step; None where not measured."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
