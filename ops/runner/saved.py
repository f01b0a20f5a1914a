"""How an operation's `Saved` travels from forward to backward: as plain tensors, through `save_for_backward`.

So saved-tensor hooks, offloading and checkpointing see every tensor, and nothing else keeps one alive.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

Spec = Any  # None, or (class, first and last position, [(field, rebuild, number of tensors)])


def flatten(saved: Any, flat: list[Tensor | None]) -> Spec:
    """Append the tensors of `saved` to flat; return what `unflatten` needs to put them back."""
    if saved is None:
        return None
    if not isinstance(saved, tuple) or not hasattr(saved, "_fields"):
        raise TypeError(f"ctx.saved is a {type(saved).__name__}. Give a NamedTuple of tensors, None, or containers.")
    begin = len(flat)
    containers: list[tuple[int, Any, int]] = []
    for position, field in enumerate(saved):
        if field is None or isinstance(field, Tensor):
            flat.append(field)
        elif not hasattr(field, "tensors") or not hasattr(field, "rebuild"):
            raise TypeError(
                f"{type(saved).__name__}.{saved._fields[position]} is a {type(field).__name__}. Saved holds tensors, "
                "None, or containers with tensors() and rebuild(); put numbers on ctx."
            )
        else:
            tensors = field.tensors()
            empty = field.rebuild([None] * len(tensors))  # it must not keep the tensors alive
            containers.append((position, empty.rebuild, len(tensors)))
            flat.extend(tensors)
    return type(saved), begin, len(flat), containers


def unflatten(spec: Spec, flat: list[Tensor | None]) -> Any:
    """The inverse of `flatten`. The entries of flat are given up, so that nothing else keeps the tensors alive."""
    if spec is None:
        return None
    kind, begin, end, containers = spec
    fields: list[Any] = flat[begin:end]
    flat[begin:end] = [None] * (end - begin)
    for position, rebuild, count in containers:
        fields[position : position + count] = [rebuild(fields[position : position + count])]
    return kind(*fields)
