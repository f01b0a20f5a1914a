"""Rows that a cast reads where they lie, not a copy of them: the same bits, in kernels and in whole layers."""

from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fuser
from fused.grouped_mlp import GroupedMLP
from fuser import Sequential, autocast, lora, ops
from ops.kernels.grouped_gemm.bias_grad import grouped_bias_grad, grouped_bias_grad_triton
from ops.kernels.routing.all_to_all import ShardedRoutingMap
from ops.kernels.routing.permute import gather, gather_triton
from ops.products.paths import GroupedPath, SplitPath
from recipes.casts.cast import cast_ref
from recipes.casts.cast_blocks import cast_blocks_on_triton
from recipes.casts.cast_float8 import cast_float8_on_triton
from recipes.casts.cast_float8_rowwise import cast_float8_rowwise_on_triton
from recipes.casts.scale_rules import Float32Scale, GivenScale
from recipes.current_scaling import per_tensor
from recipes.float8_block import Float8BlockQuantizer
from recipes.float8_rowwise import Float8RowwiseScaling
from recipes.mxfp8 import MXFP8Quantizer
from recipes.recipe import Role
from recipes.registry import as_recipe
from recipes.tensors.formats import E4M3, E5M2, ScaleSpec
from recipes.tensors.gathered_rows import GatheredRows
from recipes.tensors.spec_quantizer import FormatQuantizer
from recipes.tensors.splits import Splits
from tests.cast_cases import EACH_DEVICE, INF, NAN, assert_same, assert_same_copies, poisoned
from tests.ranks import on_ranks
from tests.reference import assert_same_bits

ROWWISE = Float8RowwiseScaling().quantizer(Role.INPUT).spec
SPECS = {
    "current": (per_tensor(E5M2, Float32Scale()), cast_float8_on_triton),
    "given": (per_tensor(E4M3, GivenScale()), cast_float8_on_triton),
    "block": (Float8BlockQuantizer(E4M3, 1, True).spec, cast_blocks_on_triton),
    "block, any scale": (Float8BlockQuantizer(E5M2, 1, False).spec, cast_blocks_on_triton),
    "128x128 blocks": (Float8BlockQuantizer(E4M3, 2, True).spec, cast_blocks_on_triton),
    "mxfp8": (MXFP8Quantizer(E4M3).spec, cast_blocks_on_triton),
    "32x32 blocks": (MXFP8Quantizer(E4M3, square=True).spec, cast_blocks_on_triton),
    "rowwise": (ROWWISE, cast_float8_rowwise_on_triton),
}
EACH_SPEC = pytest.mark.parametrize("name", SPECS)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",  # the interpreter of triton 3.6 with numpy 2
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",  # signalling NaNs
)


def check(device, name, x, row_of, sizes, **options):
    spec, kernel = SPECS[name]
    options = {"rowwise": True, "columnwise": True} | options
    splits = [Splits.make(sizes, rows=len(row_of), device=place) for place in ("cpu", device)]
    scale, amaxes = None, [None, None]
    if name == "given":
        scale, amaxes = torch.rand(len(sizes)) * 8 + 0.5, [torch.zeros(len(sizes), device=p) for p in ("cpu", device)]
    expected = cast_ref(
        x.index_select(0, row_of), spec, splits=splits[0], scale=scale, amax_out=amaxes[0], **options
    )  # fmt: skip
    found = kernel(
        x.to(device), spec, splits=splits[1], scale=scale if scale is None else scale.to(device), amax_out=amaxes[1],
        row_of=row_of.to(device), **options,
    )  # fmt: skip
    assert_same_copies(found, expected)
    if name == "given":
        assert torch.equal(amaxes[1].cpu(), amaxes[0])


@pytest.mark.pairwise(first=1, rest=2)
@pytest.mark.launches("row_amax_kernel", "cast_float8_kernel")
@EACH_DEVICE
@EACH_SPEC
@pytest.mark.parametrize("columns", [48, 136, 30, 1], ids=str)
@pytest.mark.parametrize("sizes", [[3, 0, 150, 40], [1], [0, 0], [64, 0, 128, 32]], ids=str)
def test_kernels_gather(device, name, columns, sizes):
    """Rows that are read several times, and one that is not, which is Inf and no group's; rows past the sum."""
    x = poisoned(70, columns)
    row_of = torch.randint(0, 69, (224,))
    x[69] = INF
    check(device, name, x, row_of, sizes)


@pytest.mark.pairwise(first=1)
@EACH_DEVICE
@EACH_SPEC
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "columnwise"])
def test_dtypes_of_one_copy(device, name, dtype, rowwise):
    x = poisoned(20, 64, dtype=dtype)
    check(device, name, x, torch.randint(0, 20, (60,)), [7, 0, 40], rowwise=rowwise, columnwise=not rowwise)


