"""The operations whose arguments have other names or another order in TransformerEngine.

What computes is the operation of the same name in `ops`; the formulas stand there. Arguments that are not explained
here have the meaning that they have there, or in TransformerEngine.

device: None is the current CUDA device, as in TransformerEngine; without one torch's default.
rng_state_tracker_function: gives the tracker in whose `fork()` parameters are initialised, as Megatron's
sm_margin, seq_length, micro_batch_size: hints to TransformerEngine's kernels, which change no number; they have no
    effect here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import ops
from fuser.te.counted import CountedExtras
from recipes.arguments import check_flags, positive_integers

Device = torch.device | str | None
Tracker = Callable[[], Any] | None


class Linear(ops.Linear):
    """y = x W^T + b; one operation, where TransformerEngine's dissolves into BasicLinear and Bias.

    tensor_parallel_mode, tensor_parallel_group: `tensor_parallel` and `group` of `ops.Linear`; the group counts with a
    mode only. The b of a row-parallel layer is added once, where TransformerEngine's ranks add one each.
    Raises NotImplementedError for userbuffers_options.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Tracker = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: Any = None,
    ) -> None:
        if userbuffers_options is not None:
            raise NotImplementedError("userbuffers_options: there are no Userbuffers here. Leave it out.")
        divided = tensor_parallel_mode is not None
        with _forked(rng_state_tracker_function):
            super().__init__(
                in_features, out_features, bias=bias, device=_device(device), dtype=dtype,
                accumulate_into_main_grad=accumulate_into_main_grad, tensor_parallel=tensor_parallel_mode,
                group=tensor_parallel_group if divided else None, sequence_parallel=sequence_parallel and divided,
            )  # fmt: skip


class BasicLinear(Linear):
    """y = x W^T: `Linear` without a bias, with its other arguments."""

    def __init__(self, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__(in_features, out_features, bias=False, **settings)


class GroupedLinear(CountedExtras, ops.GroupedLinear):
    """One linear layer for each group of rows. Extra inputs: split sizes, and scales with scale_bias.

    single_grouped_weight, single_grouped_bias: `stacked` and `stacked_bias` of `ops.GroupedLinear`
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Tracker = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        check_flags(scale_bias=scale_bias, bias=bias)
        with _forked(rng_state_tracker_function):
            super().__init__(
                num_groups, in_features, out_features, bias=bias, device=_device(device), dtype=dtype,
                scale_bias=scale_bias and bias, stacked=single_grouped_weight, stacked_bias=single_grouped_bias,
                accumulate_into_main_grad=accumulate_into_main_grad, delay_wgrad_compute=delay_wgrad_compute,
            )  # fmt: skip


class Bias(ops.Bias):
    """y = x + b. tensor_parallel: each rank of the group holds b of its share of `size` features."""

    def __init__(
        self,
        size: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        check_flags(tensor_parallel=tensor_parallel)
        (size,) = positive_integers("Bias", size=size)
        ranks = dist.get_world_size(tensor_parallel_group) if tensor_parallel else 1
        if size % ranks:
            raise ValueError(f"Bias got size={size}, which {ranks} ranks do not divide. Give a multiple of {ranks}.")
        super().__init__(size // ranks, device=_device(device), dtype=dtype)


class LayerNorm(ops.LayerNorm):
    """Layer normalization. sm_margin has no effect."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        device: Device = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__(
            normalized_shape, eps=eps, device=_device(device), dtype=dtype, zero_centered_gamma=zero_centered_gamma
        )


class RMSNorm(ops.RMSNorm):
    """Root mean square normalization. sm_margin has no effect."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        device: Device = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__(
            normalized_shape, eps=eps, device=_device(device), dtype=dtype, zero_centered_gamma=zero_centered_gamma
        )


class L2Normalization(ops.L2Normalization):
    """Normalization by the L2 norm. seq_length and micro_batch_size have no effect."""

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__(eps=eps)


class ScaledSwiGLU(CountedExtras, ops.ScaledSwiGLU):
    """SwiGLU times scales. Extra input: scales.

    activation_recompute_in_mlp: the fused grouped MLP recomputes the activation in any case
    """

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        check_flags(activation_recompute_in_mlp=activation_recompute_in_mlp)
        super().__init__(glu_interleave_size)


class ScaledSiTUGLU(CountedExtras, ops.ScaledSiTUGLU):
    """SiTUGLU times scales, as `ScaledSwiGLU`."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        check_flags(activation_recompute_in_mlp=activation_recompute_in_mlp)
        super().__init__(glu_interleave_size, beta1=beta1, beta2=beta2)


class ScaledClampedQGeGLU(CountedExtras, ops.ScaledClampedQGeGLU):
    """ClampedSwiGLU times scales, as `ScaledSwiGLU`."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        check_flags(activation_recompute_in_mlp=activation_recompute_in_mlp)
        super().__init__(glu_interleave_size, limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)


class ScaledSReLU(CountedExtras, ops.ScaledSReLU):
    """Squared ReLU times scales, as `ScaledSwiGLU`."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        check_flags(activation_recompute_in_mlp=activation_recompute_in_mlp)
        super().__init__()


class MakeExtraOutput(CountedExtras, ops.MakeExtraOutput):
    """y = x, and x as an extra output."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__(in_place=in_place)


class AddExtraInput(CountedExtras, ops.AddExtraInput):
    """y = x + extra input, in new memory: in_place=True changes no number, and the extra tensor stays as it is."""

    shares_tensor: ClassVar[bool] = False

    def __init__(self, *, in_place: bool = False) -> None:
        check_flags(in_place=in_place)
        super().__init__()


class AllGather(ops.AllGather):
    """The rows of all ranks of the group."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)


class ReduceScatter(ops.ReduceScatter):
    """This rank's rows of the sum over the group."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)


class AllReduce(ops.AllReduce):
    """The sum over the group. reduce_in_backward has no effect, as in TransformerEngine: dx = dy."""

    def __init__(self, process_group: Any, reduce_in_backward: bool = True) -> None:
        check_flags(reduce_in_backward=reduce_in_backward)
        super().__init__(process_group)


def _device(device: Device) -> Device:
    if device is None and torch.get_default_device().type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _forked(tracker: Tracker) -> AbstractContextManager[Any]:
    return nullcontext() if tracker is None else tracker().fork()
