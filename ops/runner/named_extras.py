"""What takes and makes extra tensors by name: operations, and modules of the user's that stand between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import UnionType
from typing import Any, Self, get_origin

import torch
from torch import Tensor


def _is_kind(kind: Any) -> bool:
    """Whether it is torch.Tensor, or a class that is none of tensors; list[int] is a list."""
    if kind is Tensor:
        return True
    kind = get_origin(kind) or kind
    if not isinstance(kind, type) or issubclass(kind, (Tensor, UnionType)):
        return False
    return not isinstance(kind, type(torch.FloatTensor))


class NamedExtras:
    """extra_inputs, extra_outputs: name -> kind of the extra tensors that it takes and makes.

    Kinds: `torch.Tensor` (carries a gradient), `IndexTensor`, `Splits`, or another container class (these do not). An
    instance may have its own; `rename_extras` changes the names that they have in its Sequential.

    weights_of_rows: of an extra output by which others sum the rows of y, the one that has a weight for each row. A
    Sequential warns where rows go through an activation (is_activation) and are summed, and nothing has read the
    weights.
    """

    extra_inputs: Mapping[str, type] = {}
    extra_outputs: Mapping[str, type] = {}
    weights_of_rows: Mapping[str, str] = {}
    is_activation = False
    _names: Mapping[str, str] = {}

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for declared in ("extra_inputs", "extra_outputs"):
            kinds = vars(cls).get(declared)
            if isinstance(kinds, Collection) and not isinstance(kinds, Mapping):
                raise TypeError(
                    f"{cls.__name__}.{declared} is {kinds!r}, but must have the kind of each by its name: "
                    "{'name': torch.Tensor}."
                )
            for name, kind in kinds.items() if isinstance(kinds, Mapping) else ():
                if not _is_kind(kind):
                    raise TypeError(
                        f"{cls.__name__}.{declared} has the kind {kind!r} for {name!r}. Give torch.Tensor, which has a "
                        "gradient, IndexTensor, Splits, or the class of another container."
                    )

    def check_extra_from(self, name: str, maker: NamedExtras) -> None:
        """Raise ValueError if its extra input `name`, which this one before it in the Sequential makes, does not go
        with it. A Sequential checks this when it is made."""

    def extra_name(self, name: str) -> str:
        """The name that its extra tensor `name` has in the Sequential."""
        return self._names.get(name, name)

    def rename_extras(self, **names: str) -> Self:
        """Consume or produce extra tensors under other names: `rename_extras(split_sizes="splits_b")`.

        Raises TypeError for a name that is no text, ValueError for an empty one and for an extra tensor that it does
        not have. Then no name is changed.
        """
        known = {**self.extra_inputs, **self.extra_outputs}
        for name, given in names.items():
            if not isinstance(given, str):
                raise TypeError(
                    f"{type(self).__name__}'s {name!r} is to be called {given!r}, but must be a text. Pass a str."
                )
            if not given:
                raise ValueError(
                    f"{type(self).__name__}'s {name!r} is to be called '', which is empty. Give the name by which its "
                    "Sequential is to know it."
                )
            if name not in known:
                raise ValueError(
                    f"{type(self).__name__} has no extra tensor {name!r}. "
                    f"It has: {', '.join(map(repr, known)) or 'none'}."
                )
        self._names = {**self._names, **names}
        return self
