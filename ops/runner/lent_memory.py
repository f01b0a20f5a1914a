"""Memory that an operation has for what its neighbours write, so that nothing has to be copied there.

What a step writes is y, in forward, and dx, in backward. Where the operation that takes it next may have memory for it
(`BasicOperation.lends_memory`), and the caller gave no buffers, the runner asks for that memory before the step, and
hands it on as the buffer "output" or "grad_input".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LentMemory(NamedTuple):
    """Memory for a gradient of x, which the operation before has.

    tensor: in the shape of that gradient
    ready: to be called (by `recipes.triton.tape.call_again`) once the kernels that write there are issued; then that
    operation may begin to transfer it beside what is issued behind. It does not depend on being called
    multiprocessors: how many that takes
    """

    tensor: torch.Tensor
    ready: Callable[[], object] | None = None
    multiprocessors: int = 0


def memory_for_output(
    operations: Sequence[Any],
    lender: int,
    x: Any,
    environment: Mapping[str, Any],
    contexts: Sequence[Mapping[str, Any]],
) -> Tensor | None:
    """For y of the step that ends before the operation at `lender`, which has it.

    x: what the step takes; environment: the extra tensors by name; contexts: the plan's
    """
    features, dtype = operations[lender - 1].features(None), contexts[lender - 1]["dtype"]
    if len(x.shape) != 2 or features is None:
        return None
    behind = operations[lender]
    extras = {local: environment.get(behind.extra_name(local)) for local in behind.extra_inputs}
    memory: Tensor | None = behind.memory_for_input(extras, (x.shape[0], features), dtype)
    return memory


def memory_for_grad_input(lender: Any, saved: Any, dy: Any, dtype: torch.dtype) -> LentMemory | None:
    """For dx of a step that writes it in this dtype, of dy. saved: of the lender's forward; None: it has no backward"""
    memory: LentMemory | None = None if saved is None else lender.memory_for_grad_output(saved, dy.shape[0], dtype)
    return memory
