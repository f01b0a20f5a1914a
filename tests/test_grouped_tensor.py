"""GroupedTensor: quantizing all groups at once equals quantizing each alone, bit for bit, for any splits."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import Float8BlockScaling, Float8CurrentScaling, Format, GroupedTensor, MXFP8BlockScaling, Role, Splits
from recipes.tensors.scaled_codes import Dequantized

RECIPES = [
    Float8CurrentScaling(),
    Float8CurrentScaling(power_2_scale=True, amax_epsilon=1e-3),
    MXFP8BlockScaling(),
    MXFP8BlockScaling(Format.HYBRID),
    Float8BlockScaling(),
    Float8BlockScaling(Format.HYBRID, use_f32_scales=True, x_block_scaling_dim=2, w_block_scaling_dim=1),
]
PLAIN = [RECIPES[0], RECIPES[2], RECIPES[4]]
EACH_RECIPE = pytest.mark.parametrize("recipe", PLAIN, ids=lambda recipe: recipe.name)
POISON = [0.0, float("nan"), float("inf"), float("-inf"), 1e30]


@st.composite
def grouped_case(draw):
    """Sizes with empty groups and partial blocks, spare rows full of poison, widths that are multiples of nothing."""
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(0, 9), st.integers(30, 70)), min_size=1, max_size=6))
    rows = sum(sizes) + draw(st.sampled_from([0, 0, 1, 40]))
    width = draw(st.sampled_from([1, 7, 32, 33, 64]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    x *= torch.exp2(torch.arange(rows) % 23 - 11.0)[:, None]
    for value in draw(st.lists(st.sampled_from(POISON), max_size=3)):
        if rows:
            x[draw(st.integers(0, rows - 1)), draw(st.integers(0, width - 1))] = value
    x[sum(sizes) :] = draw(st.sampled_from(POISON))
    return x.to(dtype), sizes


def quantize(recipe, x, sizes, role=Role.INPUT):
    splits = Splits.make(sizes, rows=x.shape[0], device=x.device)
    return recipe.quantizer(role).quantize_grouped(x, splits, rowwise=True, columnwise=True)


def assert_same_bits(found, expected):
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scale_inv, expected.scale_inv)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("role", [Role.INPUT, Role.GRAD_OUTPUT], ids=lambda role: role.value)
@settings(max_examples=200)
@given(grouped_case())
def test_all_groups_at_once_equal_each_alone(recipe, role, case):
    x, sizes = case
    grouped = quantize(recipe, x, sizes, role)
    assert grouped.shape == x.shape and grouped.dtype == x.dtype
    values = {columnwise: grouped.operand(columnwise, torch.float32) for columnwise in (False, True)}
    dequantized = grouped.dequantize()
    start = 0
    for group, (size, view) in enumerate(zip(sizes, grouped.unbind(), strict=True)):
        rows = slice(start, start + size)
        alone = recipe.quantizer(role).quantize(x[rows], rowwise=True, columnwise=True)
        assert_same_bits(view.rowwise, alone.rowwise)
        assert_same_bits(view.columnwise, alone.columnwise)
        assert torch.equal(dequantized[rows].nan_to_num(), alone.dequantize().nan_to_num())
        assert torch.equal(view.dequantize().nan_to_num(), alone.dequantize().nan_to_num())
        for columnwise, operand in values.items():
            expected = alone.operand(columnwise, torch.float32)
            assert torch.equal(operand.values[rows].nan_to_num(), expected.values.nan_to_num())
            if operand.alpha is not None:
                assert operand.alpha[group] == expected.alpha
        start += size
    assert torch.equal(dequantized[start:], torch.zeros_like(x[start:]))
    for operand in values.values():
        assert torch.equal(operand.values[start:], torch.zeros(x[start:].shape))


@EACH_RECIPE
def test_an_empty_group_has_scale_one_or_no_block(recipe):
    grouped = quantize(recipe, torch.full((8, 32), 3.0), [3, 0, 5])
    empty = grouped.unbind()[1]
    assert empty.shape == (0, 32)
    if empty.operand(False, torch.float32).alpha is not None:
        assert empty.columnwise.scale_inv.item() == 1.0 and empty.columnwise.codes.shape == (32, 0)
    else:
        assert empty.columnwise.scale_inv.shape == (0, 32)


def test_unused_mxfp8_blocks_are_zero():
    grouped = quantize(MXFP8BlockScaling(), torch.randn(70, 8), [1, 33, 0])
    assert grouped.columnwise.scale_inv.shape == ((70 + 3 * 31) // 32, 8)
    assert grouped.columnwise.scale_inv[:3].all() and not grouped.columnwise.scale_inv[3:].any()


@EACH_RECIPE
def test_values_times_alpha_are_the_dequantized_numbers(recipe):
    x = torch.randn(70, 48)
    grouped = quantize(recipe, x, [30, 0, 33])
    operand = grouped.operand(False, torch.float32)
    values, alpha = operand.values, operand.alpha
    if alpha is not None:
        values = values * alpha.repeat_interleave(torch.tensor([30, 0, 40]))[:, None]
    assert torch.equal(values, grouped.dequantize())


@EACH_RECIPE
def test_permuting_groups_permutes_the_values(recipe):
    x = torch.randn(60, 40)
    first, second = quantize(recipe, x, [25, 35]), quantize(recipe, torch.cat([x[25:], x[:25]]), [35, 25])
    assert torch.equal(first.dequantize(), torch.cat([second.dequantize()[35:], second.dequantize()[:35]]))


@EACH_RECIPE
@pytest.mark.parametrize("shape", [(0, 32), (40, 0)], ids=str)
def test_no_values_are_legal(recipe, shape):
    grouped = quantize(recipe, torch.zeros(shape), [shape[0], 0])
    assert grouped.dequantize().shape == grouped.operand(True, torch.bfloat16).values.shape == shape


@EACH_RECIPE
@pytest.mark.parametrize("which", ["rowwise", "columnwise"])
def test_only_the_copies_that_were_asked_for_are_made(recipe, which):
    x, splits = torch.randn(40, 8), Splits.make([40], rows=40, device="cpu")
    quantizer = recipe.quantizer(Role.INPUT)
    missing = {"rowwise": "columnwise", "columnwise": "rowwise"}[which]
    flags = {which: True, missing: False}
    made = [quantizer.quantize(x, **flags), quantizer.quantize_grouped(x, splits, **flags)]
    made.append(quantizer.quantize_stacked(x[None], **flags))
    for q in made:
        assert getattr(q, missing) is None
        assert q.dequantize().numel() == x.numel()
        assert q.operand(which == "columnwise", torch.float32).values.numel() == x.numel()
        with pytest.raises(RuntimeError, match=f"there is no {missing} copy. Quantize with {missing}=True"):
            q.operand(missing == "columnwise", torch.float32)
        rebuilt = q.rebuild(q.tensors())
        assert getattr(rebuilt, missing) is None and torch.equal(rebuilt.dequantize(), q.dequantize())


def test_no_copy_at_all_is_an_error():
    with pytest.raises(ValueError, match="rowwise and columnwise are both False, so nothing would be made"):
        MXFP8BlockScaling().quantizer(Role.INPUT).quantize(torch.randn(4, 8), rowwise=False).dequantize()


@EACH_RECIPE
def test_tensors_and_rebuild_are_a_round_trip(recipe):
    x = torch.randn(40, 48)
    quantizer = recipe.quantizer(Role.INPUT)
    for q in (quantizer.quantize(x, columnwise=True), quantize(recipe, x, [10, 0, 25])):
        tensors = q.tensors()
        kept = [tensor for tensor in tensors if tensor is not None]
        codes = [tensor for tensor in kept if tensor.dtype != torch.float32]  # both copies may share one scale
        assert len({tensor.data_ptr() for tensor in codes}) == len(codes), "nothing is saved twice"
        empty = q.rebuild([None] * len(tensors))
        assert all(tensor is None for tensor in empty.tensors())
        rebuilt = empty.rebuild([tensor if tensor is None else tensor.clone() for tensor in tensors])
        assert torch.equal(rebuilt.dequantize(), q.dequantize())
        for columnwise in (False, True):
            found, expected = rebuilt.operand(columnwise, torch.float32), q.operand(columnwise, torch.float32)
            assert torch.equal(found.values, expected.values)
        assert (rebuilt.rowwise is rebuilt.columnwise) == (q.rowwise is q.columnwise)


@EACH_RECIPE
def test_containers_can_be_copied(recipe):
    grouped = quantize(recipe, torch.randn(40, 48), [10, 0, 25])
    assert torch.equal(copy.deepcopy(grouped).dequantize(), grouped.dequantize())


def test_high_precision_data_is_handed_on_as_it_is():
    x = torch.randn(9, 4, dtype=torch.bfloat16)
    x[7:] = math.nan
    grouped = GroupedTensor(x, Splits.make([3, 0, 4], rows=9, device="cpu"), None, None, x.dtype)
    assert grouped.shape == x.shape and grouped.operand(False, torch.float32).values is x
    assert torch.equal(grouped.dequantize(), torch.cat([x[:7], torch.zeros_like(x[7:])]))
    rebuilt = grouped.rebuild([None] * len(grouped.tensors())).rebuild(grouped.tensors())
    assert rebuilt.data is x


@EACH_RECIPE
def test_gradients_do_not_flow_into_codes(recipe):
    x = torch.randn(40, 8, requires_grad=True)
    assert not any(t.requires_grad for t in quantize(recipe, x, [40]).tensors() if t is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_device_gives_the_same_bits_and_is_never_read(recipe):
    sizes = [3, 0, 64, 33]
    x = torch.randn(130, 72).bfloat16()
    x[5, 5], x[100:] = math.inf, math.nan
    x_cuda, sizes_cuda = x.cuda(), torch.tensor(sizes, device="cuda")
    w = torch.randn(4, 40, 72).bfloat16()
    w_cuda = w.cuda()
    quantizer = recipe.quantizer(Role.INPUT)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped = quantize(recipe, x_cuda, sizes_cuda)
        operands = [grouped.operand(columnwise, torch.bfloat16) for columnwise in (False, True)]
        dequantized = grouped.dequantize()
        stacked = quantizer.quantize_stacked(w_cuda, columnwise=True)
        alone = quantizer.quantize(x_cuda, columnwise=True)
        stacked.operand(True, torch.bfloat16), alone.operand(True, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_host = quantize(recipe, x, sizes)
    assert torch.equal(dequantized.cpu(), on_host.dequantize())
    for columnwise, operand in zip((False, True), operands, strict=True):
        expected = on_host.operand(columnwise, torch.bfloat16)
        assert torch.equal(operand.values.cpu(), expected.values)
    for found, expected in (
        (stacked, quantizer.quantize_stacked(w, columnwise=True)),
        (alone, quantizer.quantize(x, columnwise=True)),
    ):
        for mine, other in ((found.rowwise, expected.rowwise), (found.columnwise, expected.columnwise)):
            assert torch.equal(mine.scale_inv.cpu(), other.scale_inv)
            assert torch.equal(mine.codes.float().cpu().nan_to_num(), other.codes.float().nan_to_num())


@EACH_RECIPE
def test_groups_of_a_tensor_that_holds_values_in_place_of_codes(recipe):
    sizes = [12, 0, 35, 6]
    codes = quantize(recipe, torch.randn(60, 40), sizes)
    operand, row = codes.rowwise.operand(torch.float32, codes.splits), codes.rowwise
    assert operand.block == 1
    values = Dequantized(operand.values, operand.alpha, row.spec, row.shape, False)
    held = GroupedTensor(None, codes.splits, values, codes.columnwise, codes.dtype)
    for mine, theirs in zip(held.unbind(), codes.unbind(), strict=True):
        assert mine.shape == theirs.shape
        for columnwise in (False, True):
            assert torch.equal(mine.dequantize(columnwise=columnwise), theirs.dequantize(columnwise=columnwise))
