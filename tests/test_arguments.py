"""What operations are made with: a wrong kind is a TypeError, a wrong value a ValueError, before memory is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fuser import ops

NAN, INF = float("nan"), float("inf")


class Index:
    """Stands for an integer, as torch.SymInt does."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


# operation, argument -> a call that gives the argument
INTEGERS: dict[str, Callable[[Any], Any]] = {
    "Linear in_features": lambda v: ops.Linear(v, 4),
    "Linear out_features": lambda v: ops.Linear(4, v),
    "GroupedLinear num_groups": lambda v: ops.GroupedLinear(v, 4, 4),
    "GroupedLinear in_features": lambda v: ops.GroupedLinear(2, v, 4),
    "GroupedLinear out_features": lambda v: ops.GroupedLinear(2, 4, v, stacked=False),
    "Bias size": lambda v: ops.Bias(v),
    "RMSNorm normalized_shape": lambda v: ops.RMSNorm(v),
    "LayerNorm normalized_shape": lambda v: ops.LayerNorm((2, v)),
    "Router hidden_size": lambda v: ops.Router(v, 8, 2),
    "Router num_experts": lambda v: ops.Router(8, v, 1),
    "Router topk": lambda v: ops.Router(8, 8, v),
    "Dispatch num_experts": lambda v: ops.Dispatch(v),
    "SwiGLU glu_interleave_size": lambda v: ops.SwiGLU(glu_interleave_size=v),
    "ScaledSwiGLU glu_interleave_size": lambda v: ops.ScaledSwiGLU(v),
    "ClampedSwiGLU glu_interleave_size": lambda v: ops.ClampedSwiGLU(glu_interleave_size=v),
    "ScaledClampedQGeGLU glu_interleave_size": lambda v: ops.ScaledClampedQGeGLU(v),
    "SiTUGLU glu_interleave_size": lambda v: ops.SiTUGLU(glu_interleave_size=v),
    "ScaledSiTUGLU glu_interleave_size": lambda v: ops.ScaledSiTUGLU(v),
}
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "RMSNorm eps": lambda v: ops.RMSNorm(4, eps=v),
    "LayerNorm eps": lambda v: ops.LayerNorm(4, eps=v),
    "L2Normalization eps": lambda v: ops.L2Normalization(eps=v),
    "ClampedSwiGLU limit": lambda v: ops.ClampedSwiGLU(limit=v),
    "ScaledClampedQGeGLU limit": lambda v: ops.ScaledClampedQGeGLU(limit=v),
    "SiTUGLU beta1": lambda v: ops.SiTUGLU(beta1=v),
    "ScaledSiTUGLU beta2": lambda v: ops.ScaledSiTUGLU(beta2=v),
}
ANY_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "ConstantScale scale": lambda v: ops.ConstantScale(v),
    "Dropout p": lambda v: ops.Dropout(v),
    "ClampedSwiGLU alpha": lambda v: ops.ClampedSwiGLU(alpha=v),
    "ScaledClampedQGeGLU glu_linear_offset": lambda v: ops.ScaledClampedQGeGLU(glu_linear_offset=v),
}
FLAGS: dict[str, Callable[[Any], Any]] = {
    "Linear bias": lambda v: ops.Linear(4, 4, bias=v),
    "Linear accumulate_into_main_grad": lambda v: ops.Linear(4, 4, accumulate_into_main_grad=v),
    "Linear as_one_group": lambda v: ops.Linear(4, 4, as_one_group=v),
    "Linear delay_wgrad_compute": lambda v: ops.Linear(4, 4, delay_wgrad_compute=v),
    "GroupedLinear bias": lambda v: ops.GroupedLinear(2, 4, 4, bias=v),
    "GroupedLinear scale_bias": lambda v: ops.GroupedLinear(2, 4, 4, scale_bias=v),
    "GroupedLinear stacked": lambda v: ops.GroupedLinear(2, 4, 4, stacked=v),
    "RMSNorm zero_centered_gamma": lambda v: ops.RMSNorm(4, zero_centered_gamma=v),
    "Router use_pre_softmax": lambda v: ops.Router(4, 4, 2, use_pre_softmax=v),
    "Router normalize_probs": lambda v: ops.Router(4, 4, 2, normalize_probs=v),
    "GELU cache_quantized_input": lambda v: ops.GELU(cache_quantized_input=v),
    "SwiGLU cache_quantized_input": lambda v: ops.SwiGLU(cache_quantized_input=v),
    "Quantize forward": lambda v: ops.Quantize(v),
    "Quantize backward": lambda v: ops.Quantize(backward=v),
    "MakeExtraOutput in_place": lambda v: ops.MakeExtraOutput(in_place=v),
    "AddExtraInput in_place": lambda v: ops.AddExtraInput(in_place=v),
}
DTYPES: dict[str, Callable[[Any], Any]] = {
    "Linear": lambda v: ops.Linear(4, 4, dtype=v),
    "GroupedLinear": lambda v: ops.GroupedLinear(2, 4, 4, dtype=v),
    "Bias": lambda v: ops.Bias(4, dtype=v),
    "LayerNorm": lambda v: ops.LayerNorm(4, dtype=v),
    "Router": lambda v: ops.Router(4, 4, 2, dtype=v),
}


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be allocated: an argument is refused before."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("it allocates before it has looked at its arguments")

    monkeypatch.setattr(torch, "empty", refuse)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", ["8", 8.0, 2.5, NAN, True, False, 8j, {8}, torch.tensor(8.0)], ids=repr)
