"""Chains of element-wise operations: fused as unfused, what is kept, what is refused; ConstantScale and Dropout."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fused import ElementwiseChain
from fuser import Sequential, autocast, ops
from fuser.testing import check_fusion
from ops import ElementwiseOperation
from ops.kernels.elementwise.chain import Cast, Step, elementwise_cast
from ops.kernels.elementwise.chain_steps import scale_step
from recipes import CustomRecipe, DelayedScaling, Quantizer, Role
from recipes.casts.scale_rules import E8M0Scale, Float32Scale
from recipes.delayed_scaling import DelayedScalingQuantizer
from recipes.mixed import AsItIs
from recipes.mxfp8 import MXFP8Quantizer
from recipes.tensors.formats import E4M3, ScaleSpec
from recipes.tensors.spec_quantizer import FormatQuantizer
from recipes.triton.philox import random_bits_ref
from tests.check_operation import DEVICES, DTYPES, check_gradients, check_operation
from tests.reference import assert_same_bits, gradients


class ChainAnywhere(ElementwiseChain):
    """Also on the CPU, where the steps' references run, and in float64."""

    @classmethod
    def why_not(cls, operations: Any, request: Any) -> str | None:
        return super().why_not(operations, request._replace(device=torch.device("cuda"), dtype=torch.float32))