@EACH_DEVICE
@EACH_SPEC
def test_no_rows(device, name):
    check(device, name, torch.ones(0, 32), torch.zeros(0, dtype=torch.int64), [0, 0])


@EACH_DEVICE
@pytest.mark.parametrize("column_codes", [True, False], ids=["codes kept", "values"])
def test_values_in_place_of_codes(device, column_codes):
    spec, dtype = MXFP8Quantizer(E4M3).spec, torch.float32
    x, row_of = poisoned(40, 96, dtype=dtype).to(device), torch.randint(0, 40, (100,), device=device)
    splits = Splits.make([33, 0, 50], rows=100, device=device)
    about = {"rowwise": True, "columnwise": True, "splits": splits, "row_values": dtype}
    about["column_values"] = None if column_codes else dtype
    copied = cast_blocks_on_triton(x.index_select(0, row_of), spec, **about)
    gathered = cast_blocks_on_triton(x, spec, row_of=row_of, **about)
    for field, mine, other in zip(copied._fields, gathered, copied, strict=True):
        assert (mine is None) == (other is None), field
        if mine is not None:
            assert_same(field, mine.view(torch.uint8), other.view(torch.uint8).cpu())


@pytest.mark.launches("gather_kernel")
@EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(30, 50, 300), (1, 3, 1), (0, 0, 8), (4, 0, 8), (4, 2, 0)], ids=str)
def test_rows_are_copied(device, dtype, shape):
    """Bit for bit, NaN's payload too."""
    sources, rows, features = shape
    numbers = torch.randint(0, 256, (sources * features * dtype.itemsize,), dtype=torch.uint8, device=device)
    x = numbers.view(dtype).view(sources, features)
    row_of = torch.randint(0, max(1, sources), (rows,), device=device)
    y = x.new_empty(rows, features)
    gather_triton(x, row_of, y)
    for found in (y, gather(GatheredRows(x, row_of))):
        assert torch.equal(found.flatten().view(torch.uint8), x[row_of].flatten().view(torch.uint8))


@EACH_DEVICE
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_bias_gradients_sum_gathered_rows(device, scaled):
    sizes, dy, row_of = [40, 0, 33], torch.randn(50, 130, device=device), torch.randint(0, 50, (80,), device=device)
    splits, scales = Splits.make(sizes, rows=80, device=device), torch.rand(80, device=device) if scaled else None
    found, expected = torch.full((2, 3, 130), NAN, device=device).unbind()
    grouped_bias_grad_triton(dy, row_of, splits.offsets, scales, found)
    grouped_bias_grad_triton(dy.index_select(0, row_of), None, splits.offsets, scales, expected)
    assert torch.equal(found, expected)
    rows = GatheredRows(dy, row_of)
    results = [grouped_bias_grad(each, splits, scales_T=scales) for each in (rows, rows.dequantize())]
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="splits were made for 80 rows"):
        grouped_bias_grad(GatheredRows(dy, row_of[:70]), splits)


def test_which_quantizers_gather():
    """Those whose format has a kernel that does, and that cast by it."""

    class Own(Float8BlockQuantizer):
        def quantize_grouped(self, x_TK, splits, *, rowwise=True, columnwise=False):
            return super().quantize_grouped(x_TK * 2, splits, rowwise=rowwise, columnwise=columnwise)

    assert Float8BlockQuantizer(E4M3, 1, True).gathers and not Own(E4M3, 1, True).gathers
    assert not FormatQuantizer(ScaleSpec(E4M3, (1, 64), Float32Scale())).gathers  # cast in torch
    assert {name for name in RECIPES if gathers(name)} == GATHERED


def gathers(name):
    quantizer = as_recipe(name).quantizer(Role.INPUT)
    return quantizer is not None and quantizer.gathers


@pytest.mark.parametrize("path", [GroupedPath, SplitPath], ids=lambda path: path.name)
def test_paths_take_gathered_rows(path):
    rows = GatheredRows(torch.randn(6, 32), torch.tensor([5, 1, 1, 0, 3]))
    assert rows.shape == (5, 32) and torch.equal(rows.dequantize(), rows.source[rows.row_of])
    splits = Splits.make([2, 0, 3], rows=5, device="cpu")
    for recipe in ("bf16", "fp8_current", "nvfp4"):
        quantizer = as_recipe(recipe).quantizer(Role.WEIGHT)
        found, expected = (
            path(capability=None).quantize(x, splits, quantizer, rowwise=True, columnwise=True)
            for x in (rows, rows.dequantize())
        )
        for mine, other in zip(found.tensors(), expected.tensors(), strict=True):
            assert mine is other or torch.equal(mine, other)


