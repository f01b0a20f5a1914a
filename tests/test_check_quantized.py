"""What a user's quantizer returns is what was asked of it, or an error that names the quantizer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuser import Sequential, autocast, ops
from recipes import CustomRecipe, GroupedTensor, Operand, QuantizedTensor, Quantizer, Role, ScaledCodes, Splits
from recipes.float8_block import Float8BlockQuantizer
from recipes.mxfp4 import MXFP4BlockScaling
from recipes.mxfp8 import MXFP8Quantizer
from recipes.registry import as_recipe
from recipes.tensors.formats import E4M3

SIZES = [40, 0, 24]


@dataclass(frozen=True)
class Of(Quantizer):
    """The quantizer of a user who returns what another one made, changed."""

    inner: Quantizer
    change: Callable[[Any], Any] = lambda made: made

    def quantize(self, x, *, rowwise=True, columnwise=False):
        return self.change(self.inner.quantize(x, rowwise=rowwise, columnwise=columnwise))

    def quantize_stacked(self, w_GNK, *, rowwise=True, columnwise=False):
        return self.change(self.inner.quantize_stacked(w_GNK, rowwise=rowwise, columnwise=columnwise))

    def quantize_grouped(self, x_TK, splits, *, rowwise=True, columnwise=False):
        return self.change(self.inner.quantize_grouped(x_TK, splits, rowwise=rowwise, columnwise=columnwise))


BUILT_IN = ["fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", MXFP4BlockScaling(), "nvfp4"]


@pytest.mark.parametrize("recipe", BUILT_IN, ids=str)
@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_what_is_right_passes(recipe, role):
    quantizer = Of(as_recipe(recipe).quantizer(role))
    splits = Splits.make(SIZES, rows=70, device="cpu")
    for copies in ((True, False), (False, True), (True, True)):
        asked = dict(zip(("rowwise", "columnwise"), copies, strict=True))
        for shape in ((70, 48), (2, 5, 48), (0, 48), (32, 64)):
            quantizer.quantize(torch.randn(shape), **asked)
        quantizer.quantize_stacked(torch.randn(3, 40, 48), **asked)
        quantizer.quantize_grouped(torch.randn(70, 48), splits, **asked)


def of_rows(**fields: Any) -> Callable[[Any], Any]:
    return lambda made: replace(made, rowwise=made.rowwise and replace(made.rowwise, **fields))


def scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda made: of_rows(scale_inv=change(made.rowwise.scale_inv))(made) if made.rowwise else made


@dataclass(frozen=True, eq=False)
class Halves(ScaledCodes):
    """A copy of one's own, whose values are half of the rows."""

    def operand(self, dtype, splits=None):
        return Operand(self.codes[::2].to(dtype), None)