@triton.jit
def _square(x, operand, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return x * x * operand


@triton.jit
def _dsquare(dy, x, operand, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return 2 * dy * x * operand


@triton.jit
def _d_factor(dy, x, operand, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * x * x


class WeighedSquare(ElementwiseOperation):
    """An operation as a user would write it: y = x^2 w, with a learned w a column. Nothing but its step."""

    operand_name = "weight"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(size) + 0.5)

    def step(self) -> Step:
        return Step(_square, _dsquare, _square_ref, "column", d_operand=_d_factor)


def _square_ref(x: Tensor, operand: Tensor, *_: float) -> Tensor:
    return x * x * operand


class TimesScales(ElementwiseOperation):
    """The same with an extra input: y = x^2 s, with s a row, or an element."""

    operand_name = "s"
    extra_inputs = {"s": Tensor}

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def step(self) -> Step:
        if self.kind == "row":
            return Step(_square, _dsquare, lambda x, operand, *_: x * x, "row")
        return Step(_square, _dsquare, _square_ref, "element", d_operand=_d_factor)


def is_taken(operations: list[Any], recipe: str | None) -> str:
    """What explain says for CUDA."""
    return Sequential(*operations).explain(recipe=recipe, device="cuda", dtype=torch.bfloat16)


def test_a_quantize_at_either_end_is_part_of_the_chain():
    taken = "ElementwiseChain = Quantize -> Bias -> Quantize "
    operations = [ops.Quantize(forward=False, backward=True), ops.Bias(8), ops.Quantize()]
    assert taken in is_taken(operations, "mxfp8")
    assert taken in is_taken(operations, None)
    text = is_taken(operations, "fp8_current")
    assert "CurrentScalingQuantizer must see the whole tensor before it can cast, which takes another pass." in text
    text = is_taken([ops.Quantize(), ops.Bias(8)], "mxfp8")
    assert "The Quantize in front quantizes x, which is not what the chain computes." in text
    text = is_taken([ops.Bias(8), ops.Quantize(backward=True)], "mxfp8")
    assert "The Quantize behind quantizes dy, which is not what the chain computes." in text
    text = is_taken([ops.Quantize(forward=False, backward=True), ops.SwiGLU(), ops.Bias(8)], "mxfp8")
    assert "SwiGLU" in text


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70, 48), (3, 5, 33), (0, 32)], ids=str)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
def test_a_fused_quantize_gives_the_codes_of_an_unfused_one(shape, dtype, device, recipe):
    def make() -> list[Any]:
        size = shape[-1]
        return [
            ops.Linear(size, size), ops.Quantize(False, True), ops.Bias(size), WeighedSquare(size), ops.Quantize(),
            ops.Linear(size, size),
        ]  # fmt: skip

    check_fusion(ChainAnywhere, make, shape, recipe=recipe, dtype=dtype, device=device, draws=4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_chain_does_not_quantize_a_gradient_that_nobody_wants(device):
    """Under delayed scaling its amax would be recorded."""
    states = []
    for fusions in ((), (ChainAnywhere,)):
        model = Sequential(ops.Quantize(False, True), ops.Bias(8), ops.Bias(8), fusions=fusions).to(device)
        with autocast("fp8_delayed"):
            model(torch.ones(4, 8, device=device)).sum().backward()
        states.append(sorted(model.state_dict()))
    assert states[0] == states[1] == ["1.bias", "2.bias"]


# name -> (operations, shapes of the extra inputs)
CHAINS = {
    "bias scale": (lambda: [ops.Bias(24), ops.ConstantScale(-2.5)], {}),
    "scale bias bias": (lambda: [ops.ConstantScale(0.3), ops.Bias(24), ops.Bias(24)], {}),
    "bias square": (lambda: [ops.Bias(24), WeighedSquare(24)], {}),
    "square bias square scale": (
        lambda: [WeighedSquare(24), ops.Bias(24), WeighedSquare(24), ops.ConstantScale(0.5)], {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chain", CHAINS)
def test_fused_is_unfused(chain, dtype, device):
    """Bit for bit but for sums over rows, which add up in another order on the GPU."""
    make, extras = CHAINS[chain]
    for shape in ((5, 24), (2, 3, 24), (0, 24)):
        shapes = dict.fromkeys(extras, shape)
        check_fusion(ChainAnywhere, make, shape, extras=shapes, dtype=dtype, device=device, draws=4)
    if device == "cpu":
        check_fusion(ChainAnywhere, make, (7, 24), extras=dict.fromkeys(extras, (7, 24)), dtype=dtype, tolerance=1e-6)


def test_a_chain_says_why_it_is_not_taken():
    sequential = Sequential(ops.Bias(8), ops.ConstantScale(2.0), ops.Bias(8))
    text = sequential.explain()
    assert "not fused: ElementwiseChain on operations 0-2: The element-wise kernel is Triton's; on cpu torch" in text
    assert text.count("ElementwiseChain") == 1, "said once, not for every part of the chain"
    text = sequential.explain(device="cuda", dtype=torch.float64)
    assert "There is no element-wise kernel for float64" in text
    text = sequential.explain(device="cuda", dtype=torch.float32)
    assert "ElementwiseChain = Bias -> ConstantScale -> Bias  [3 element-wise steps in one kernel (Triton)]" in text


@dataclass(frozen=True)
class ThirdFormat(FormatQuantizer):
    """Says that kernels may cast to it, of which the element-wise one knows some formats."""

    @property
    def kernel_spec(self) -> ScaleSpec:
        return self.format


MXFP8, GIVEN = MXFP8Quantizer(E4M3).spec, DelayedScalingQuantizer(E4M3, DelayedScaling()).spec


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(replace(MXFP8, block=(1, 16), alignment=16), id="other-blocks"),
        pytest.param(replace(MXFP8, block=(32, 32)), id="square-blocks"),
        pytest.param(replace(MXFP8, scale_rule=E8M0Scale("floor")), id="rounded-down"),
        pytest.param(replace(MXFP8, scale_rule=Float32Scale()), id="float32-scales"),
        pytest.param(replace(MXFP8, element=AsItIs("bfloat16", torch.bfloat16, 3.0e38)), id="other-codes"),
        pytest.param(replace(GIVEN, alignment=16), id="other-padding"),
    ],
)
def test_a_format_that_the_kernel_does_not_know_is_refused_with_a_sentence(spec):
    recipe = CustomRecipe(Same(ThirdFormat(spec)))
    for operations in ([ops.Bias(8), ops.Quantize()], [ops.Quantize(False, True), ops.Bias(8)]):
        text = Sequential(*operations).explain(recipe=recipe, device="cuda", dtype=torch.bfloat16)
        assert f"{spec.element.name} codes of {spec.block[0]}x{spec.block[1]} blocks with {spec.scale_rule}" in text
        assert "are none that the element-wise kernel casts to: it knows MXFP8, rounded up, and FP8 with one" in text
        assert "ElementwiseChain = " not in text
    x, codes = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="are none that the element-wise kernel casts to"):
        elementwise_cast(x, Cast(codes, codes, codes, codes, spec), [scale_step(1.0)], [None])


@pytest.mark.parametrize("spec", [MXFP8, GIVEN], ids=["mxfp8", "given-scale"])
def test_a_format_that_the_kernel_supports_is_taken_from_any_quantizer(spec):
    recipe = CustomRecipe(Same(ThirdFormat(spec)))
    text = Sequential(ops.Bias(8), ops.Quantize()).explain(recipe=recipe, device="cuda", dtype=torch.bfloat16)
    assert "ElementwiseChain = " in text


@dataclass(frozen=True)
class Same:
    """The same quantizer in every role."""

    quantizer: Quantizer

    def __call__(self, role: Role) -> Quantizer:
        return self.quantizer


def saved_bytes(sequential: Sequential, x: Tensor, **extras: Tensor) -> int:
    saved: dict[Any, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.data_ptr(), t.shape] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        sequential(x, **extras)
    return sum(saved.values())


def test_a_chain_keeps_its_input_alone():
    operations = [ops.ConstantScale(2.0), WeighedSquare(24), ops.Bias(24), WeighedSquare(24)]
    x = torch.randn(6, 24)
    assert saved_bytes(Sequential(*operations, fusions=()), x) == 2 * x.nbytes
    assert saved_bytes(Sequential(*operations, fusions=(ChainAnywhere,)), x) == x.nbytes


def test_a_linear_chain_keeps_nothing():
    operations = [ops.ConstantScale(2.0), ops.Bias(24), ops.Dropout(0.5)]
    assert saved_bytes(Sequential(*operations, fusions=(ChainAnywhere,)), torch.randn(6, 24)) == 8, "the seed"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_users_own_operation(dtype, device):
    check_operation(
        WeighedSquare(24).to(device, dtype), lambda x, weight: x * x * weight,
        torch.randn(5, 24, dtype=dtype, device=device),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "operation, given, message",
    [
        (WeighedSquare(1), None, r"weight has shape \[1\], .* Give one number for each column: \[4\]"),
        (WeighedSquare(3), None, r"weight has shape \[3\], .* Give one number for each column: \[4\]"),
        (TimesScales("row"), (1,), r"s has shape \[1\], .* Give one number for each row: \[2, 3\]"),
        (TimesScales("row"), (6,), r"s has shape \[6\], .* Give one number for each row: \[2, 3\]"),
        (TimesScales("element"), (4,), r"s has shape \[4\], .* Give one number for each element: \[2, 3, 4\]"),
    ],
)
def test_an_operand_that_would_be_broadcast_is_refused(operation, given, message, device):
    """A kernel would read beyond it."""
    extras = {} if given is None else {"s": torch.ones(given, device=device)}
    with pytest.raises(ValueError, match=message):
        Sequential(copy.deepcopy(operation), ops.ConstantScale(2.0)).to(device)(
            torch.ones(2, 3, 4, device=device), **extras
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleave, features, divisor", [(0, 5, 2), (2, 6, 4)])
def test_features_that_do_not_divide_into_gate_and_linear_part_are_refused(interleave, features, divisor, device):
    """A kernel would read rows of another length."""

    class Product(ElementwiseOperation):
        def step(self) -> Step:
            return Step(_square, _dsquare, lambda x, *_: x, gated=True, interleave=interleave)

    for x in torch.ones(3, features, device=device), torch.ones((), device=device):
        with pytest.raises(ValueError, match=f"{divisor} must divide them"):
            Product()(x)


def test_gradcheck_of_a_users_own_operation():
    check_gradients(WeighedSquare(6), torch.randn(3, 6, dtype=torch.float64))


# ConstantScale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1, 0, -2.5, 3.5])
@pytest.mark.parametrize("shape", [(), (1, 13), (4, 4, 2), (0, 5)], ids=str)
def test_constant_scale(shape, scale, dtype, device):
    x = torch.randn(shape, dtype=dtype, device=device)
    check_operation(ops.ConstantScale(scale), lambda x: scale * x, x)


def test_constant_scale_gradcheck():
    check_gradients(ops.ConstantScale(-2.5), torch.randn(3, 6, dtype=torch.float64))


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_a_scale_that_is_not_finite_is_refused(scale):
    with pytest.raises(ValueError, match=f"ConstantScale got scale={scale}. It must be finite"):
        ops.ConstantScale(scale)


# Dropout


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1 / 16, 0.5, 0.75])
@pytest.mark.parametrize("shape", [(101,), (2, 4, 16), (128, 128), (40, 1000)], ids=str)
def test_dropout_keeps_or_zeroes_and_does_the_same_to_the_gradient(shape, p, dtype, device):
    torch.manual_seed(hash((shape, p)) % 1000)
    x = (torch.rand(shape, device=device) + 0.5).to(dtype).requires_grad_()
    y = ops.Dropout(p)(x)
    kept = y != 0
    close = partial(torch.testing.assert_close, rtol=torch.finfo(dtype).eps, atol=0)  # one in the last place
    close(y[kept], (x.detach().double() / (1 - p)).to(dtype)[kept])
    rate, count = kept.double().mean().item(), x.numel()
    assert abs(rate - (1 - p)) < 4 * math.sqrt(p * (1 - p) / count), "four standard deviations"
    dy = torch.randn_like(x)
    y.backward(dy)
    close(x.grad, torch.where(kept, dy.double() / (1 - p), 0).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_depends_on_the_generator_alone(device):
    x = torch.ones(64, 96, device=device)
    operation = ops.Dropout(0.3)
    torch.manual_seed(5)
    first, second = operation(x), operation(x)
    torch.manual_seed(5)
    assert torch.equal(first, operation(x))
    assert torch.equal(second, operation(x))
    assert not torch.equal(first, second)


@pytest.mark.gpu
def test_the_same_seed_keeps_the_same_elements_on_every_device():
    seed = torch.tensor([0x1234_5678_9ABC_DEF0])
    step = ops.Dropout(0.4).step()
    x = torch.ones(70, 131)
    from_bits = (random_bits_ref(seed, 70, 131) >= step.constants[0]).float() * step.constants[1]
    operation = ops.Dropout(0.4)
    assert torch.equal(operation.compute(x, seed), from_bits)
    assert torch.equal(operation.compute(x.cuda(), seed.cuda()).cpu(), from_bits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p, device):
    x = torch.randn(5, 24, device=device, requires_grad=True)
    y = ops.Dropout(p)(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(y, x if p == 0 else torch.zeros_like(x))
    assert torch.equal(x.grad, torch.full_like(x, 1 - p))


@pytest.mark.parametrize("device", DEVICES)
def test_in_eval_mode_dropout_is_the_identity(device):
    sequential = Sequential(ops.Bias(24), ops.Dropout(0.5), ops.ConstantScale(2.0), fusions=(ChainAnywhere,)).to(device)
    sequential.eval()
    x = torch.randn(5, 24, device=device, requires_grad=True)
    y = sequential(x)
    sequential.train()  # what forward did counts
    y.backward(torch.ones_like(y))
    assert torch.equal(y, 2 * (x + sequential[0].bias))
    assert torch.equal(x.grad, torch.full_like(x, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_a_fused_dropout_drops_what_an_unfused_one_does(device):
    operations = [ops.Bias(72), ops.Dropout(0.25), ops.ConstantScale(3.0)]
    x, dy = (torch.randn(33, 72, device=device) for _ in range(2))
    results = []
    for fusions in ((ChainAnywhere,), ()):
        sequential = Sequential(*copy.deepcopy(operations), fusions=fusions).to(device)
        leaf = x.clone().requires_grad_()
        torch.manual_seed(3)
        y = sequential(leaf)
        y.backward(dy)
        results.append({"y": y, **gradients({"x": leaf})})
    assert_same_bits(*results)


def test_dropout_gradcheck():
    operation = ops.Dropout(0.5).double()
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return operation(x)

    assert torch.autograd.gradcheck(call, (x,))


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan])
def test_a_probability_outside_of_its_range_is_refused(p):
    with pytest.raises(ValueError, match=f"Dropout got p={p}. It is the probability of a zero, from 0 to 1."):
        ops.Dropout(p)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"operand": "rows"}, "Step got operand='rows'. Give one of '', 'column', 'row', 'element', 'random'."),
        ({"constants": (0.5,)}, r"Step got constants=\(0.5,\). Give a tuple of three numbers"),
        ({"constants": ("a", 0.0, 0.0)}, "Step got constants=.* Give a tuple of three numbers"),
    ],
    ids=["operand", "one constant", "no number"],
)
def test_a_step_that_no_kernel_could_run_is_refused_as_it_is_made(given, message):
    """On a CPU torch took such an operand as it broadcasts, which no kernel does."""
    with pytest.raises(ValueError, match=message):
        Step(_square, _dsquare, _square_ref, d_operand=_d_factor, **given)
