"""DelayedScaling: FP8 with the scales that the amaxes of earlier steps gave.

The cast reads its input once: the scale is known before, and this step's amax is found on the way. What is kept from
step to step are two buffers for each role on the operation that quantizes, one column for each tensor (for each group
of a grouped operation); see `recipes/casts/amax_history.py` for the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.amax_reduction import check_group
from recipes.casts.amax_history import EndOfStep
from recipes.casts.scale_rules import GivenScale
from recipes.current_scaling import per_tensor
from recipes.pending import PendingUpdates
from recipes.recipe import Recipe, Role
from recipes.stack import scale_in_use
from recipes.tensors.formats import Float8Format, Format, ScaleSpec
from recipes.tensors.quantizer import Quantizer, StateOfRole, StateShapes, check_form
from recipes.tensors.spec_quantizer import SpecQuantizer
from recipes.triton.copies import copied

_SCALE = ("scale",)


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with per-tensor scales from the amaxes of earlier steps. A step: see `recipes/pending.py`.

    margin: scales leave headroom for 2^margin times the largest amax
    fp8_format: HYBRID is E4M3 forward and E5M2 for gradients
    amax_history_len: how many steps a scale looks back
    amax_compute_algo: "max" over the history, "most_recent", or a function of the history [L, n] that gives [n]; its
                       first row is this step
    scaling_factor_compute_algo: a function of (amax [n], old scale [n], largest number of the format, recipe) that
                       gives the scales [n]; None for the formula
    reduce_amax: take the maximum of amaxes over the processes of a group
    amax_reduction_group: that group; None: the one that the outermost autocast names, or else all processes. Recipes
                          are equal if they name the same group. One that names a group is not written down.
    split_accumulator_*: whether native FP8 products promote partial sums to float32, product by product

    Values above 448 (57344) over the scale saturate. Only calls with gradients on record amaxes: evaluation leaves the
    state alone.

    Raises ValueError for a margin beyond +-126, a history without rows or an unknown algorithm, TypeError for a
    scaling_factor_compute_algo that is no function.
    """

    names: ClassVar[tuple[str, ...]] = ("fp8_delayed",)
    repeatable: ClassVar[bool] = True

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, float, Any], Tensor] | None = None
    reduce_amax: bool = True
    split_accumulator_fprop: bool = False
    split_accumulator_dgrad: bool = True
    split_accumulator_wgrad: bool = True
    amax_reduction_group: dist.ProcessGroup | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -126 <= self.margin <= 126:
            raise ValueError(f"margin is {self.margin}, but 2^margin must be a float32 number: from -126 to 126.")
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len is {self.amax_history_len}, but must be at least 1.")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f'amax_compute_algo is {self.amax_compute_algo!r}, but must be "max", "most_recent" or a function.'
            )
        custom = self.scaling_factor_compute_algo
        if custom is not None and not callable(custom):
            raise TypeError(f"scaling_factor_compute_algo is {custom!r}, but must be a function or None.")

        check_group("amax_reduction_group", self.amax_reduction_group)

    def to_dict(self) -> dict[str, Any]:
        if self.amax_reduction_group is not None:
            raise ValueError(
                "amax_reduction_group is a process group, which cannot be written down. Write down "
                "dataclasses.replace(recipe, amax_reduction_group=None), and name the group again where it is read."
            )
        return super().to_dict()

    def amax_reduction_groups(self, default: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, ...]:
        if not self.reduce_amax:
            return ()
        return (default if self.amax_reduction_group is None else self.amax_reduction_group,)

    def quantizer(self, role: Role) -> DelayedScalingQuantizer:
        return DelayedScalingQuantizer(
            self.fp8_format.backward if role is Role.GRAD_OUTPUT else self.fp8_format.forward, self
        )


