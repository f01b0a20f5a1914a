"""The activations against their formulas in float64, as operations and as kernel functions."""
# T tokens, I features of the activation, S interleave size

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fuser import Sequential, autocast, ops
from ops.kernels.elementwise.activation import KINDS, Activation, activation, activation_ref, dactivation
from recipes import E4M3
from recipes.current_scaling import CurrentScalingQuantizer
from tests.check_operation import DEVICES, DTYPES, check_gradients, check_operation
from tests.reference import assert_close, assert_same_bits, clamp, gradients

LIMIT = 0.75  # so that about every second number is clamped


def halves(x: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    columns = torch.arange(x.shape[-1], device=x.device)
    is_gate = columns % (2 * interleave) < interleave if interleave else columns < x.shape[-1] // 2
    return x[..., is_gate], x[..., ~is_gate]


def swiglu(x: Tensor, scales: Tensor | None = None, *, interleave: int | None) -> Tensor:
    a, b = halves(x, interleave)
    return scaled(F.silu(a) * b, scales)


def clamped_swiglu(x: Tensor, scales: Tensor | None = None, *, interleave: int | None) -> Tensor:
    a, b = halves(x, interleave)
    a, b = clamp(a, -math.inf, LIMIT), clamp(b, -LIMIT, LIMIT)
    return scaled(a * torch.sigmoid(1.702 * a) * (b + 1), scales)


def situglu(x: Tensor, scales: Tensor | None = None, *, interleave: int | None, betas: Any = (4.0, 25.0)) -> Tensor:
    a, b = halves(x, interleave)
    return scaled(betas[0] * torch.tanh(a / betas[0]) * torch.sigmoid(a) * betas[1] * torch.tanh(b / betas[1]), scales)


def of_gate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    a, b = halves(x, None)
    return function(a) * b


def srelu(x: Tensor, scales: Tensor | None = None, *, interleave: int | None) -> Tensor:
    return scaled(F.relu(x) ** 2, scales)


def scaled(y: Tensor, scales: Tensor | None) -> Tensor:
    return y if scales is None else y * scales[..., None]


class Case(NamedTuple):
    make: Callable[..., Any]
    formula: Callable[..., Tensor]
    scaled: bool
    interleave: int | None


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def cases() -> list[Any]:
    interleaved = {
        "SwiGLU": (ops.SwiGLU, swiglu, False),
        "ScaledSwiGLU": (ops.ScaledSwiGLU, swiglu, True),
        "SiTUGLU": (ops.SiTUGLU, situglu, False),
        "SiTUGLU(0.5, 2)": (partial(ops.SiTUGLU, beta1=0.5, beta2=2), partial(situglu, betas=(0.5, 2.0)), False),
        "ScaledSiTUGLU": (ops.ScaledSiTUGLU, situglu, True),
        "ClampedSwiGLU": (partial(ops.ClampedSwiGLU, limit=LIMIT), clamped_swiglu, False),
        "ScaledClampedQGeGLU": (partial(ops.ScaledClampedQGeGLU, limit=LIMIT), clamped_swiglu, True),
    }
    others = {
        "GELU": (ops.GELU, gelu),
        "QGELU": (ops.QGELU, lambda x: x * torch.sigmoid(1.702 * x)),
        "ReLU": (ops.ReLU, lambda x: F.relu(x)),
        "SiLU": (ops.SiLU, lambda x: F.silu(x)),
        "SReLU": (ops.SReLU, lambda x: F.relu(x) ** 2),
        "GEGLU": (ops.GEGLU, partial(of_gate, gelu)),
        "GLU": (ops.GLU, partial(of_gate, torch.sigmoid)),
        "QGEGLU": (ops.QGEGLU, partial(of_gate, lambda a: a * torch.sigmoid(1.702 * a))),
        "ReGLU": (ops.ReGLU, partial(of_gate, F.relu)),
        "SReGLU": (ops.SReGLU, partial(of_gate, lambda a: F.relu(a) ** 2)),
    }
    return [
        *[
            pytest.param(
                Case(partial(make, glu_interleave_size=size), partial(formula, interleave=size), scales, size),
                id=f"{name}-{'halves' if size is None else f'S{size}'}",
            )
            for (name, (make, formula, scales)), size in itertools.product(interleaved.items(), (None, 3))
        ],
        *[pytest.param(Case(make, formula, False, None), id=name) for name, (make, formula) in others.items()],
        pytest.param(Case(ops.ScaledSReLU, partial(srelu, interleave=None), True, None), id="ScaledSReLU"),
    ]


CASES = cases()
# All features are multiples of 2 S.
SHAPES = [(71, 192), (5, 7, 126), (6,), (1, 6), (13, 18), (0, 12), (2, 0, 12)]
SPECS = [
    pytest.param(spec, id=f"{kind}-{size}")
    for kind, size in itertools.product(KINDS, (None, 4))
    if (spec := Activation(kind, limit=LIMIT, beta1=0.5, beta2=2.0, glu_interleave_size=size)).gated or size is None
]
CACHING = [case for case in CASES if not case.values[0].scaled]


def random_extras(case: Case, x: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {"scales": torch.rand(x.shape[:-1], dtype=dtype or x.dtype, device=x.device)} if case.scaled else {}


# Operations


@pytest.mark.parametrize("shape", [(4, 12), (2, 3, 6), (6,), (0, 6)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case: Case, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    check_gradients(case.make(), x, random_extras(case, x))


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_agree_with_float64(
    case: Case, dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    x = torch.randn(shape, dtype=dtype, device=device)
    check_operation(case.make(), case.formula, x, random_extras(case, x))


@pytest.mark.pairwise
@pytest.mark.parametrize("scales_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if case.values[0].scaled])
def test_scales_may_have_a_dtype_of_their_own(case: Case, dtype: torch.dtype, scales_dtype: torch.dtype) -> None:
    x = torch.randn(13, 18, dtype=dtype)
    # Whatever the scales are, the result is no better than x's dtype, nor their gradient than float32.
    loose = dict.fromkeys((torch.float64, torch.float32), 5e-06) | {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
    check_operation(case.make(), case.formula, x, random_extras(case, x, scales_dtype), tolerances=loose)


@pytest.mark.parametrize("frozen", [("x",), ("scales",), ("x", "scales")], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_requires_no_grad_gets_none(case: Case, frozen: tuple[str, ...]) -> None:
    x = torch.randn(13, 18)
    check_operation(case.make(), case.formula, x, random_extras(case, x), frozen=frozen)


@pytest.mark.parametrize("case", CASES)
def test_strides_do_not_matter_and_inputs_stay_as_they_are(case: Case) -> None:
    x = torch.randn(18, 2, 5).permute(2, 1, 0)
    given = {"x": x, **{name: torch.rand(2, 5).t() for name in case.make().extra_inputs}}
    before = {name: tensor.clone() for name, tensor in given.items()}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    y = case.make()(**leaves)
    y.sum().backward()  # an expanded dy
    same = {name: tensor.contiguous().requires_grad_() for name, tensor in before.items()}
    z = case.make()(**same)
    z.backward(torch.ones_like(z))
    assert_close({"y": y, **gradients(leaves)}, {"y": z, **gradients(same)})
    assert_same_bits(given, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_nan_in_a_row_stays_in_that_row(case: Case, dtype: torch.dtype) -> None:
    clean = torch.randn(5, 12, dtype=dtype)
    spoilt = clean.clone()
    spoilt[2, 0] = torch.nan
    extras = random_extras(case, clean)
    results = {}
    for name, x in {"clean": clean, "spoilt": spoilt}.items():
        x.requires_grad_()
        y = case.make()(x, **extras)
        y.backward(torch.ones_like(y))
        results[name] = torch.cat([y, x.grad], dim=1)
    others = [0, 1, 3, 4]
    assert torch.equal(results["clean"][others], results["spoilt"][others])
    assert results["spoilt"][2].isnan().any()


def test_interleaving_permutes_the_columns_of_x_and_nothing_else() -> None:
    x = torch.randn(7, 24)
    interleaved = x.unflatten(1, (2, 3, 4)).transpose(1, 2).flatten(1)
    assert torch.equal(ops.SwiGLU(glu_interleave_size=4)(interleaved), ops.SwiGLU()(x))


def test_scales_of_one_change_nothing() -> None:
    x = torch.randn(7, 24, dtype=torch.bfloat16)
    assert torch.equal(ops.ScaledSwiGLU()(x, scales=torch.ones(7)), ops.SwiGLU()(x))


def test_a_clamp_hands_its_gradient_on_at_the_limit_and_not_beyond() -> None:
    beyond = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)).item()
    a = [2.0, beyond, 1.0, 1.0, 1.0, 1.0]
    b = [1.0, 1.0, 2.0, beyond, -2.0, -beyond]
    x = torch.tensor([a + b], requires_grad=True)
    ops.ClampedSwiGLU(limit=2.0)(x).sum().backward()
    assert x.grad is not None
    assert (x.grad == 0).tolist() == [
        [False, True, False, False, False, False] + [False, False, False, True, False, True]
    ]


def test_the_gate_is_not_clamped_from_below() -> None:
    x = torch.tensor([[-3.0, 0.5]], dtype=torch.float64, requires_grad=True)
    ops.ClampedSwiGLU(limit=1.0)(x).sum().backward()
    assert x.grad is not None and x.grad[0, 0] != 0


@pytest.mark.parametrize("operation", [ops.ReLU(), ops.SReLU()], ids=str)
def test_the_gradient_at_a_kink_is_zero(operation: Any) -> None:
    x = torch.tensor([-1.0, -0.0, 0.0, 1.0], requires_grad=True)
    operation(x).sum().backward()
    assert x.grad is not None and (x.grad != 0).tolist() == [False, False, False, True]


def test_situglu_is_bounded_and_keeps_small_numbers() -> None:
    operation = ops.SiTUGLU(beta1=2.0, beta2=3.0)
    x = torch.tensor([[1e4, -1e4, torch.inf, -torch.inf, 1e4, -1e4, torch.inf, torch.inf]], requires_grad=True)
    y = operation(x)
    y.sum().backward()
    assert y.tolist() == [[6.0, 0.0, 6.0, 0.0]]
    assert x.grad is not None and not x.grad[0, :4].any() and not x.grad[0, 4:].any()
    small = torch.tensor([[1e-20, 3e-3, 1e-15, 2e-3]])
    a, b = small.double().chunk(2, -1)
    expected = 2 * torch.tanh(a / 2) * torch.sigmoid(a) * 3 * torch.tanh(b / 3)
    torch.testing.assert_close(operation(small).double(), expected, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_large_numbers_overflow_into_no_nan(case: Case) -> None:
    """Finite where the formula is finite in float64, and near it."""
    large = torch.tensor([1e4, -1e4, 300.0, -300.0, 0.0, 1.0])
    x = torch.cat([large, large.roll(1)]).reshape(1, 12)
    check_operation(case.make(), case.formula, x, random_extras(case, x))


def test_operations_show_their_settings() -> None:
    assert repr(ops.SwiGLU()) == "SwiGLU()"
    assert repr(ops.ScaledSwiGLU(32)) == "ScaledSwiGLU(glu_interleave_size=32)"
    assert repr(ops.ClampedSwiGLU(limit=2.5)) == "ClampedSwiGLU(limit=2.5)"
    assert repr(ops.SiTUGLU(beta2=12.0, cache_quantized_input=True)) == (
        "SiTUGLU(beta2=12.0, cache_quantized_input=True)"
    )
    assert repr(ops.GEGLU()) == "GEGLU()"
    assert repr(ops.ScaledClampedQGeGLU(8, glu_linear_offset=0.0)) == (
        "ScaledClampedQGeGLU(glu_linear_offset=0.0, glu_interleave_size=8)"
    )


# The input of backward in eight bits


def dequantized(x: Tensor) -> Tensor:
    return CurrentScalingQuantizer(E4M3).quantize(x).dequantize()


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(13, 18), (2, 3, 6), (0, 12)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CACHING)
def test_a_quantized_input_changes_the_gradient_alone(
    case: Case, dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    """y is that of x, dx that of the dequantized x, both bit for bit."""
    x = torch.randn(shape, dtype=dtype, device=device).requires_grad_()
    coarse = dequantized(x).requires_grad_()
    y = case.make(cache_quantized_input=True)(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    case.make()(coarse).backward(dy)
    assert_same_bits({"y": y, "dx": x.grad}, {"y": case.make()(x), "dx": coarse.grad})
    assert x.numel() == 0 or not torch.equal(coarse, x)


@pytest.mark.parametrize("case", CACHING)
def test_a_quantized_input_is_kept_in_eight_bits(case: Case) -> None:
    kept: list[Tensor] = []
    x = torch.randn(64, 36, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case.make(cache_quantized_input=True)(x)
    assert sum(tensor.nbytes for tensor in kept) == x.numel() + 4  # codes, and one scale


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_may_change_where_torch_keeps_copies(case: Case) -> None:
    def gradient(*, changes: bool) -> Tensor | None:
        torch.manual_seed(0)
        leaf = torch.randn(5, 12, requires_grad=True)
        x = leaf * 1
        y = case.make()(x, **random_extras(case, x))
        if changes:
            x.zero_()
        y.sum().backward()
        return leaf.grad

    expected = gradient(changes=False)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert_close({"dx": gradient(changes=True)}, {"dx": expected})


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "fp8_block"])
def test_between_quantizing_operations_the_input_may_be_cached(recipe: str) -> None:
    linears = ops.Linear(32, 64), ops.Linear(32, 32)
    results = []
    for cached in (False, True):
        x = torch.ones(8, 32).cumsum(0).sin().requires_grad_()
        activation = ops.SwiGLU(cache_quantized_input=cached)
        with autocast(recipe=recipe):
            y = Sequential(linears[0], activation, linears[1])(x)
            y.sum().backward()
        results.append((y, x.grad))
    (y, dx), (y_cached, dx_cached) = results
    assert torch.equal(y, y_cached)
    assert dx is not None and dx_cached is not None and not torch.equal(dx, dx_cached)
    assert (dx - dx_cached).norm() < 0.1 * dx.norm()


def test_scaled_activations_cache_nothing() -> None:
    with pytest.raises(TypeError, match="cache_quantized_input"):
        ops.ScaledSwiGLU(cache_quantized_input=True)  # type: ignore[call-arg]


# Kernel functions


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_backward_gives_the_activation_again_bit_for_bit(
    spec: Activation, dtype: torch.dtype, scaled: bool, device: str
) -> None:
    h = torch.randn(33, 40, dtype=dtype, device=device)
    scales = torch.rand(33, device=device) if scaled else None
    act = activation(h, spec, scales)
    for need_dh in (True, False):
        again = dactivation(torch.randn_like(act), h, spec, scales, need_dh=need_dh, need_act=True)[2]
        assert_same_bits({"act": again}, {"act": act})


@pytest.mark.parametrize("spec", SPECS)
def test_only_what_is_needed_is_computed_and_it_does_not_depend_on_the_rest(spec: Activation) -> None:
    h, scales = torch.randn(9, 16, dtype=torch.bfloat16), torch.rand(9)
    dact = torch.randn_like(activation(h, spec))
    names = ("need_dh", "need_dscales", "need_act")
    everything = dactivation(dact, h, spec, scales, need_dh=True, need_dscales=True, need_act=True)
    for flags in itertools.product((False, True), repeat=3):
        some = dactivation(dact, h, spec, scales, **dict(zip(names, flags, strict=True)))
        for flag, part, whole in zip(flags, some, everything, strict=True):
            assert (part is not None) == flag
            assert part is None or torch.equal(part, whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("spec", SPECS)
def test_results_are_those_of_float32_rounded_once(spec: Activation, dtype: torch.dtype) -> None:
    h, scales = torch.randn(33, 40).to(dtype), torch.rand(33)
    dact = torch.randn_like(activation(h, spec))
    rounded = {"act": activation(h, spec, scales), "dh": dactivation(dact, h, spec, scales)[0]}
    wide = {"act": activation(h.float(), spec, scales), "dh": dactivation(dact.float(), h.float(), spec, scales)[0]}
    assert_same_bits(rounded, {name: tensor.to(dtype) for name, tensor in wide.items()})


@given(data=st.data())
def test_activation_agrees_with_its_reference(data: st.DataObject) -> None:
    size = data.draw(st.one_of(st.none(), st.integers(1, 5)))
    spec = Activation(
        data.draw(st.sampled_from(KINDS)),
        limit=data.draw(st.floats(0.1, 10)),
        alpha=data.draw(st.floats(-2, 2)),
        glu_linear_offset=data.draw(st.floats(-2, 2)),
        beta1=data.draw(st.floats(0.1, 30)),
        beta2=data.draw(st.floats(0.1, 30)),
        glu_interleave_size=size,
    )
    features = data.draw(st.integers(0, 4)) * 2 * (size or 1)
    h = torch.randn(*data.draw(st.lists(st.integers(0, 5), max_size=3)), features, dtype=torch.float64)
    scales = torch.randn(h.shape[:-1], dtype=torch.float64) if data.draw(st.booleans()) else None
    wanted = [h.requires_grad_()] if scales is None else [h.requires_grad_(), scales.requires_grad_()]
    expected = activation_ref(h, spec, scales)
    dact = torch.randn_like(expected)
    d_wanted = torch.autograd.grad(expected, wanted, dact)
    with torch.no_grad():
        act = activation(h, spec, scales)
        dh, dscales, _ = dactivation(dact, h, spec, scales, need_dscales=scales is not None)
    actual = {"act": act, "dh": dh, "dscales": dscales}
    assert_close(actual, dict(zip(actual, (expected, *d_wanted, None), strict=False)), floor=1e-2)


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.ClampedSwiGLU(limit=0), "limit is 0, but must be finite and above 0"),
        (lambda: ops.ClampedSwiGLU(limit=-1.0), "limit is -1.0, but must be"),
        (lambda: ops.ScaledClampedQGeGLU(limit=float("inf")), "limit is inf, but must be"),
        (lambda: ops.ClampedSwiGLU(limit=float("nan")), "limit is nan, but must be"),
        (lambda: ops.ClampedSwiGLU(alpha=float("inf")), "alpha is inf, but must be finite"),
        (
            lambda: ops.ScaledClampedQGeGLU(glu_linear_offset=float("nan")),
            "glu_linear_offset is nan, but must be",
        ),
        (lambda: ops.SwiGLU(glu_interleave_size=0), "glu_interleave_size is 0, but must be positive. Give None"),
        (lambda: ops.ScaledSwiGLU(-32), "glu_interleave_size is -32, but must be positive"),
        (lambda: ops.SiTUGLU(beta1=0.0), "beta1 is 0.0, but must be finite and above 0"),
        (lambda: ops.SiTUGLU(beta2=float("inf")), "beta2 is inf, but must be finite and above 0"),
        (lambda: ops.ScaledSiTUGLU(beta1=-1.0), "beta1 is -1.0, but must be finite and above 0"),
        (lambda: ops.ScaledSiTUGLU(beta2=float("nan")), "beta2 is nan, but must be finite and above 0"),
        (lambda: Activation("mish"), "kind is 'mish', but must be one of gelu, qgelu, relu"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("operation", "shape", "message"),
    [
        (ops.SwiGLU(), (4, 7), "x has 7 features, but 2 must divide them"),
        (
            ops.SwiGLU(glu_interleave_size=4),
            (4, 12),
            r"x has 12 features, but 2 \* glu_interleave_size = 8 must",
        ),
        (ops.GEGLU(), (4, 7), "x has 7 features, but 2 must divide them"),
        (ops.ClampedSwiGLU(), (4, 1), "x has 1 features, but 2 must divide them"),
    ],
)
def test_features_that_do_not_divide_are_refused(operation: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=rf"In operation 0 \({type(operation).__name__}\): {message}"):
        operation(torch.ones(shape))


@pytest.mark.parametrize("scales", [(3,), (4, 1), (4, 8), ()], ids=str)
@pytest.mark.parametrize("operation", [ops.ScaledSwiGLU(), ops.ScaledClampedQGeGLU(), ops.ScaledSReLU()], ids=str)
def test_scales_of_another_shape_are_refused(operation: Any, scales: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"scales has shape \[.*\], but x has shape \[4, 8\]\. Give one scale a row: \[4\]"
    ):
        operation(torch.ones(4, 8), scales=torch.ones(scales))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("operation", [ops.ScaledSwiGLU(), ops.ScaledClampedQGeGLU(), ops.ScaledSReLU()], ids=str)
def test_scales_in_which_nothing_is_computed_are_refused(operation: Any, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"scales is {dtype}, but must be bfloat16, .*Give scales.float\(\)"):
        operation(torch.ones(4, 8), scales=torch.ones(4).to(dtype))


def test_missing_scales_are_named() -> None:
    with pytest.raises(ValueError, match="missing: 'scales'"):
        Sequential(ops.ScaledSwiGLU())(torch.ones(4, 8))


def test_gated_activations_are_the_others() -> None:
    assert {kind for kind in KINDS if not Activation(kind).gated} == {"gelu", "qgelu", "relu", "silu", "srelu"}
