"""What quantizers keep from step to step on an operation: float32 buffers that appear with their first use.

They are named `quantizer_<role>_<name>`, such as `quantizer_input_amax_history`. An operation that never ran under a
recipe with a state has none, so a state dict of it has no extra key. Strict loading works between all recipes: an
entry that is absent beside the operation's parameters puts the state back to its beginning, and one that is not there
yet is made. Under inference mode they are made as ordinary tensors, which a later training step may change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

from recipes.recipe import Recipe, Role
from recipes.stack import scale_in_use
from recipes.tensors.quantizer import Quantizer
from recipes.triton.tape import taping

_PREFIXES = tuple(f"quantizer_{role.value}_" for role in Role)


class QuantizerState:
    """The state of one operation's quantizer for one role."""

    def __init__(self, operation: Any, role: Role, num_scales: int) -> None:
        self.operation = operation
        self.role = role.value
        self.prefix = f"quantizer_{role.value}_"
        self.num_scales = num_scales

    def tensors(
        self, quantizer: Quantizer, device: torch.device | None, names: Iterable[str] | None = None
    ) -> Mapping[str, Tensor]:
        """By name, on `device` (None: as they are there). names: of those that are wanted; others stay as they are

        A quantizer of others gets, where `fuser.checkpoint` computes again, those of the first run; ours ask for it.
        """
        of_others = type(quantizer).__module__.partition(".")[0] != "recipes"
        shapes = quantizer.state_shapes(self.num_scales)
        buffers = self.operation._buffers
        found: dict[str, Tensor] = {}
        for name, (shape, _) in shapes.items():
            tensor, wanted = buffers.get(self.prefix + name), names is None or name in names
            if tensor is None or (wanted and not _is_ready(tensor, shape, device)):
                tensor = self._make(name, tensor, quantizer, device)
            found[name] = scale_in_use(tensor.untyped_storage()._cdata, tensor) if of_others else tensor
        return found

    @torch.inference_mode(False)
    def _make(self, name: str, old: Tensor | None, quantizer: Quantizer, device: torch.device | None) -> Tensor:
        shape, initial = quantizer.state_shapes(self.num_scales)[name]
        if taping.tape is not None:  # a repetition would change the operation's tensors, and make none
            taping.tape.repeatable = False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self.operation).__name__} has no {self.prefix + name} yet, and what a graph makes while it is "
                "captured, each replay makes anew. Run forward and backward once under the recipe before the capture."
            )
        new = torch.full(shape, initial, dtype=torch.float32, device=device or (None if old is None else old.device))
        if old is not None and not old.is_meta:
            if old.shape != new.shape and not self._differs_in_length(old, new, name, quantizer):
                raise ValueError(
                    f"{type(self.operation).__name__} has {self.prefix + name} of shape {list(old.shape)}, but "
                    f"{list(shape)} is needed. Load the state of an operation with as many groups."
                )
            kept = min(len(old), len(new))  # a history of another length is cut, or goes on with zeros
            new[:kept] = old[:kept]
        self.operation.register_buffer(self.prefix + name, new)
        # past its __setattr__, which would count it as a setting
        vars(self.operation)["state_beginnings"] = {**self.operation.state_beginnings, self.prefix + name: initial}
        return new

    def _differs_in_length(self, old: Tensor, new: Tensor, name: str, quantizer: Quantizer) -> bool:
        """Whether these are histories of two lengths, of as many groups: the first dimension is not that of groups."""
        of_more, _ = quantizer.state_shapes(self.num_scales + 1)[name]
        return old.dim() == new.dim() and old.shape[1:] == new.shape[1:] and new.shape[:1] == of_more[:1]


class HeldState:
    """The state that an operation holds for one role, by which a step ends that recorded an amax there.

    It keeps the dictionary of the operation's buffers, not the operation.
    """

    def __init__(self, operation: nn.Module, role: Role, quantizer: Quantizer, num_scales: int) -> None:
        self.role = role.value
        self._buffers = operation._buffers
        shapes = quantizer.state_shapes(num_scales)
        self._initial = {name: (f"quantizer_{role.value}_{name}", *about) for name, about in shapes.items()}

    def tensors(
        self, quantizer: Quantizer, device: torch.device | None, names: Iterable[str] | None = None
    ) -> Mapping[str, Tensor]:
        """By name, as they are there; one that was removed since the cast is as at its beginning."""
        found: dict[str, Tensor] = {}
        for name in self._initial if names is None else names:
            of_buffer, shape, initial = self._initial[name]
            tensor = self._buffers.get(of_buffer)
            found[name] = torch.full(shape, initial) if tensor is None else tensor
        return found