@dataclass(frozen=True)
class DelayedScalingQuantizer(SpecQuantizer):
    """Casts with the scales of its state, [n], and records amaxes in the open slot of its history, [L, n].

    Without a state (`bound`) every scale is 1 and nothing is recorded.
    """

    keeps_state: ClassVar[bool] = True

    form: Float8Format
    recipe: DelayedScaling
    source: StateOfRole | None = None
    updates: PendingUpdates | None = None
    scale: Tensor | None = None  # in place of the state's
    groups: slice | None = None

    def __post_init__(self) -> None:
        check_form(self.form)

    @property
    def reduce_amax(self) -> bool:
        return self.recipe.reduce_amax

    @property
    def amax_reduction_group(self) -> dist.ProcessGroup | None:
        return self.recipe.amax_reduction_group

    @property
    def role(self) -> str:
        assert self.source is not None, "only a bound quantizer records an amax"
        return self.source.role

    @property
    def amax(self) -> Tensor:
        """[n] float32: the open slot, a view."""
        return self._state()["amax_history"][0]

    def state_shapes(self, num_scales: int) -> StateShapes:
        return {"amax_history": ((self.recipe.amax_history_len, num_scales), 0.0), "scale": ((num_scales,), 1.0)}

    def bound(self, source: StateOfRole | None, updates: PendingUpdates | None, scale: Tensor | None) -> Quantizer:
        return self._but(source=source, updates=updates, scale=scale)

    def for_group(self, group: int) -> Quantizer:
        return self._but(groups=slice(group, group + 1))

    def for_groups(self, groups: range) -> Quantizer:
        return self._but(groups=slice(groups.start, groups.stop))

    def _but(self, **changes: Any) -> DelayedScalingQuantizer:
        """The same but for these fields, which need no check: `dataclasses.replace` takes longer."""
        other = object.__new__(DelayedScalingQuantizer)
        other.__dict__.update(self.__dict__, **changes)
        return other

    def snapshot(self, device: torch.device) -> Tensor | None:
        return copied(self._scale(device))

    def note_cast_with(self, snapshot: Tensor | None) -> None:
        assert self.source is not None and snapshot is not None, "only the operation that holds the state cast before"
        scale_in_use(self.source.tensors(self, snapshot.device, _SCALE)["scale"].untyped_storage()._cdata, snapshot)

    def note_codes_of_state(self) -> None:
        if self.updates is not None and self.source is not None:
            self.updates.add(self, self.source.tensors(self, None)["amax_history"], before=True)

    def end_of_step(self) -> EndOfStep:
        """How, as the step is over, its amaxes enter the history, and the scales follow."""
        state = self._state()
        return EndOfStep(state["amax_history"], state["scale"], *self._rule)

    @cached_property
    def _rule(self) -> tuple[Any, ...]:
        recipe, largest = self.recipe, self.form.max
        custom = recipe.scaling_factor_compute_algo
        return (
            largest * 2.0**-recipe.margin, recipe.amax_compute_algo,
            None if custom is None else lambda amax, scale: custom(amax, scale, largest, recipe),
        )  # fmt: skip

    @property
    def spec(self) -> ScaleSpec:
        return per_tensor(self.form, GivenScale())

    @property
    def kernel_spec(self) -> ScaleSpec:
        return self.spec

    def scale_and_amax(self, device: torch.device, num_scales: int) -> tuple[Tensor, Tensor | None]:
        """The scales [n] and, if amaxes are recorded, where they go [n]."""
        if self.source is None and self.scale is None:
            return torch.ones(num_scales, device=device), None
        scale = self._scale(device)
        amax = None
        if self.updates is not None and self.source is not None:
            history = self.source.tensors(self, device)["amax_history"]
            self.updates.add(self, history)
            amax = history[0]
        if self.groups is not None:
            scale = scale[self.groups]
            amax = None if amax is None else amax[self.groups]
        if len(scale) != num_scales:
            raise ValueError(
                f"there are scales for {len(scale)} tensors, but {num_scales} are quantized. An operation's delayed "
                "scales belong to its own groups."
            )
        return scale, amax

    def _scale(self, device: torch.device) -> Tensor:
        if self.scale is not None:
            return self.scale
        assert self.source is not None, "an unbound quantizer has no state to ask for"
        scale = self.source.tensors(self, device, _SCALE)["scale"]  # an evaluation changes nothing else
        return scale_in_use(scale.untyped_storage()._cdata, scale)

    def _state(self) -> Mapping[str, Tensor]:
        assert self.source is not None, "only a bound quantizer records an amax"
        return self.source.tensors(self, None)
