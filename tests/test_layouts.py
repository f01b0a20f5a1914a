"""Layouts that are compared by one call differ wherever what is repeated would."""

import pytest
import torch
from torch import nn

from recipes.triton import layouts
from recipes.triton.layouts import Layouts


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(4, 8), nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)), torch.zeros(2, 8).t()]


def layouts_of(given: list[torch.Tensor]) -> Layouts:
    return Layouts(given, [tensor.data_ptr() for tensor in given])


def inference(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(*shape)


def test_tensors_that_lie_alike_have_their_addresses():
    known = layouts_of(tensors())
    others = tensors()
    assert known.addresses(others) == [tensor.data_ptr() for tensor in others]
    with torch.no_grad():
        assert known.addresses(others) is not None


@pytest.mark.parametrize(
    ("at", "other"),
    [
        pytest.param(0, torch.zeros(8, 4), id="shape"),
        pytest.param(0, torch.zeros(32), id="dimensions"),
        pytest.param(0, torch.zeros(4, 8, dtype=torch.int32), id="dtype"),
        pytest.param(0, torch.zeros(8, 4).t(), id="strides"),
        pytest.param(0, torch.zeros(4, 8).requires_grad_(), id="requires_grad"),
        pytest.param(0, nn.Parameter(torch.zeros(4, 8), requires_grad=False), id="class"),
        pytest.param(0, torch.zeros(4, 8, device="meta"), id="device"),
        pytest.param(0, torch.zeros(36)[1:33].view(4, 8), id="address"),
        pytest.param(0, torch.zeros(4, 8).to_sparse(), id="sparse"),
        pytest.param(0, inference(4, 8), id="inference"),
        pytest.param(0, torch.zeros(4, 8, dtype=torch.complex64).conj().imag, id="negative"),
        pytest.param(0, torch._neg_view(torch.zeros(4, 8)), id="negative, of the same strides"),
        pytest.param(0, torch._efficientzerotensor((4, 8)), id="zeros without memory"),
        pytest.param(0, None, id="nothing"),
        pytest.param(1, torch.zeros(3, dtype=torch.bfloat16), id="no parameter"),
        pytest.param(1, nn.Parameter(torch.zeros(3)), id="dtype of a parameter"),
        pytest.param(2, torch.zeros(8, 2), id="contiguous"),
    ],
)
def test_a_tensor_that_lies_in_another_way_is_seen(at, other):
    known = layouts_of(tensors())
    others = tensors()
    others[at] = other
    assert known.addresses(others) is None


def test_states_of_inference_mode_are_told_within_it_too():
    with torch.inference_mode():
        known = layouts_of([torch.zeros(4)])
    assert known.addresses([torch.zeros(4)]) is None
    ordinary = torch.zeros(4)
    with torch.inference_mode():
        assert known.addresses([ordinary]) is None
        assert layouts_of([ordinary]).addresses([torch.zeros(4)]) is None


def test_a_change_in_place_is_seen():
    (given, *_) = some = tensors()
    known = layouts_of(some)
    given.data = torch.zeros(4, 9)
    assert known.addresses(some) is None
    given.data = torch.zeros(4, 8)
    assert known.addresses(some) is not None


def test_a_tensor_given_twice_is_left_to_how():
    some = [torch.zeros(4), torch.zeros(4)]
    assert layouts_of(some).addresses([some[0], some[0]]) is None
    assert layouts_of(some).addresses([*some, some[0]]) is None
    assert layouts_of(some).addresses(some[:1]) is None


def test_without_guards_of_torch_nothing_is_alike(monkeypatch):
    monkeypatch.setattr(layouts, "_guards", None)
    assert layouts_of(tensors()).addresses(tensors()) is None
