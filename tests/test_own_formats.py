"""Number formats from outside: one value each, on both paths, forward and every gradient."""
# T rows, G groups, K in features, N out features

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fuser import Sequential, autocast, checkpoint, ops, quantize, to_quantized
from ops.products.product import wgrad
from recipes import (
    CustomRecipe,
    ElementFormat,
    FormatQuantizer,
    GroupedTensor,
    Operand,
    QuantizedTensor,
    Quantizer,
    Role,
    ScaledCodes,
    ScaleRule,
    ScaleSpec,
    Splits,
)
from recipes.casts.amax_history import EndOfStep
from recipes.casts.scale_rules import E8M0Scale, Float32Scale, NVFP4Scale
from recipes.tensors.formats import ALL, E4M3, FLOAT8_SCALINGS
from tests.reference import assert_close, assert_same_bits, gradients


@dataclass(frozen=True)
class Int8(ElementFormat):
    """Integers from -127 to 127."""

    def encode(self, scaled: Tensor) -> Tensor:
        return scaled.nan_to_num(0.0).clamp(-self.max, self.max).round().to(torch.int8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype)

    @property
    def half_step(self) -> float:
        return 0.5 / 127

    def largest_codes(self, codes: Tensor) -> Tensor:
        return torch.where(codes.abs() == 127, codes, 0)


