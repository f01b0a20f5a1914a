"""What takes and makes extra tensors by name: operations, and modules of the user's that stand between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self


class NamedExtras:
    """extra_inputs, extra_outputs: name -> kind of the extra tensors that it takes and makes.

    Kinds: `torch.Tensor` (carries a gradient), `IndexTensor`, `Splits`, or another container class (these do not). An
    instance may have its own; `rename_extras` changes the names that they have in its Sequential.
    """

    extra_inputs: Mapping[str, type] = {}
    extra_outputs: Mapping[str, type] = {}
    _names: Mapping[str, str] = {}

    def extra_name(self, name: str) -> str:
        """The name that its extra tensor `name` has in the Sequential."""
        return self._names.get(name, name)

    def rename_extras(self, **names: str) -> Self:
        """Consume or produce extra tensors under other names: `rename_extras(split_sizes="splits_b")`.

        Raises ValueError for a name that it does not have.
        """
        known = {**self.extra_inputs, **self.extra_outputs}
        for name in names:
            if name not in known:
                raise ValueError(
                    f"{type(self).__name__} has no extra tensor {name!r}. "
                    f"It has: {', '.join(map(repr, known)) or 'none'}."
                )
        self._names = {**self._names, **names}
        return self
