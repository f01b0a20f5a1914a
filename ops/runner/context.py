"""What one operation has while it runs: its recipe, dtype, path, parameters, and what forward keeps for backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ops.runner.lent_memory import LentMemory
from ops.runner.parameters import held_parameter
from ops.runner.quantizer_state import QuantizerState
from recipes.cast_counts import watched
from recipes.pending import PendingUpdates
from recipes.recipe import Recipe, Role
from recipes.request import Needs
from recipes.tensors.quantized_handle import QuantizedHandle, at_values
from recipes.tensors.quantizer import Quantizer


class IndexTensor:
    """Kind of an extra tensor of integers: it carries no gradient. Used in `extra_inputs` and `extra_outputs`."""


class Receiver(NamedTuple):
    """What the operation behind this one has: the dtype in which it takes x, and which gradients it computes."""

    dtype: torch.dtype
    needs: Needs


class OperationContext:
    """The state of one operation in one pass.

    Forward gets a new one; backward gets another new one, with the same values, so nothing that backward does can
    reach a second backward. Numbers, bools and strings set on it in forward are there in backward.

    recipe:  the recipe of this call, never None (`HighPrecision()` is "no recipe")
    dtype:   the dtype to compute in; x arrives in it and y leaves in it
    needs:   which gradients are needed (`Needs`); needs_grad: whether any is, and so whether to set `saved`
    path:    where grouped products run (`ops.products.paths`)
    saved:   a NamedTuple of the operation's own class; fields are tensors, None, or containers with `tensors()`
             and `rebuild(tensors)`. Never parameters: `param(name)` reads those from the operation.
    buffers: the caller's own tensors for this operation, by name
    own_gradients: in the backward of an operation with `reuses_gradients`, the names of the extra outputs whose
             gradients lie in memory that nothing else reads: it may write into them
    computed: its parameters that are no registered ones, by name (`ops.runner.parameters`)
    handed_on: what the operation's `hand_on` gave; receiver: of the operation that this is for
    gathers, gathers_back: whether y, and dx, are to be handed on as `GatheredRows`
    lent: in backward, memory for dx, which is in `buffers` too
    updates: where quantizers with a state record that it changes at the end of the step; None: they record nothing
    """

    operation: Any
    index: int
    recipe: Recipe
    dtype: torch.dtype
    needs: Needs
    needs_grad: bool
    path: Any
    buffers: dict[str, torch.Tensor]
    parameter_slots: Mapping[str, int]
    saved: Any = None
    own_gradients: frozenset[str] = frozenset()
    updates: PendingUpdates | None = None
    computed: Mapping[str, torch.Tensor] = {}
    quantized_weights: Any = None  # what backward multiplies with of those of forward, see `ops.products.weights`
    prepared_weights: Any = None  # those of forward, where `constant_weights` has them
    destinations: Any = None  # in backward, where weight gradients are added to main_grad, see `ops.products.main_grad`
    handed_on: Any = None
    gathers: bool = False
    gathers_back: bool = False
    lent: LentMemory | None = None
    receiver: Receiver | None = None
    seen_in_forward: tuple[Sequence[torch.Tensor], Sequence[Any]] | None = None  # the pipeline's parameters, states

    if TYPE_CHECKING:  # an operation may set numbers of its own

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def quantizer(self, role: Role, snapshot: torch.Tensor | None = None) -> Quantizer | None:
        """What this operation quantizes its tensors in that role with; None leaves them in high precision.

        snapshot: what `Quantizer.snapshot` gave in forward, to cast in backward what forward cast.
        """
        quantizer = self.recipe.quantizer(role)
        if quantizer is not None and quantizer.keeps_state:
            # Gradients are recorded in backward, everything else in forward: what backward casts again is known.
            in_backward = self.seen_in_forward is not None
            updates = self.updates if in_backward == (role is Role.GRAD_OUTPUT) else None
            state = QuantizerState(self.operation, role, self.operation.num_scales)
            quantizer = quantizer.bound(state, updates, snapshot)
        return None if quantizer is None else watched(quantizer, self.operation, role)

    def param(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The operation's parameter, in `dtype` or by default in `ctx.dtype`.

        In backward it must be the very tensor that forward used, unchanged; otherwise RuntimeError.
        """
        parameter = at_values(self.held(name))
        dtype = dtype or self.dtype
        return parameter if parameter.dtype == dtype else parameter.to(dtype)

    def held(self, name: str) -> torch.Tensor:
        """The same as it is held: not cast, and perhaps as codes."""
        if name in self.computed:
            return self.computed[name]
        if self.seen_in_forward is None:
            return held_parameter(self.operation, name)
        self.check_unchanged(name)
        return self.seen_in_forward[0][self.parameter_slots[name]]

    def hold_computed(self, slots: frozenset[int], parameters: Sequence[torch.Tensor]) -> None:
        """Set `computed`. slots, parameters: of the whole pipeline."""
        self.computed = {name: parameters[slot] for name, slot in self.parameter_slots.items() if slot in slots}

    def check_unchanged(self, name: str) -> None:
        """In backward: raise RuntimeError unless the parameter is the very tensor that forward used, unchanged.

        One that only stood in for a call (`torch.func.functional_call`) is not looked for. Computed ones are autograd's
        to check.
        """
        assert self.seen_in_forward is not None
        if name in self.computed:
            return
        slot = self.parameter_slots[name]
        forward_parameter, state = (seen[slot] for seen in self.seen_in_forward)
        now = state_of(forward_parameter)
        held = held_parameter(self.operation, name)
        if held is not forward_parameter and self.operation.has_held(forward_parameter):
            happened = "was replaced"
        elif now[0] != state[0]:
            happened = f"was changed in place (version {state[0]} in forward, {now[0]} now)"
        elif now != state:
            happened = "got other data (an assignment to .data, or .to())"
        else:
            return
        raise RuntimeError(
            f"Parameter {name!r} {happened} between forward and backward, so its gradients would be wrong. "
            "Run backward before the optimizer step or any other change of the weights."
        )


def state_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """By which a change is noticed: version (0 for an inference tensor, which has none), dtype, storage, and where the
    elements lie in it.

    The storage itself, equal to itself alone: the address of one that was freed may be another's the next moment. FSDP2
    frees the memory of the storage and gathers the weight into other memory, but it is the same storage. Of a weight
    that is held quantized those of its codes and scales. DeepSpeed's ZeRO-3 assigns the data of its parameters, marked
    by `ds_id`, in each pass; what it gathers is its own to answer for.
    """
    kind = type(parameter)
    if kind is torch.nn.Parameter or kind is torch.Tensor:
        if "ds_id" in parameter.__dict__:
            return 0, parameter.dtype
        version = 0 if parameter.is_inference() else parameter._version
        return version, parameter.dtype, parameter.untyped_storage(), parameter.storage_offset(), parameter.stride()
    if isinstance(parameter, QuantizedHandle):
        tensors = [tensor for tensor in parameter.quantized.tensors() if tensor is not None]
        version = sum(0 if tensor.is_inference() else tensor._version for tensor in tensors)
        return version, parameter.dtype, tensors[0].untyped_storage()
    return 0 if parameter.is_inference() else parameter._version, parameter.dtype, None


def at_tensor(x: Any) -> torch.Tensor:
    """x, or the dequantized tensor of a quantized container."""
    return x if isinstance(x, torch.Tensor) else x.dequantize()