@dataclass(frozen=True)
class E3M2(ElementFormat):
    """Six bits, one a byte: sign, three of the exponent with bias 3, two of the mantissa. No Inf, no NaN."""

    def encode(self, scaled: Tensor) -> Tensor:
        magnitude = scaled.nan_to_num(0.0).abs().clamp(max=self.max)
        step = torch.exp2(magnitude.clamp(min=0.25).log2().floor() - 2)
        number = (magnitude / step).round() * step
        code = torch.searchsorted(self._values(torch.float32, scaled.device), number.contiguous())
        return (code + 32 * scaled.signbit()).to(torch.uint8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        values = self._values(dtype, codes.device)
        return torch.cat([values, -values])[codes.long()]

    def _values(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[32]: of the codes without a sign, in their order."""
        values = [m / 16 if e == 0 else (1 + m / 4) * 2.0 ** (e - 3) for e in range(8) for m in range(4)]
        return torch.tensor(values, dtype=dtype, device=device)

    @property
    def half_step(self) -> float:
        return 1 / 14  # 28, and 32 would be next

    def largest_codes(self, codes: Tensor) -> Tensor:
        return torch.where(codes & 31 == 31, codes, 0)


@dataclass(frozen=True)
class Exponent(ScaleRule):
    """The smallest power of two with which nothing saturates, stored as its exponent; 2^0 for an amax of 0."""

    dtype: ClassVar[torch.dtype] = torch.float32

    def scales(self, amax: Tensor, element: ElementFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        stored = (amax / element.max).log2().ceil().masked_fill(amax == 0, 0.0)
        return torch.exp2(-stored), stored

    def values(self, stored: Tensor) -> Tensor:
        return torch.exp2(stored)

    def holding(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if dtype == torch.float16 else dtype


RULES = [Float32Scale(), Float32Scale(power_2=True), E8M0Scale(), E8M0Scale("floor"), Exponent()]
INT8_PER_ROW = ScaleSpec(Int8("INT8", torch.int8, 127.0), (1, ALL), Float32Scale())
E3M2_BLOCKS = ScaleSpec(E3M2("E3M2", torch.uint8, 28.0), (1, 32), E8M0Scale(), alignment=32)
SPECS = [
    pytest.param(INT8_PER_ROW, id="int8-per-row"),
    pytest.param(replace(INT8_PER_ROW, columnwise="transposed", alignment=16), id="int8-per-row-transposed"),
    pytest.param(replace(INT8_PER_ROW, block=(ALL, ALL)), id="int8-per-tensor"),
    pytest.param(replace(INT8_PER_ROW, block=(ALL, ALL), scale_rule=E8M0Scale()), id="int8-e8m0-per-tensor"),
    pytest.param(
        replace(INT8_PER_ROW, block=(ALL, ALL), scale_rule=Exponent(), columnwise="transposed", alignment=16),
        id="int8-own-scale-per-tensor-transposed",
    ),
    pytest.param(E3M2_BLOCKS, id="e3m2-blocks"),
    pytest.param(replace(E3M2_BLOCKS, block=(32, 32)), id="e3m2-square-blocks"),
    pytest.param(replace(E3M2_BLOCKS, block=(32, 32), columnwise="transposed"), id="e3m2-square-blocks-transposed"),
]
EACH_SPEC = pytest.mark.parametrize("spec", SPECS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES, ROWS = [5, 0, 40, 2], 60


@dataclass(frozen=True)
class Same:
    """The same format in every role."""

    spec: ScaleSpec

    def __call__(self, role: Role) -> Quantizer:
        return FormatQuantizer(self.spec)


def nearest(x: Tensor, block: tuple[int, int], values: Tensor, power_2: bool) -> Tensor:
    """x in float64 as a format of these values would hold it, block by block."""
    out = torch.zeros_like(x, dtype=torch.float64)
    R, K = x.shape
    rows, columns = block[0] or R, block[1] or K
    for i in range(0, R, rows):
        for k in range(0, K, columns):
            tile = x[i : i + rows, k : k + columns].double()
            scale = (tile.abs().max() / values[-1]).float().double()
            scale = torch.exp2(scale.log2().ceil()) if power_2 else scale
            both = torch.cat([-values, values])
            nearest = both[(tile[..., None] / scale - both).abs().argmin(-1)]
            out[i : i + rows, k : k + columns] = nearest * scale
    return out


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@EACH_SPEC
def test_values_are_the_nearest_of_the_format(spec, columnwise):
    x = torch.randn(70, 48)
    codes = torch.arange(32, dtype=torch.uint8) if spec.element.name == "E3M2" else torch.arange(128, dtype=torch.int8)
    values = spec.element.decode(codes, torch.float64)
    found = FormatQuantizer(spec).quantize(x, columnwise=True)
    copy = found.columnwise if columnwise else found.rowwise
    expected = nearest(x, copy.block, values, isinstance(spec.scale_rule, E8M0Scale | Exponent))
    torch.testing.assert_close(copy.dequantize().double(), expected, rtol=1e-6, atol=0)


@EACH_SPEC
@pytest.mark.parametrize("device", DEVICES)
def test_groups_are_quantized_as_if_alone(spec, device):
    x = torch.randn(ROWS, 40, device=device)
    x[sum(SIZES) :] = float("nan")
    quantizer, splits = FormatQuantizer(spec), Splits.make(SIZES, rows=ROWS, device=device)
    grouped = quantizer.quantize_grouped(x, splits, columnwise=True)
    for member, part in zip(grouped.unbind(), x[: sum(SIZES)].split(SIZES), strict=True):
        for mine, other in zip(member.tensors(), quantizer.quantize(part, columnwise=True).tensors(), strict=True):
            assert mine.shape == other.shape and torch.equal(mine, other)
    for copy in (grouped.rowwise, grouped.columnwise):
        assert not copy.dequantize(splits)[sum(SIZES) :].any()


@EACH_SPEC
@pytest.mark.parametrize("device", DEVICES)
def test_both_paths_against_float64(spec, device):
    """y and all gradients, from the dequantized operands of each product."""
    op = ops.GroupedLinear(4, 40, 24, device=device)
    x0, dy = torch.randn(ROWS, 40, device=device), torch.randn(ROWS, 24, device=device)
    results = []
    for path in ("grouped", "split"):
        op.zero_grad()
        x = x0.clone().requires_grad_()
        with autocast(recipe=CustomRecipe(Same(spec))):
            y = Sequential(op, path=path)(x, split_sizes=torch.tensor(SIZES, device=device))
            y.backward(dy)
        results.append({"y": y, **gradients({"x": x, **dict(op.named_parameters())})})

    def held(t: Tensor, columnwise: bool) -> Tensor:
        made = FormatQuantizer(spec).quantize(t, columnwise=True)
        return (made.columnwise if columnwise else made.rowwise).dequantize().double()

    expected = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in results[0].items()}
    start = 0
    for group, size in enumerate(SIZES):
        rows, w, b = slice(start, start + size), op.weight[group].detach(), op.bias[group].detach().double()
        if size:
            expected["y"][rows] = held(x0[rows], False) @ held(w, False).T + b
            expected["gradient of x"][rows] = held(dy[rows], False) @ held(w, True)
            expected["gradient of weight"][group] = held(dy[rows], True).T @ held(x0[rows], True)
            expected["gradient of bias"][group] = dy[rows].double().sum(0)
        start += size
    for result in results:
        assert_close(result, expected)
    if device == "cpu":
        assert_same_bits(*results)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_of_a_single_row_the_scale_of_the_tensor_is_that_of_the_row(rule):
    x = torch.randn(1, 64)
    of_tensor, of_row = (
        FormatQuantizer(ScaleSpec(E4M3, block, rule)).quantize(x).dequantize() for block in ((ALL, ALL), (1, ALL))
    )
    assert torch.equal(of_tensor, of_row)


@pytest.mark.parametrize("block", FLOAT8_SCALINGS, ids=str)
def test_native_products_take_the_factors_that_stored_scales_stand_for(block):
    stored, plain = (
        FormatQuantizer(ScaleSpec(E4M3, block, rule, "transposed", 128)).quantize(torch.randn(1, 64)).rowwise
        for rule in (Exponent(), Float32Scale())
    )
    assert torch.equal(stored.float8_operand().scale, torch.exp2(stored.scale_inv))
    assert torch.equal(plain.float8_operand().scale, plain.scale_inv)


@pytest.mark.parametrize(
    ("field", "given", "error", "message"),
    [
        ("element", torch.int8, TypeError, "element is torch.int8, but must be an ElementFormat"),
        ("scale_rule", Float32Scale, TypeError, "but must be a ScaleRule"),
        ("block", 32, TypeError, "block is 32, but must be two integers"),
        ("block", (1,), TypeError, "but must be two integers, rows and columns"),
        ("block", (1, 32.0), TypeError, r"block\[1\] is 32.0, but must be an integer"),
        ("columnwise", "Transposed", ValueError, "columnwise is 'Transposed', but must be \"natural\" or"),
        ("columnwise", None, ValueError, "columnwise is None, but must be"),
        ("alignment", 0, ValueError, "alignment is 0, but must be positive"),
        ("alignment", "32", TypeError, "alignment is '32' .*must be an integer"),
        ("transform", 5, TypeError, "transform is 5, but must be a string or None"),
    ],
)
def test_a_field_that_cannot_be_is_refused_as_the_format_is_made(field, given, error, message):
    with pytest.raises(error, match=message):
        replace(INT8_PER_ROW, **{field: given})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Int8("INT8", "int8", 127.0), TypeError, "INT8's dtype is 'int8', but must be a torch.dtype"),
        (lambda: Int8("INT8", torch.int8, "127"), TypeError, "INT8's largest number is '127' .*must be a number"),
        (lambda: replace(E4M3, max="448"), TypeError, "E4M3's largest number is '448' .*must be a number"),
        (lambda: Int8("INT8", torch.int8, -5), ValueError, "-5.0, but must be positive and finite"),
        (lambda: Int8("INT8", torch.int8, float("nan")), ValueError, "nan, but must be positive and finite"),
        (lambda: E8M0Scale("Floor"), ValueError, 'rounding is \'Floor\', but must be "round_up" or "floor"'),
        (lambda: Float32Scale(amax_epsilon=float("nan")), ValueError, "amax_epsilon is nan, but cannot be"),
        (lambda: Float32Scale(power_2="no"), TypeError, "power_2 is 'no' .*must be True or False"),
        (lambda: NVFP4Scale(row_scaled=1), TypeError, "row_scaled is 1 .*must be True or False"),
        (lambda: NVFP4Scale(four_over_six="MAE"), TypeError, "four_over_six is 'MAE', but must be a FourOverSix"),
        (lambda: FormatQuantizer(E4M3), TypeError, "but must be a ScaleSpec. Pass ScaleSpec"),
        (
            lambda: FormatQuantizer(replace(INT8_PER_ROW, transform="mine")),
            ValueError,
            "the transform 'mine', but FormatQuantizer applies none. Leave transform=None, or write",
        ),
    ],
)
def test_elements_rules_and_quantizers_are_checked_as_they_are_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("encode", "given"),
    [
        pytest.param(lambda scaled: scaled.round(), r"torch.float32 of shape \[4, 64\]", id="not cast"),
        pytest.param(lambda scaled: scaled.round().to(torch.int8)[:1], r"torch.int8 of shape \[1, 64\]", id="one row"),
    ],
)
def test_codes_other_than_a_format_declares_are_refused(encode, given):
    class Wrong(Int8):
        def encode(self, scaled: Tensor) -> Tensor:
            return encode(scaled)

    spec = replace(INT8_PER_ROW, element=Wrong("WRONG", torch.int8, 127.0))
    message = rf"WRONG's encode returned {given}, but its dtype is torch.int8, and the values have shape \[4, 64\]"
    with pytest.raises(ValueError, match=message):
        FormatQuantizer(spec).quantize(torch.ones(4, 64))


def test_equal_formats_are_equal_however_their_numbers_are_given():
    assert replace(INT8_PER_ROW, block=[1, np.int64(ALL)], alignment=np.int32(1)) == INT8_PER_ROW


def test_a_block_has_one_row_or_as_many_rows_as_columns():
    for block in ((32, 1), (2, 32), (ALL, 32), (-1, 32)):
        with pytest.raises(ValueError, match="must be 1 x n or n x n"):
            ScaleSpec(E4M3, block, Float32Scale())


@dataclass(frozen=True, eq=False)
class RowFactors(ScaledCodes):
    """Numbers with a factor of each row, which stays outside of the product."""

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        return Operand(self.codes.to(dtype), self.scale_inv)


@dataclass(frozen=True)
class RowFactorsQuantizer(Quantizer):
    """Rowwise x / 2^n and 2^n, with an n of each row; columnwise x."""

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        factor = torch.exp2(torch.arange(len(x), dtype=torch.float32, device=x.device) % 5)[:, None]
        along_K = RowFactors(x / factor, factor, INT8_PER_ROW, x.shape)
        return QuantizedTensor(along_K, RowFactors(x, None, INT8_PER_ROW, x.shape, True), x.dtype)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        raise NotImplementedError

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        x = x_TK.masked_fill((splits.group_of_row == splits.num_groups)[:, None], 0)
        made = self.quantize(x)
        return GroupedTensor(None, splits, made.rowwise, made.columnwise, x.dtype)


@dataclass(frozen=True)
class Moving(Quantizer):
    """Multiples of a scale that goes half the way to the amax of each step. One scale of the operation."""

    keeps_state: ClassVar[bool] = True
    reduce_amax: ClassVar[bool] = False
    amax_reduction_group: ClassVar[None] = None

    source: Any = None
    updates: Any = None
    given: Tensor | None = None

    def state_shapes(self, num_scales: int) -> dict[str, tuple[tuple[int, ...], float]]:
        return {"amax_history": ((1, num_scales), 0.0), "scale": ((num_scales,), 0.25)}

    def bound(self, source: Any, updates: Any, scale: Tensor | None) -> Moving:
        return Moving(source, updates, scale)

    def snapshot(self, device: torch.device) -> Tensor:
        return self.source.tensors(self, device)["scale"].clone()

    @property
    def role(self) -> str:
        return self.source.role

    @property
    def amax(self) -> Tensor:
        return self.source.tensors(self, None)["amax_history"][0]

    def end_of_step(self) -> EndOfStep:
        state = self.source.tensors(self, None)
        return EndOfStep(state["amax_history"], state["scale"], 1.0, "most_recent", lambda amax, s: (s + amax / 64) / 2)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        state = self.source.tensors(self, x.device)
        if self.updates is not None:
            self.updates.add(self, state["amax_history"])
            state["amax_history"][0] = x.abs().amax()
        scale = state["scale"] if self.given is None else self.given
        values = (x / scale).round() * scale
        return QuantizedTensor(*[Halved(values / 2, None, INT8_PER_ROW, x.shape, c) for c in (False, True)], x.dtype)


def moving(role: Role) -> Quantizer:
    return Moving()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_state_of_ones_own_is_that_of_the_first_run_where_a_checkpoint_computes_again(use_reentrant):
    model = Sequential(ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8))
    runs = [lambda x: model(x), lambda x: checkpoint(model, x, use_reentrant=use_reentrant)]
    begun, results = model.state_dict(), []
    for run in runs:
        model.load_state_dict(begun)
        torch.manual_seed(0)
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            model.zero_grad()
            with autocast(CustomRecipe(moving)):
                y = run(x)
            y.square().sum().backward()
            results.append({"y": y, **gradients({"x": x, **dict(model.named_parameters())})})
            results[-1] |= {name: state.clone() for name, state in model.named_buffers()}
    for plain, again in zip(results[:3], results[3:], strict=True):
        assert len(plain) == 1 + 5 + 12
        assert_same_bits(again, plain)


@dataclass(frozen=True)
class In:
    """Row factors in one role, and high precision in the others."""

    role: Role

    def __call__(self, role: Role) -> Quantizer | None:
        return RowFactorsQuantizer() if role is self.role else None


@pytest.mark.parametrize("path", ["grouped", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("role", [Role.INPUT, Role.GRAD_OUTPUT])
def test_x_and_dy_may_have_a_factor_for_each_row(role, dtype, path):
    op = ops.GroupedLinear(4, 8, 6, dtype=dtype)
    x0, dy = torch.randn(ROWS, 8, dtype=dtype), torch.randn(ROWS, 6, dtype=dtype)
    results = []
    for recipe in (CustomRecipe(In(role)), None):
        op.zero_grad()
        x = x0.clone().requires_grad_()
        with autocast(recipe):
            y = Sequential(op, path=path)(x, split_sizes=SIZES)
        y.backward(dy)
        results.append({"y": y, **gradients({"x": x, **dict(op.named_parameters())})})
    assert_same_bits(*results)


def test_a_factor_for_each_row_of_a_weight_is_refused():
    x, op = torch.randn(6, 8), ops.Linear(8, 6)
    with (
        autocast(CustomRecipe(In(Role.WEIGHT))),
        pytest.raises(ValueError, match=r"Operand of the weight in fprop has a scale of shape \[6, 1\], but must have"),
    ):
        op(x)


def test_factors_of_the_rows_that_wgrad_sums_over_are_refused():
    rowwise = RowFactorsQuantizer().quantize(torch.randn(6, 8)).rowwise
    factors = QuantizedTensor(None, replace(rowwise, columnwise=True), torch.float32)
    for pair, name in (((factors, torch.randn(6, 8)), "dy"), ((torch.randn(6, 8), factors), "x")):
        with pytest.raises(ValueError, match=rf"the Operand of {name} in wgrad has a scale of shape \[6, 1\]"):
            wgrad(*pair, torch.float32, capability=None)


@dataclass(frozen=True, eq=False)
class Halved(ScaledCodes):
    """Codes that are half of the numbers, whatever their spec says."""

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        return Operand(2 * self.codes.to(dtype), None)


@dataclass(frozen=True)
class HalvingQuantizer(Quantizer):
    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        copies = (Halved(x / 2, x.new_ones(()), INT8_PER_ROW, x.shape, which) for which in (False, True))
        return QuantizedTensor(*copies, x.dtype)


def test_codes_of_ones_own_say_what_they_stand_for():
    x, w = torch.randn(6, 8), torch.randn(5, 8)
    quantizer = HalvingQuantizer()
    assert torch.equal(quantizer.quantize(x).dequantize(), x)
    op = ops.Linear(8, 5, bias=False)
    with torch.no_grad(), autocast(recipe=CustomRecipe(lambda role: quantizer)):
        op.weight.copy_(w)
        assert_close({"y": op(x)}, {"y": x @ w.T})


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        pytest.param(lambda values: values, r"operand\(\) of x in fprop returned a Tensor", id="values"),
        pytest.param(lambda values: None, r"operand\(\) of x in fprop returned a NoneType", id="nothing"),
        pytest.param(lambda values: Operand(values, 2.0), "Operand of x in fprop has .* Tensor and float", id="scale"),
        pytest.param(
            lambda values: Operand(None, None), "Operand of x in fprop has .* NoneType and NoneType", id="none"
        ),
    ],
)
def test_an_operand_that_is_none_is_named(operand, message):
    class Returns(Halved):
        def operand(self, dtype, splits=None):
            return operand(self.codes.to(dtype))

    @dataclass(frozen=True)
    class ReturningQuantizer(HalvingQuantizer):
        def quantize(self, x, *, rowwise=True, columnwise=False):
            copies = (Returns(x, x.new_ones(()), INT8_PER_ROW, x.shape, which) for which in (False, True))
            return QuantizedTensor(*copies, x.dtype)

    layer = Sequential(ops.Linear(8, 5))
    with (
        autocast(CustomRecipe(lambda role: ReturningQuantizer())),
        pytest.raises(TypeError, match=rf"In operation 0 \(Linear\): the {message}"),
    ):
        layer(torch.randn(6, 8))


@dataclass(frozen=True, eq=False)
class Shifted(ScaledCodes):
    """Codes of numbers less the smallest one of each row, which is a third tensor."""

    smallest: Tensor | None = None

    @property
    def tensor_fields(self) -> tuple[str, ...]:
        return ("codes", "scale_inv", "smallest")

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        return Operand((self.codes + self.smallest).to(dtype), None)


class ShiftedByGroup(Shifted):
    """The same, which knows what the rows and weights of a group are."""

    def member(self, group: int, sizes: Sequence[int] | None = None) -> Shifted:
        assert self.smallest is not None
        if sizes is None:
            return replace(super().member(group), smallest=self.smallest[group])
        return replace(super().member(group, sizes), smallest=self.smallest.split(list(sizes))[group])

    def stacked(self, others: Sequence[ScaledCodes]) -> ScaledCodes:
        smallest = [each.smallest for each in (self, *others)]
        return replace(super().stacked(others), smallest=torch.stack(smallest))


@dataclass(frozen=True)
class ShiftingQuantizer(Quantizer):
    """x - min x along the last axis, and min x, in both copies; of the codes nothing is rounded."""

    made: type[Shifted]

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        return QuantizedTensor(*self._copies(x.detach(), rowwise, columnwise), x.dtype)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        return QuantizedTensor(*self._copies(w_GNK.detach(), rowwise, columnwise), w_GNK.dtype)

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        x = x_TK.detach().masked_fill((splits.group_of_row == splits.num_groups)[:, None], 0)
        return GroupedTensor(None, splits, *self._copies(x, rowwise, columnwise), x.dtype)

    def _copies(self, x: Tensor, *needed: bool) -> list[Shifted | None]:
        smallest = x.amin(-1, keepdim=True)
        scale = x.new_ones(*x.shape[:-1], 1)
        copies = [self.made(x - smallest, scale, INT8_PER_ROW, x.shape, which, None, smallest) for which in (0, 1)]
        return [copy if need else None for copy, need in zip(copies, needed, strict=True)]


def shifting(made: type[Shifted]) -> CustomRecipe:
    quantizer = ShiftingQuantizer(made)
    return CustomRecipe(lambda role: quantizer if role is Role.WEIGHT else None)


def test_weights_one_a_group_with_a_third_tensor_are_written_one_by_one():
    op = ops.GroupedLinear(3, 8, 5, bias=False, stacked=False)
    recipe = shifting(ShiftedByGroup)
    to_quantized(op, recipe)
    weights = torch.randn(3, 5, 8)
    with torch.no_grad(), autocast(recipe):
        for parameter, weight in zip(op.parameters(), weights, strict=True):
            parameter.copy_(weight)
        x = torch.randn(9, 8)
        parts = [part @ weight.T for part, weight in zip(x.split([4, 0, 5]), weights, strict=True)]
        assert_close({"y": op(x, split_sizes=[4, 0, 5])}, {"y": torch.cat(parts)})


def test_a_third_tensor_that_cannot_be_divided_among_groups_is_refused():
    message = "Shifted holds smallest beside codes and scales.*Replace `member` and `stacked` of ScaledCodes in it"
    recipe = shifting(Shifted)
    with pytest.raises(NotImplementedError, match=message):
        to_quantized(ops.GroupedLinear(3, 8, 5, stacked=False), recipe)
    every_role = CustomRecipe(lambda role: ShiftingQuantizer(Shifted))
    rows = quantize(torch.randn(9, 8), every_role, split_sizes=[4, 0, 5]).quantized
    with pytest.raises(NotImplementedError, match=message):
        rows.unbind()
    alone = ShiftingQuantizer(Shifted).quantize(torch.randn(5, 8))
    with pytest.raises(NotImplementedError, match=message):
        alone.stacked([alone])


class Coarse(Int8):
    """Compared by the fields of Int8."""

    def __init__(self, step: int) -> None:
        super().__init__("coarse", torch.int8, 127.0)
        object.__setattr__(self, "step", step)


class Bits(FormatQuantizer):
    def __init__(self, bits: int) -> None:
        super().__init__(ScaleSpec(Int8("INT8", torch.int8, 127.0), (1, ALL), Float32Scale()))
        object.__setattr__(self, "bits", bits)


@dataclass(frozen=True)
class OneQuantizer:
    quantizer: Quantizer

    def __call__(self, role):
        return self.quantizer


class NamedQuantizer(OneQuantizer):
    def __init__(self, quantizer, name):
        super().__init__(quantizer)
        object.__setattr__(self, "name", name)


@dataclass(frozen=True)
class Tabulated(Int8):
    """What follows from the fields need not be one."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "table", torch.arange(3))


INT8_BY_ROW = FormatQuantizer(ScaleSpec(Int8("INT8", torch.int8, 127.0), (1, ALL), Float32Scale()))


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        pytest.param(OneQuantizer(Bits(4)), OneQuantizer(Bits(8)), "Bits.bits", id="quantizer"),
        pytest.param(*(NamedQuantizer(INT8_BY_ROW, name) for name in "ab"), "NamedQuantizer.name", id="function"),
        pytest.param(
            *(OneQuantizer(FormatQuantizer(ScaleSpec(Coarse(n), (1, ALL), Float32Scale()))) for n in (1, 16)),
            "Coarse.step",
            id="element",
        ),
    ],
)
def test_what_is_equal_and_differs_is_refused(one, other, name):
    """Within `constant_weights` the second would multiply the weights that the first has quantized."""
    assert one == other
    message = rf"{name} is no field, .* Put @dataclass\(frozen=True\) above"
    with autocast(CustomRecipe(one)), pytest.raises(TypeError, match=message):
        Sequential(ops.Linear(16, 16))(torch.rand(4, 16))


def test_what_follows_from_the_fields_of_a_format_need_not_be_compared():
    quantizer = FormatQuantizer(ScaleSpec(Tabulated("tabulated", torch.int8, 127.0), (1, ALL), Float32Scale()))
    with autocast(CustomRecipe(OneQuantizer(quantizer))):
        assert Sequential(ops.Linear(16, 16))(torch.rand(4, 16)).isfinite().all()