# --------------------------------------------------------------------------------------------------------- whole layers

E, H, W, TOPK = 4, 64, 32, 2
RECIPES = ["bf16", "fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", "nvfp4"]
GATHERED = set(RECIPES) - {"bf16", "nvfp4"}


def layer(device="cpu", act=ops.ScaledSwiGLU, bias=False, linear=ops.GroupedLinear, width=W, **options):
    torch.manual_seed(0)
    about = {"device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    return Sequential(
        ops.Router(H, E, TOPK, **about),
        ops.Dispatch(E),
        linear(E, H, 2 * width, bias=bias, **about, **options),
        act(),
        linear(E, width, H, bias=bias, **about, **options),
        ops.Combine(),
    )


def run(model, recipe, steps=2):
    """y, dx and all gradients, of each step."""
    like, found = next(model.parameters()), {}
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(37, H, device=like.device, dtype=like.dtype).requires_grad_()
        dy = torch.randn_like(x)
        torch.manual_seed(step)
        with autocast(recipe):
            y = model(x)
        y.backward(dy)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found |= {f"{name} {step}": t.clone() for name, t in ({"y": y.detach(), "dx": x.grad} | grads).items()}
    return found


def copying():
    """Rows are copied, as where no cast reads them."""
    return patch.object(ops.GroupedLinear, "gathers", lambda self, role, request: None)


@contextmanager
def no_copy():
    """Rows must not be copied before they reach the path."""

    def refuse(*_):
        raise AssertionError("rows are copied")

    with patch("ops.dispatch.dispatch", refuse), patch("ops.combine.dispatch", refuse):
        yield


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_layers_have_the_bits_of_copied_rows(device, recipe, bias):
    """Fused, repeated, and with biases, whose gradients are sums of the rows; and no copy is made."""
    with copying():
        expected = run(layer(device, bias=bias), recipe, steps=3)
    with no_copy() if recipe in GATHERED else nullcontext():
        found = run(layer(device, bias=bias), recipe, steps=3)
    assert_same_bits(found, expected)


@pytest.mark.filterwarnings("ignore:operation . .Dispatch. makes 'scales'")
@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: layer(act=ops.SwiGLU), id="no scales"),
        pytest.param(lambda: layer(act=partial(ops.SwiGLU, cache_quantized_input=True)), id="not fused"),
        pytest.param(lambda: layer(delay_wgrad_compute=True), id="delayed wgrad"),
        pytest.param(lambda: layer(stacked=False), id="per group"),
        pytest.param(lambda: layer(bias=True, scale_bias=True), id="scaled biases"),
        pytest.param(lambda: frozen(layer()), id="frozen weights"),
        pytest.param(lambda: fuser.to_quantized(layer(), "mxfp8"), id="held quantized"),
    ],
)
def test_other_layers(make, recipe):
    def steps():
        model = make()
        found = run(model, recipe)
        for operation in model:
            if getattr(operation, "delay_wgrad_compute", False):
                operation.backward_dw()
        return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    with copying():
        expected = steps()
    assert_same_bits(steps(), expected)


def frozen(model):
    for operation in model[2:5]:
        operation.requires_grad_(False)
    return model


def test_explain_says_where_rows_are_read():
    words = "copied by the cast that takes them"  # on a CPU
    explained = {name: layer().explain(recipe=name) for name in RECIPES}
    assert {name for name, text in explained.items() if words in text} == GATHERED
    lines = explained["fp8_current"].splitlines()
    assert [("Dispatch" in line, "in backward" in line) for line in lines if words in line] == [
        (True, False), (False, True)
    ]  # fmt: skip
    assert layer(bias=True).explain(recipe="fp8_current").count(words) == 2
    assert layer(bias=True, scale_bias=True).explain(recipe="fp8_current").count(words) == 1
    split = layer()
    split.path = "split"
    assert words not in split.explain(recipe="fp8_current")
    adapted = layer()
    lora.add(adapted, rank=2)
    assert adapted.explain(recipe="fp8_current").count(words) == 0


class OwnLinear(ops.GroupedLinear):
    def fuser_forward(self, ctx, x, extras):
        return super().fuser_forward(ctx, x * 1, extras)


class OwnGradients(ops.GroupedLinear):
    def bias_gradients(self, ctx, dy, splits, scales):
        return super().bias_gradients(ctx, dy * 1, splits, scales)


class OwnDispatch(ops.Dispatch):
    def fuser_forward(self, ctx, x, extras):
        y, outputs = super().fuser_forward(ctx, x, extras)
        return y * 1, outputs


