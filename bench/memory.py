"""What a step keeps for its backward, and how much memory it needs at most."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(call: Callable[[], Tensor], *, but: Iterable[Tensor] = ()) -> int:
    """Bytes that `save_for_backward` keeps in a call: each storage once, those of `but` (parameters) not at all.

    An input of the caller's that is kept as it is counts.
    """
    left_out = {tensor.untyped_storage().data_ptr() for tensor in but}
    # They are alive, so no two storages have one address.
    storages = {(at := tensor.untyped_storage()).data_ptr(): at.nbytes() for tensor in saved_tensors(call)}
    return sum(size for address, size in storages.items() if address not in left_out)


def saved_tensors(call: Callable[[], Tensor]) -> list[Tensor]:
    """What `save_for_backward` keeps in a call."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return saved


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """The most that torch's allocator held in a step, above what was there before; None where it is not measured."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