def test_what_is_no_integer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name.split()[1]} is .*, but must be an integer. Pass an int"):
        INTEGERS[name](value)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [0, -1, np.int64(0)], ids=repr)
def test_a_size_that_is_not_positive_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="positive|between 1 and"):
        INTEGERS[name](value)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [np.int64(2), np.uint8(2), Index(2), torch.tensor(2)], ids=lambda v: type(v).__name__)
def test_what_stands_for_an_integer_is_one(name: str, value: Any) -> None:
    assert repr(INTEGERS[name](value)) == repr(INTEGERS[name](2))


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("name", [*NUMBERS, *ANY_NUMBERS])
@pytest.mark.parametrize("value", ["1", True, 1j, [1.0], torch.tensor(1.0)], ids=repr)
def test_what_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name.split()[1]} is .*, but must be a number. Pass a float"):
        (NUMBERS | ANY_NUMBERS)[name](value)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("name", [*NUMBERS, *ANY_NUMBERS])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 10**400])
def test_a_number_that_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="finite|from 0 to 1|more than a float holds"):
        (NUMBERS | ANY_NUMBERS)[name](value)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, 0.0, -1.0])
def test_a_number_that_is_not_positive_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name.split()[1]} is {value}, but must be .*(positive|above 0)"):
        NUMBERS[name](value)


@pytest.mark.parametrize("name", [*NUMBERS, *ANY_NUMBERS])
@pytest.mark.parametrize("value", [1, np.float32(1.0), np.int64(1)], ids=repr)
def test_any_real_number_is_taken(name: str, value: Any) -> None:
    make = (NUMBERS | ANY_NUMBERS)[name]
    assert repr(make(value)) == repr(make(1.0))


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["False", 0, 1, None], ids=repr)
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name.split()[1]} is .*, but must be True or False. Pass a bool"):
        FLAGS[name](value)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn, "float32", float], ids=str)
def test_parameters_are_real_numbers(name: str, dtype: Any) -> None:
    with pytest.raises(TypeError, match="dtype is .*, but parameters must be bfloat16, float16, float32 or float64"):
        DTYPES[name](dtype)


@pytest.mark.parametrize("shape", ["8", 8, None, {8: 1}, {8}], ids=repr)
def test_a_reshape_takes_a_sequence(shape: Any) -> None:
    with pytest.raises(TypeError, match="shape is .*, but must be a sequence of integers. Pass a tuple"):
        ops.Reshape(shape)


@pytest.mark.parametrize("shape", [(2.0, 4), ("2", 4), (True, 4), (2, NAN), ((2, 4),)], ids=repr)
def test_a_reshape_takes_integers(shape: Any) -> None:
    with pytest.raises(TypeError, match="a size of shape is .*, but must be an integer"):
        ops.Reshape(shape)


def test_a_reshape_takes_what_stands_for_integers() -> None:
    assert ops.Reshape([np.int64(2), Index(4), -1]).shape == (2, 4, -1)


@pytest.mark.parametrize("shape", [{4: 2}, {4}, None, (4, "2"), [], (4, 2.0)], ids=repr)
def test_a_normalized_shape_is_an_integer_or_a_sequence_of_them(shape: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="normalized_shape is .*, but (must be an integer|needs one)"):
        ops.RMSNorm(shape)


@pytest.mark.parametrize("make", [ops.MakeExtraOutput, ops.AddExtraInput])
def test_the_name_of_an_extra_tensor_is_a_text(make: Any) -> None:
    for name in (1, None, b"x"):
        with pytest.raises(TypeError, match="name is .*, but must be a text. Pass a str"):
            make(name)