class OwnCombine(ops.Combine):
    def fuser_backward(self, ctx, dy, d_extra_outputs):
        dx, *others = super().fuser_backward(ctx, dy, d_extra_outputs)
        return dx * 1, *others


class OwnMLP(GroupedMLP):
    def fuser_forward(self, ctxs, x, extras):
        return super().fuser_forward(ctxs, x * 1, extras)

    def fuser_backward(self, ctxs, dy, d_extra_outputs):
        return super().fuser_backward(ctxs, dy * 1, d_extra_outputs)


class AroundDispatch(fuser.FusedOperation):
    pattern = (ops.Router, ops.Dispatch)
    passes = "forward"

    def fuser_forward(self, ctxs, x, extras):
        router, dispatch = self.operations
        x, made = router.fuser_forward(ctxs[0], x, extras)
        y, outputs = dispatch.fuser_forward(ctxs[1], x, made)
        return y * 1, made | outputs


class AroundCombine(fuser.FusedOperation):
    pattern = (ops.Combine, ops.Identity)
    passes = "joint"

    def fuser_forward(self, ctxs, x, extras):
        return self.operations[0].fuser_forward(ctxs[0], x, extras)

    def fuser_backward(self, ctxs, dy, d_extra_outputs):
        dx, parameters, extras = self.operations[0].fuser_backward(ctxs[0], dy, d_extra_outputs)
        return dx * 1, (parameters, {}), extras


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    ("change", "fusion"),
    [
        pytest.param(lambda model: replaced(model, OwnLinear), None, id="GroupedLinear"),
        pytest.param(lambda model: replaced(model, OwnGradients), None, id="bias_gradients"),
        pytest.param(lambda model: Sequential(model[0], OwnDispatch(E), *model[2:]), None, id="Dispatch"),
        pytest.param(lambda model: Sequential(*model[:5], OwnCombine()), None, id="Combine"),
        pytest.param(lambda model: model, OwnMLP, id="GroupedMLP"),
        pytest.param(lambda model: model, AroundDispatch, id="around Dispatch"),
        pytest.param(lambda model: Sequential(*model, ops.Identity()), AroundCombine, id="around Combine"),
    ],
)
def test_what_users_write_gets_tensors(change, fusion, bias):
    """Methods that compute with what they take, or with what those they replace return."""
    expected = run(layer(bias=bias), "fp8_current")
    with nullcontext() if fusion is None else fuser.register_fusion(fusion):
        model = change(layer(bias=bias))
        found = run(model, "fp8_current")
        assert fusion is None or fusion.__name__ in model.explain(recipe="fp8_current")
    assert_same_bits(found, expected)


def replaced(model, kind):
    """Its GroupedLinears by those of another class, with their parameters."""
    for operation in (model[2], model[4]):
        operation.__class__ = kind
    return Sequential(*model)


class OwnTransfer(ops.Dispatch):
    def send_tokens(self, x, routing_map):
        return super().send_tokens(x, routing_map) * 1


def compare_ranks(rank, recipes):
    """On two ranks, one of which has no tokens in the end: gathered, copied, and by a transfer of the user's own."""
    group = dist.group.WORLD

    def results(recipe, tokens, kind=ops.Dispatch):
        torch.manual_seed(0)
        model = Sequential(
            ops.Router(H, E, TOPK), kind(E, group=group), ops.GroupedLinear(E // 2, H, 2 * W), ops.ScaledSwiGLU(),
            ops.GroupedLinear(E // 2, W, H), ops.Combine(group=group),
        )  # fmt: skip
        torch.manual_seed(rank)
        x = torch.randn(tokens, H).requires_grad_()
        with autocast(recipe):
            y = model(x)
        y.backward(torch.ones_like(y))
        return {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in model.named_parameters()}

    for recipe in recipes:
        for tokens in (20 + rank, 5 * rank):
            with copying():
                expected = results(recipe, tokens)
            assert_same_bits(results(recipe, tokens, OwnTransfer), expected)
            with patch.object(ShardedRoutingMap, "send_tokens", side_effect=AssertionError("rows are copied")):
                assert_same_bits(results(recipe, tokens), expected)


@pytest.mark.slow
def test_rows_that_other_ranks_send(tmp_path):
    on_ranks(compare_ranks, ["fp8_current", "fp8_delayed", "mxfp8"], folder=tmp_path)


def test_counted_casts_see_the_rows():
    with fuser.count_casts() as counted:
        run(layer(), "fp8_current", steps=1)
    with copying(), fuser.count_casts() as expected:
        run(layer(), "fp8_current", steps=1)
    assert counted.counts == expected.counts and len(counted.counts) >= 6
