"""Casts of each quantizing recipe, for a model's grouped activations [R, H] and its FC1 weights [E, 2F, H].

Bytes: bf16 read once, codes and scales written. Before a cast is timed, its copies are dequantized and compared with
the input, except copies of rotated rows (random Hadamard transform), whose products the other suites compare with fp32.
"""

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from bench.bench_casts import check_cast, written_bytes
from bench.grouped_case import GroupedCase, expert_linear
from bench.schedule import recipe_named
from bench.suites.cases import DEVICE, QUANTIZING, SUITE_SHAPES, Measure
from recipes import GroupedTensor, QuantizedTensor, Role, Splits

COPIES = {"rowwise": (True, False), "both": (True, True)}


@lru_cache(maxsize=1)
def case_of(model: str) -> GroupedCase:
    return expert_linear(SUITE_SHAPES[model], device=DEVICE)


@pytest.mark.parametrize("label", QUANTIZING)
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("model", SUITE_SHAPES)
def test_cast_activations(model: str, copies: str, label: str, measure: Measure) -> None:
    case, (rowwise, columnwise) = case_of(model), COPIES[copies]
    x = case.inputs["x"].detach()
    splits = Splits.make(torch.tensor(case.sizes, device=DEVICE), rows=case.rows, device=x.device)
    quantizer = recipe_named(label).quantizer(Role.INPUT)
    assert quantizer is not None, "only such recipes are here"
    time_cast(
        lambda: quantizer.quantize_grouped(x, splits, rowwise=rowwise, columnwise=columnwise),
        x, splits, label, f"cast of activations, {model}, {copies}", measure,
    )  # fmt: skip


@pytest.mark.parametrize("label", QUANTIZING)
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("model", SUITE_SHAPES)
def test_cast_weights(model: str, copies: str, label: str, measure: Measure) -> None:
    (weight,), (rowwise, columnwise) = case_of(model).weights, COPIES[copies]
    w = weight.detach()
    quantizer = recipe_named(label).quantizer(Role.WEIGHT)
    assert quantizer is not None, "only such recipes are here"
    time_cast(
        lambda: quantizer.quantize_stacked(w, rowwise=rowwise, columnwise=columnwise),
        w, None, label, f"cast of weights, {model}, {copies}", measure,
    )  # fmt: skip


def time_cast(
    cast: Callable[[], GroupedTensor | QuantizedTensor],
    given: Tensor, splits: Splits | None, label: str, group: str, measure: Measure,
) -> None:  # fmt: skip
    """Check the copies that can be compared, and time the cast."""
    quantized = cast()
    check_cast(quantized, given, splits, label)
    measure(cast, group, num_bytes=given.nbytes + written_bytes(quantized, splits))