def state_names(recipe: Recipe) -> frozenset[str]:
    """The names of all states that operations may have under this recipe."""
    quantizers = {role: recipe.quantizer(role) for role in Role}
    return frozenset(
        f"quantizer_{role.value}_{name}"
        for role, quantizer in quantizers.items()
        if quantizer is not None and quantizer.keeps_state
        for name in quantizer.state_shapes(1)
    )


def kinds_of(buffers: Mapping[str, Tensor | None]) -> tuple[str | bool, ...]:
    """By which a repeated step knows an operation's buffers, besides how they lie: which they are, in which order, and
    which of them, made under inference mode, are to be made anew."""
    return (*buffers, *[tensor is not None and tensor.is_inference() for tensor in buffers.values()])


def held_names(buffers: Mapping[str, Any]) -> Iterator[str]:
    """Those of these names that are of quantizers' states."""
    return (name for name in buffers if name.startswith(_PREFIXES))


def _is_ready(tensor: Tensor, shape: tuple[int, ...], device: torch.device | None) -> bool:
    return (
        tensor.shape == shape
        and (device is None or tensor.device == device)
        and tensor.dtype == torch.float32
        and not tensor.is_inference()
    )


@torch.inference_mode(False)
def prepare_loading(operation: nn.Module, state_dict: Mapping[str, Any], prefix: str, names: Sequence[str]) -> None:
    """Make the operation's state buffers those that `state_dict` holds under `prefix`, with their values: weights that
    are held quantized are written with the scale that comes with them, and torch loads buffers last.

    names: the operation's parameters. Where the state dict has all of them, the states that it lacks begin anew; where
    it has a part, they stay, as all that is absent. Those of weights begin anew with any weight.
    """
    given = [name for name in names if prefix + name in state_dict]
    has_weight = any("weight" in name for name in given)
    for name in list(held_names(operation._buffers)):
        begins_anew = len(given) == len(names) or (has_weight and name.startswith(f"quantizer_{Role.WEIGHT.value}_"))
        if begins_anew and prefix + name not in state_dict:
            del operation._buffers[name]
    for key, value in state_dict.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name.startswith(_PREFIXES):
            mine = operation._buffers.get(name)
            if mine is None or mine.shape != value.shape:
                device = next((p.device for p in operation.parameters()), value.device)
                mine = torch.empty(value.shape, dtype=torch.float32, device=device)
                operation.register_buffer(name, mine)
            if not value.is_meta and not mine.is_inference():
                mine.detach().copy_(value)


def leave_extra_state(state_dict: dict[str, Any], prefix: str) -> None:
    """Take out what TransformerEngine's modules and operations keep beside their weights: mostly nothing, and with a
    warning its scales and amaxes."""
    key = prefix + "_extra_state"
    if key not in state_dict:
        return
    value = state_dict.pop(key)
    size = value.numel() if isinstance(value, Tensor) else len(value.getvalue()) if isinstance(value, BytesIO) else 1
    if value is not None and size:
        warnings.warn(
            f"{key!r} of the state dict is not loaded: the scales and amaxes that TransformerEngine keeps for a "
            "recipe. Delayed scaling begins anew; other recipes keep none.",
            stacklevel=2,
        )


def apply_to_state(operation: Any, apply: Callable[[], Any]) -> None:
    """Run `apply`, which converts all of the operation's tensors; the state goes to their device, but stays float32.

    Of what comes from the meta device, which has no numbers, the state is back at its beginning.
    """
    states = {name: operation._buffers[name] for name in held_names(operation._buffers)}
    apply()
    for name, before in states.items():
        after = operation._buffers[name]
        if before is None or after is None:
            continue
        if after.is_meta:
            operation._buffers[name] = torch.empty_like(before, dtype=torch.float32, device=after.device)
        elif not before.is_meta:
            operation._buffers[name] = before.to(after.device)
        elif name in operation.state_beginnings:
            begin = operation.state_beginnings[name]
            operation._buffers[name] = torch.full_like(before, begin, dtype=torch.float32, device=after.device)
        else:  # it came from a state dict: its next use makes it
            del operation._buffers[name]
