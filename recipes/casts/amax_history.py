"""The end of a step of delayed scaling: amaxes enter the history, scales follow from it.

    last  = history[0]                          the maximum |x| of this step, in the open slot
    amax  = max over history without NaN        "max" (0 if all are NaN), or `last` ("most_recent")
    scale = fl(fl(largest * 2^-margin) / amax)  the largest float32 where the quotient is Inf; unchanged if amax is 0,
                                                Inf or NaN
    history rolls by one, `last` to its end, and the open slot is 0 again

Where `last` is 0 (a group without rows) neither scale nor history changes: amaxes 8, 0.25 and 0 under a history of 2
and "max" give the scales 56, 56 and 56 (largest 448). A NaN rolls in as any other number; an Inf keeps the scale until
it has left the history. With L = 1 both algorithms are equal.

A function in place of an algorithm is called on the whole history at the end of every step, and its result is what
amax is; a function in place of the formula gets amax and returns the scales. Neither is overruled where `last` is 0,
as in TransformerEngine.

history: [L, n] float32, scale: [n] float32, both changed in place; no read of the device from the host. Each of the n
columns is a tensor of its own. Source: TransformerEngine's DelayedScaling (read at d0067d0).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.triton.gates import tl, triton
from recipes.triton.launch import Launch, cdiv, launcher, next_power_of_2
from recipes.triton.replay import Replays, is_eager
from recipes.triton.tape import taping

FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
COLUMNS = 16  # of a program
STATES = 16  # that a launch takes at most


@torch.no_grad()
def end_step_ref(
    history: Tensor,
    scale: Tensor,
    largest: float,
    amax_algorithm: str | Callable[[Tensor], Tensor],
    scale_from_amax: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """`end_step` in plain torch."""
    last = history[0].clone()
    if callable(amax_algorithm):
        amax = amax_algorithm(history)
    elif amax_algorithm == "max":
        amax = history.masked_fill(history.isnan(), 0.0).amax(0)
    else:
        amax = last
    if scale_from_amax is not None:
        new = scale_from_amax(amax, scale)
    else:
        quotient = (torch.full_like(amax, largest) / amax).clamp(max=FLOAT32_MAX.value)
        usable = (amax > 0) & (amax < torch.inf)
        if not callable(amax_algorithm):
            usable &= last != 0
        new = torch.where(usable, quotient, scale)
    scale.copy_(new)
    rolled = history.roll(-1, 0)
    rolled[0].zero_()
    history.copy_(torch.where(last != 0, rolled, history))


@triton.jit(do_not_specialize=["length", "num_scales"])
def end_step_kernel(
    histories, scales, length, num_scales,
    LARGEST: tl.constexpr, MOST_RECENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of several states alike, one along the second axis of programs."""
    history_ptr, scale_ptr = histories[0], scales[0]
    for state in tl.static_range(1, len(histories)):
        if tl.program_id(1) == state:
            history_ptr, scale_ptr = histories[state], scales[state]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < num_scales
    offs_r = tl.arange(0, ROWS)
    last = tl.load(history_ptr + column, mask=valid, other=0.0)
    amax = last
    if not MOST_RECENT:
        amax = tl.where(last == last, last, 0.0)
        for start in range(1, length, ROWS):
            row = start + offs_r
            inside = (row < length)[:, None] & valid[None, :]
            amaxes = tl.load(
                history_ptr + row.to(tl.int64)[:, None] * num_scales + column[None, :], mask=inside, other=0
            )
            amax = tl.maximum(amax, tl.max(tl.where(amaxes == amaxes, amaxes, 0.0), axis=0))
    usable = (amax > 0) & (amax < float("inf")) & (last != 0)
    quotient = tl.div_rn(tl.full([COLUMNS], LARGEST, tl.float32), tl.where(usable, amax, 1.0))
    tl.store(scale_ptr + column, tl.minimum(quotient, FLOAT32_MAX), mask=valid & usable)
    for start in range(0, length, ROWS):
        row = start + offs_r
        at = history_ptr + row.to(tl.int64)[:, None] * num_scales + column[None, :]
        following = tl.load(at + num_scales, mask=(row + 1 < length)[:, None] & valid[None, :], other=0.0)
        rolled = tl.where((row == 0)[:, None], 0.0, tl.where((row == length - 1)[:, None], last[None, :], following))
        tl.debug_barrier()  # a row is read by threads other than those that write it
        tl.store(at, rolled, mask=(row < length)[:, None] & (valid & (last != 0))[None, :])
        tl.debug_barrier()


class EndOfStep(NamedTuple):
    """The arguments of `end_step` for one state.

    largest: of the format, with the margin. A function gets history, or amax and the old scale.
    """

    history: Tensor
    scale: Tensor
    largest: float
    amax_algorithm: str | Callable[[Tensor], Tensor]
    scale_from_amax: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def calls_function(self) -> bool:
        return self.scale_from_amax is not None or callable(self.amax_algorithm)


def end_steps(ends: Sequence[EndOfStep]) -> None:
    """The update above for each state, on a GPU by one kernel for those alike if they call no function.

    Those on a GPU are repeated together (`recipes.triton.replay`) by what the kernel depends on.
    """
    on_gpu: list[EndOfStep] = []
    key: list[Any] = []
    tensors: list[Tensor] = []
    for end in ends:
        history, scale, largest, algorithm, scale_from_amax = end
        if not history.is_cuda or scale_from_amax is not None or callable(algorithm):
            end_step_ref(*end)
            continue
        on_gpu.append(end)
        key.append((history.shape, history.get_device(), largest, algorithm))
        tensors += history, scale
    if taping.inside or not is_eager():
        _end_on_gpu(on_gpu)
    elif on_gpu:
        addresses = [tensor.data_ptr() for tensor in tensors]
        key += [address % 16 for address in addresses]
        _ends_on_gpu.run(tuple(key), tensors, addresses, partial(_end_on_gpu, on_gpu))


def _end_on_gpu(ends: Sequence[EndOfStep]) -> None:
    alike: dict[Any, list[EndOfStep]] = {}
    for end in ends:
        kind = end.history.shape, end.history.get_device(), end.largest, end.amax_algorithm == "most_recent"
        alike.setdefault(kind, []).append(end)
    for (_, _, largest, most_recent), states in alike.items():
        for begin in range(0, len(states), STATES):
            histories, scales, *_ = zip(*states[begin : begin + STATES], strict=True)
            end_step_triton(histories, scales, largest, most_recent)


_ends_on_gpu = Replays(_end_on_gpu)
_end_step = Launch(end_step_kernel)


@launcher("fuser::end_step_of_delayed_scaling", mutates=["histories", "scales"])
def end_step_triton(histories: Sequence[Tensor], scales: Sequence[Tensor], largest: float, most_recent: bool) -> None:
    """Launches the kernel, for up to STATES states. Histories [L, n] are of one shape; they and scales [n] are
    contiguous."""
    length, num_scales = histories[0].shape
    # To a power of two, so that few kernels are compiled; there are no programs for those added.
    added = next_power_of_2(len(histories)) - len(histories)
    _end_step(
        histories[0], (cdiv(num_scales, COLUMNS), len(histories)),
        *((*tensors, *tensors[:1] * added) for tensors in (tuple(histories), tuple(scales))), length, num_scales,
        LARGEST=largest, MOST_RECENT=most_recent, ROWS=min(256, next_power_of_2(length)), COLUMNS=COLUMNS,
    )  # fmt: skip
