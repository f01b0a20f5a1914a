"""Codes and scales that a caller reads: in the natural order, of one tensor of several, of either copy alone."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedTensor,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Recipe,
    Role,
    ScaledCodes,
    Splits,
    as_recipe,
)
from recipes.casts.hadamard import hadamard_ref
from recipes.casts.nvfp4_alpha import alpha_from_amax
from recipes.mixed import MixedScaling
from recipes.tensors.formats import E2M1, E2M1_VALUES

RECIPES = [
    DelayedScaling(),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    MXFP8BlockScaling(),
    MXFP8BlockScaling(enable_2d_quantization=True),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
    NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, row_scaled_activation=True),
    MixedScaling(input="mxfp8", weight="fp8_block"),
]
EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
EACH_ROLE = pytest.mark.parametrize("role", [Role.INPUT, Role.WEIGHT], ids=lambda role: role.value)
SPLITS = st.lists(
    st.one_of(st.just(0), st.integers(1, 40), st.sampled_from([16, 32, 128, 130])), min_size=1, max_size=5
)


def values_by_formula(copy: ScaledCodes, splits: Splits | None = None, columnwise: bool = False) -> Tensor:
    """decode(code) * scale of its block * alpha, from what `natural` gives, without the layout's code."""
    codes, scale, (rows, columns), amax = copy.natural(splits)
    if copy.spec.element == E2M1:
        assert codes.max() < 16
        table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
        values = table[codes.long()]
    else:
        values = codes.to(torch.float32)
    factor = copy.spec.scale_rule.values(scale)
    *_, num_rows, num_columns = values.shape
    for axis, block, size in ((-2, rows, num_rows), (-1, columns, num_columns)):
        factor = factor.repeat_interleave(block or size, axis).narrow(axis, 0, size) if block != 1 else factor
    values = values * factor
    if amax is None:
        return values
    alpha = alpha_from_amax(amax)
    if splits is not None and (columnwise or not getattr(copy.spec.scale_rule, "row_scaled", False)):
        group = splits.padded(16 if copy.transform else 1).group_of_row
        alpha = alpha.index_select(0, group.clamp(max=splits.num_groups - 1))
    alpha = alpha.reshape(alpha.shape + (1,) * (values.ndim - alpha.ndim))
    values = values * alpha
    return hadamard_ref(values, inverse=True) if copy.transform else values


def both(tensor: QuantizedTensor) -> Sequence[tuple[bool, ScaledCodes]]:
    assert tensor.rowwise is not None and tensor.columnwise is not None
    return (False, tensor.rowwise), (True, tensor.columnwise)


def random(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape) * torch.randn(*shape[:-1], 1).exp()


@EACH_ROLE
@EACH_RECIPE
@pytest.mark.parametrize("shape", [(130, 48), (33, 20), (300, 200)], ids=str)
def test_natural_codes_and_scales_give_the_values(recipe: Recipe, role: Role, shape: tuple[int, int]) -> None:
    x = random(*shape)
    made = recipe.quantizer(role).quantize(x, rowwise=True, columnwise=True)
    for columnwise, copy in both(made):
        assert made.natural(columnwise=columnwise).codes.shape[-1] == x.shape[-1]
        values = values_by_formula(copy)[: len(x)]
        assert torch.equal(values, made.dequantize(columnwise=columnwise))


@EACH_RECIPE
def test_natural_codes_and_scales_of_stacked_weights_give_the_values(recipe: Recipe) -> None:
    made = recipe.quantizer(Role.WEIGHT).quantize_stacked(random(3, 130, 48), rowwise=True, columnwise=True)
    for columnwise, copy in both(made):
        assert torch.equal(values_by_formula(copy), made.dequantize(columnwise=columnwise))


@EACH_RECIPE
@settings(max_examples=25, deadline=None)
@given(sizes=SPLITS, tail=st.sampled_from([0, 3]))
@example(sizes=[0, 2], tail=0)  # as many groups as rows
def test_natural_codes_and_scales_of_grouped_rows_give_the_values(recipe: Recipe, sizes: list[int], tail: int) -> None:
    x = random(max(sum(sizes) + tail, 1), 40)
    splits = Splits.make(sizes, rows=len(x), device="cpu")
    made = recipe.quantizer(Role.INPUT).quantize_grouped(x, splits, rowwise=True, columnwise=True)
    for columnwise, copy in ((False, made.rowwise), (True, made.columnwise)):
        values = values_by_formula(copy, splits, columnwise)
        if copy.transform:
            values = values.index_select(0, splits.row_in_padded(16))
        active = sum(sizes)
        assert torch.equal(values[:active], made.dequantize(columnwise=columnwise)[:active])


def same_tensors(one: QuantizedTensor, other: QuantizedTensor) -> None:
    assert one.shape == other.shape and one.dtype == other.dtype
    for mine, theirs in zip(one.tensors(), other.tensors(), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.shape == theirs.shape and mine.is_contiguous()
            assert torch.equal(mine.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8))


@pytest.mark.parametrize("shape", [(130, 48), (24, 33)], ids=str)
@EACH_RECIPE
def test_one_of_stacked_weights_is_what_quantizing_it_alone_gives(recipe: Recipe, shape: tuple[int, int]) -> None:
    w = random(3, *shape)
    quantizer = recipe.quantizer(Role.WEIGHT)
    stacked = quantizer.quantize_stacked(w, rowwise=True, columnwise=True)
    members = stacked.unbind()
    for member, each in zip(members, w, strict=True):
        same_tensors(member, quantizer.quantize(each, rowwise=True, columnwise=True))
    same_tensors(members[0].stacked(members[1:]), stacked)


@EACH_RECIPE
@settings(max_examples=25, deadline=None)
@given(sizes=SPLITS)
def test_the_rows_of_one_group_are_what_quantizing_them_alone_gives(recipe: Recipe, sizes: list[int]) -> None:
    x = random(sum(sizes) + 5, 40)
    quantizer = recipe.quantizer(Role.INPUT)
    splits = Splits.make(sizes, rows=len(x), device="cpu")
    grouped = quantizer.quantize_grouped(x, splits, rowwise=True, columnwise=True)
    for group, (member, part) in enumerate(zip(grouped.unbind(), x[: sum(sizes)].split(sizes), strict=True)):
        if len(part):
            same_tensors(member, quantizer.for_group(group).quantize(part, rowwise=True, columnwise=True))


def test_a_copy_that_was_not_made_cannot_be_read() -> None:
    made = as_recipe("mxfp8").quantizer(Role.INPUT).quantize(random(32, 32))
    for read in (made.dequantize, made.natural):
        with pytest.raises(RuntimeError, match="there is no columnwise copy. Quantize with columnwise=True"):
            read(columnwise=True)


def test_rows_in_high_precision_have_no_groups_of_codes() -> None:
    splits = Splits.make([2, 3], rows=5, device="cpu")

    with pytest.raises(RuntimeError, match="high precision"):
        GroupedTensor(torch.randn(5, 4), splits, None, None, torch.float32).unbind()