WRONG = [
    (lambda made: made.rowwise, TypeError, r"{} returned a ScaledCodes, but must return a {kind}\. Return {kind}\("),
    (lambda made: None, TypeError, r"{} returned a NoneType, but must return a {kind}"),
    (lambda made: replace(made, dtype=torch.float64), ValueError, r"{} returned .* of dtype torch.float64, but x is"),
    (lambda made: replace(made, rowwise=None), ValueError, r"{} was called with rowwise=True, but returned no rowwise"),
    (lambda made: replace(made, columnwise=None), ValueError, r"{} was called with columnwise=True, but returned no"),
    (lambda made: replace(made, rowwise=(1, 2)), TypeError, r"{} returned a rowwise copy that is a tuple, but it must"),
    (of_rows(shape=torch.Size((64, 31))), ValueError, r"{} returned a rowwise copy of shape \[64, 31\], but x has"),
    (of_rows(codes=None), TypeError, r"{} returned a rowwise copy whose codes is a NoneType, but it must be a tensor"),
    (of_rows(codes=torch.zeros(3)), ValueError, r"{} returned a rowwise copy whose codes is torch.float32 of shape"),
    (of_rows(codes=torch.zeros(3, device="meta")), ValueError, r"{} .* whose codes is on meta, but x is on cpu"),
    (scales(lambda s: s[..., :1]), ValueError, r"{} .* whose scale_inv is .* of shape \[.*1\], but its ScaleSpec\("),
    (scales(lambda s: s.float()), ValueError, r"{} .* whose scale_inv is torch.float32 of shape .* needs torch.uint8"),
    (scales(lambda s: None), TypeError, r"{} returned a rowwise copy whose scale_inv is a NoneType"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
def test_what_is_wrong_is_refused_by_name(grouped, change, error, message):
    kind, extras = ("GroupedTensor", {"split_sizes": SIZES}) if grouped else ("QuantizedTensor", {})
    operation = ops.GroupedLinear(3, 64, 64) if grouped else ops.Linear(64, 64)
    method = "quantize_grouped" if grouped else "quantize"
    where = r"In operation 1 \(" + type(operation).__name__ + r"\): Of\." + method
    model = Sequential(ops.Identity(), operation)
    recipe = CustomRecipe(lambda role: Of(MXFP8Quantizer(E4M3), change) if role is Role.INPUT else None)
    with autocast(recipe), pytest.raises(error, match=message.format(where, kind=kind)):
        model(torch.randn(64, 64, requires_grad=True), **extras)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: replace(made, data=torch.zeros(64, 32)), "a GroupedTensor with data, which would be multiplied"),
        (
            lambda made: replace(made, splits=Splits.make([64], rows=64, device="cpu")),
            "splits of 1 groups and 64 rows, but was given 3 groups and 64 rows",
        ),
    ],
)
def test_grouped_rows_are_codes_of_the_groups_that_were_given(change, message):
    splits = Splits.make(SIZES, rows=64, device="cpu")
    with pytest.raises(ValueError, match=f"Of.quantize_grouped returned {message}"):
        Of(MXFP8Quantizer(E4M3), change).quantize_grouped(torch.randn(64, 32), splits)


def test_a_columnwise_copy_may_be_that_of_the_rows_and_a_rowwise_one_may_not():
    made = MXFP8Quantizer(E4M3).quantize(torch.randn(6, 32), rowwise=True, columnwise=True)
    x = torch.randn(2, 3, 32)
    rows = SimpleNamespace(quantize=lambda *_, **__: replace(made, rowwise=None))
    assert Of(rows).quantize(x, rowwise=False, columnwise=True).columnwise is made.columnwise
    with pytest.raises(ValueError, match=r"rowwise copy of shape \[6, 32\], but x has shape \[2, 3, 32\]"):
        Of(SimpleNamespace(quantize=lambda *_, **__: made)).quantize(x)


def test_values_of_another_shape_than_the_copy_are_refused():
    def halved(made: QuantizedTensor | GroupedTensor) -> Any:
        codes = made.rowwise
        return replace(made, rowwise=Halves(codes.codes, None, codes.spec, codes.shape))

    recipe = CustomRecipe(lambda role: Of(MXFP8Quantizer(E4M3), halved) if role is Role.INPUT else None)
    for operation, extras in ((ops.Linear(32, 32), {}), (ops.GroupedLinear(3, 32, 32), {"split_sizes": SIZES})):
        message = r"the Operand of x in fprop has values of shape \[32, 32\], but the copy is of shape \[64, 32\]"
        with torch.no_grad(), autocast(recipe), pytest.raises(ValueError, match=message):
            operation(torch.randn(64, 32), **extras)


def test_methods_that_a_user_inherits_are_not_checked_again():
    class Renamed(Float8BlockQuantizer):
        pass

    assert Renamed.quantize is Float8BlockQuantizer.quantize and not hasattr(Renamed.quantize, "__wrapped__")
    assert Of.quantize.__wrapped__.__qualname__ == "Of.quantize"
