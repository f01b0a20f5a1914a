"""What may go into a pipeline as x: the same for a lone operation, in a Sequential, and behind an ordinary module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fuser import BasicOperation, Sequential, autocast, lora, ops

WIDTH = 8
SIZES = {"split_sizes": [2, 1]}
COMPUTING: dict[str, tuple[Callable[[], BasicOperation], dict[str, Any]]] = {
    "Linear": (lambda: ops.Linear(WIDTH, WIDTH), {}),
    "GroupedLinear": (lambda: ops.GroupedLinear(2, WIDTH, WIDTH), SIZES),
    "Bias": (lambda: ops.Bias(WIDTH), {}),
    "RMSNorm": (lambda: ops.RMSNorm(WIDTH), {}),
    "LayerNorm": (lambda: ops.LayerNorm(WIDTH), {}),
    "L2Normalization": (ops.L2Normalization, {}),
    "Router": (lambda: ops.Router(WIDTH, 4, 2), {}),
    "Dropout": (lambda: ops.Dropout(0.5), {}),
    "ConstantScale": (lambda: ops.ConstantScale(0.5), {}),
    "GELU": (ops.GELU, {}),
    "ReLU": (ops.ReLU, {}),
    "SwiGLU": (ops.SwiGLU, {}),
    "ScaledSReLU": (ops.ScaledSReLU, {"scales": torch.ones(3)}),
    "AddExtraInput": (ops.AddExtraInput, {"extra": torch.ones(3, WIDTH)}),
    "Quantize": (ops.Quantize, {}),
}
MOVING: dict[str, tuple[Callable[[], BasicOperation], dict[str, Any]]] = {
    "Identity": (ops.Identity, {}),
    "Reshape": (lambda: ops.Reshape((-1,)), {}),
    "MakeExtraOutput": (ops.MakeExtraOutput, {}),
    "Dispatch": (lambda: ops.Dispatch(2), {"probs": torch.ones(3, 1), "indices": torch.tensor([[0], [1], [0]])}),
}
DOORS = ("alone", "sequential", "behind a module")


def call(door: str, operation: BasicOperation, x: Any, extras: Mapping[str, Any]) -> Any:
    if door == "behind a module":
        return Sequential(Returns(x), operation)(torch.ones(3, WIDTH), **extras)
    return (operation if door == "alone" else Sequential(operation))(x, **extras)


class Returns(nn.Module):
    """An ordinary module that returns something else than it was given."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value


@pytest.mark.parametrize("name", [*COMPUTING, *MOVING])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_an_imaginary_part_is_not_dropped(door: str, name: str, dtype: torch.dtype) -> None:
    make, extras = (COMPUTING | MOVING)[name]
    with pytest.raises(TypeError, match=f"x is {dtype}, but operations compute in real numbers. Give its real"):
        call(door, make(), torch.ones(3, WIDTH, dtype=dtype), extras)


@pytest.mark.parametrize("name", [*COMPUTING, *MOVING])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "make_x", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn], ids=["coo", "csr", "mkldnn"]
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_an_x_that_is_not_dense_is_refused(door: str, name: str, make_x: Callable[[Tensor], Tensor]) -> None:
    make, extras = (COMPUTING | MOVING)[name]
    x = make_x(torch.ones(3, WIDTH))
    with pytest.raises(TypeError, match=rf"x is in the layout {x.layout}, but .* dense tensors. Give x.to_dense\(\)"):
        call(door, make(), x, extras)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", ["split_sizes", "scales"])
@pytest.mark.parametrize("make", [Tensor.to_sparse, Tensor.to_mkldnn], ids=["coo", "mkldnn"])
def test_an_extra_tensor_that_is_not_dense_is_refused(make: Callable[[Tensor], Tensor], name: str, needs_grad) -> None:
    model = Sequential(ops.GroupedLinear(2, WIDTH, 2 * WIDTH), ops.ScaledSwiGLU())
    extras = {"split_sizes": torch.tensor([1, 2]), "scales": torch.ones(3)}
    extras[name] = make(extras[name].float() if make is Tensor.to_mkldnn else extras[name])
    with (
        torch.set_grad_enabled(needs_grad),
        pytest.raises(TypeError, match=rf"{name} is in the .* {name}.to_dense\(\)"),
    ):
        model(torch.ones(3, WIDTH), **extras)


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_what_computes_in_floating_point_takes_no_integers(door: str, name: str, dtype: torch.dtype) -> None:
    make, extras = COMPUTING[name]
    message = f"x is {dtype}, but {name} computes in floating point. Convert it: x.to"
    for recipe in (None, "mxfp8"):
        with pytest.raises(TypeError, match=message), autocast(recipe):
            call(door, make(), torch.ones(3, WIDTH, dtype=dtype), extras)


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("door", DOORS)
def test_nothing_is_computed_in_float8(door: str, name: str) -> None:
    make, extras = COMPUTING[name]
    x = torch.ones(3, WIDTH, dtype=torch.float8_e4m3fn)
    message = f"x is torch.float8_e4m3fn, but {name} computes in bfloat16, .* times its scale if it has one"
    for recipe in (None, "mxfp8"):
        with pytest.raises(TypeError, match=message), autocast(recipe):
            call(door, make(), x, extras)


@pytest.mark.parametrize("recipe", ["high_precision", "fp8_current"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["Linear", "GroupedLinear", "Bias", "RMSNorm", "Router"])
def test_parameters_loaded_in_a_dtype_that_is_not_computed_in_are_refused(
    name: str, dtype: torch.dtype, recipe: str
) -> None:
    make, extras = COMPUTING[name]
    model = Sequential(make())
    codes = {key: value.to(dtype) for key, value in model.state_dict().items()}
    model.requires_grad_(False).load_state_dict(codes, assign=True)
    message = rf"{name}\.\w+ is {dtype}, but parameters must be .* times their scale"
    with pytest.raises(TypeError, match=message), autocast(recipe):
        model(torch.ones(3, WIDTH), **extras)


class Ordered(BasicOperation):
    """y = x[:, order]"""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        return x[:, self.order], {}

    def fuser_backward(self, ctx: Any, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return dy[:, self.order], {}, {}


def test_integers_are_refused_in_parametrized_operations_and_adapters() -> None:
    parametrized, adapted = ops.Linear(WIDTH, WIDTH), Sequential(ops.Linear(WIDTH, WIDTH))
    nn.utils.parametrizations.weight_norm(parametrized)
    parametrized.bias = nn.Parameter(torch.ones(WIDTH, dtype=torch.int32), requires_grad=False)
    lora.add(adapted, rank=2, alpha=2)
    adapted[0].lora_A.weight = nn.Parameter(torch.ones(2, WIDTH, dtype=torch.int32), requires_grad=False)
    for model, name in ((Sequential(parametrized), "bias"), (adapted, "lora_A.weight")):
        with pytest.raises(TypeError, match=rf"\.{name} is torch.int32, but parameters must be"):
            model(torch.ones(3, WIDTH))


def test_indices_are_not_what_is_planned_for() -> None:
    layer = (ops.GroupedLinear(2, WIDTH, 2 * WIDTH), ops.ScaledSwiGLU(), ops.GroupedLinear(2, WIDTH, WIDTH))
    model = Sequential(Ordered(), *layer)
    assert "int64" not in model.explain(device="cuda") and "float32" in model.explain(device="cuda")


def test_indices_among_the_parameters_of_ones_own_operation_leave_x_its_dtype() -> None:
    linear = ops.Linear(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH, requires_grad=True)
    for operations in ([Ordered()], [linear, Ordered()], [Ordered(), linear], [linear, Ordered(), linear]):
        x.grad = None
        y = Sequential(*operations)(x)
        y.sum().backward()
        wanted = x.detach().clone().requires_grad_()
        expected = wanted
        for operation in operations:
            flips = isinstance(operation, Ordered)
            expected = expected.flip(1) if flips else nn.functional.linear(expected, linear.weight, linear.bias)
        expected.sum().backward()
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(x.grad, wanted.grad)


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_what_moves_numbers_takes_integers(door: str, name: str, dtype: torch.dtype) -> None:
    make, extras = MOVING[name]
    x = torch.arange(3 * WIDTH).view(3, WIDTH).to(dtype)
    y = call(door, make(), x, extras)
    rows = x[[0, 2, 1]] if name == "Dispatch" else x
    assert y.dtype == dtype and torch.equal(y.flatten(), rows.flatten())


def test_integers_do_not_reach_an_operation_behind_one_that_takes_them() -> None:
    model = Sequential(ops.Identity(), ops.Reshape((3, WIDTH)), ops.Linear(WIDTH, 4))
    with pytest.raises(TypeError, match="x is torch.int64, but Linear computes in floating point"):
        model(torch.ones(3 * WIDTH, dtype=torch.int64))
    model(torch.ones(3 * WIDTH))
    with pytest.raises(TypeError, match="x is torch.int64, but Linear computes in floating point"):
        model(torch.ones(3 * WIDTH, dtype=torch.int64))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("x", [[1.0], None, 2.0, (torch.ones(3, WIDTH),)], ids=lambda x: type(x).__name__)
def test_only_a_tensor_is_x(door: str, x: Any) -> None:
    with pytest.raises(TypeError, match=f"x is a {type(x).__name__}. Give a tensor"):
        call(door, ops.GELU(), x, {})


@pytest.mark.parametrize("door", ["alone", "sequential"])
@pytest.mark.parametrize(
    ("make", "name"), [(ops.AddExtraInput, "extra"), (ops.ScaledSReLU, "scales")], ids=["AddExtraInput", "ScaledSReLU"]
)
def test_an_imaginary_part_of_an_extra_input_is_not_dropped(door: str, make: Any, name: str) -> None:
    shape = (3, WIDTH) if name == "extra" else (3,)
    with pytest.raises(TypeError, match=f"{name} is torch.complex64, but operations compute in real numbers"):
        call(door, make(), torch.ones(3, WIDTH), {name: torch.ones(shape) * 1j})


def distributed(tensor: Tensor) -> Any:
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("door", DOORS)
def test_a_dtensor_is_refused_by_its_name(door: str, recipe: str | None) -> None:
    message = "{} is a DTensor, but operations compute on plain tensors. Take to_local"
    linear, x = ops.Linear(WIDTH, WIDTH), torch.ones(3, WIDTH)
    with autocast(recipe):
        call(door, linear, x, {})
        with pytest.raises(TypeError, match=message.format("x")):
            call(door, linear, distributed(x), {})
        linear.weight = nn.Parameter(distributed(linear.weight.detach()))
        with pytest.raises(TypeError, match=message.format("Linear.weight")):
            call(door, linear, x, {})
        with pytest.raises(TypeError, match=message.format("scales")):
            call(door, ops.ScaledSReLU(), x, {"scales": distributed(torch.ones(3))})


PARTS = (torch.ones(1, WIDTH), torch.ones(2, WIDTH))
OF_JAGGED = r"{0} is a nested tensor \(torch.jagged\) of 2 parts, .* Give {0}.values\(\).* split_sizes={0}.offsets"
OF_STRIDED = r"x is a nested tensor \(torch.strided\) of 2 parts, .* Give torch.cat\(x.unbind\(\)\).* split_sizes=\[len"


def jagged() -> Tensor:
    return torch.nested.nested_tensor_from_jagged(torch.cat(PARTS), torch.tensor([0, 1, 3]))


@pytest.mark.parametrize("name", {**COMPUTING, **MOVING})
@pytest.mark.parametrize("door", DOORS)
def test_a_jagged_x_is_refused_by_a_sentence(door: str, name: str) -> None:
    make, extras = {**COMPUTING, **MOVING}[name]
    with pytest.raises(TypeError, match=OF_JAGGED.format("x")):
        call(door, make(), jagged(), extras)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_nested_tensors_and_nested_extra_inputs_are_refused_too() -> None:
    with pytest.raises(TypeError, match=OF_STRIDED):
        ops.SwiGLU()(torch.nested.nested_tensor(list(PARTS)))
    with pytest.raises(TypeError, match=OF_JAGGED.format("extra")):
        ops.AddExtraInput()(torch.ones(3, WIDTH), extra=jagged())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("leads", [False, True])
def test_a_jagged_x_of_a_compiled_model_is_refused_by_the_same_sentence(leads: bool) -> None:
    # Frozen: where a graph breaks, torch reads the .grad of a tensor that is no leaf, and warns.
    model = Sequential(*[nn.Linear(WIDTH, WIDTH)] * leads, ops.SwiGLU()).requires_grad_(False)
    for fullgraph, error in ((False, TypeError), (True, torch._dynamo.exc.Unsupported)):
        torch.compiler.reset()
        with pytest.raises(error, match=OF_JAGGED.format("x")):
            torch.compile(model, backend="eager", fullgraph=fullgraph)(jagged())


def test_the_mend_of_a_jagged_x_gives_each_part_what_it_gives_alone() -> None:
    x, experts = jagged(), ops.GroupedLinear(2, WIDTH, 4)
    y = torch.nested.nested_tensor_from_jagged(experts(x.values(), split_sizes=x.offsets().diff()), x.offsets())
    for part, alone, weight, bias in zip(y.unbind(), PARTS, experts.weight, experts.bias, strict=True):
        torch.testing.assert_close(part, alone @ weight.T + bias)


def call_experts(device: str, name: str, value: Callable[[Tensor], Any]) -> Tensor:
    """y of a layer of experts, with value(tensor) in place of this extra input."""
    extras = {"probs": torch.ones(3, 1), "indices": torch.tensor([[0], [1], [0]]), "extra": torch.ones(3, WIDTH)}
    given = {key: tensor.to(device) for key, tensor in extras.items()}
    experts = ops.GroupedLinear(2, WIDTH, WIDTH, device=device)
    model = Sequential(ops.Dispatch(2), experts, ops.ScaledSReLU(), ops.Combine(), ops.AddExtraInput())
    return model(torch.ones(3, WIDTH, device=device), **{**given, name: value(given[name])})


@pytest.mark.parametrize("name", ["probs", "indices", "extra"])
def test_an_extra_input_on_another_device_than_x_is_refused(name: str) -> None:
    """Sums with what lies on the meta device would be numbers without it, or anything."""
    message = rf"In operation . \(\w+\): x is on cpu, but the extra input '{name}' is on meta. Move one of them"
    with pytest.raises(ValueError, match=message):
        call_experts("cpu", name, lambda tensor: tensor.to("meta"))
    assert call_experts("meta", name, torch.zeros_like).is_meta


@pytest.mark.parametrize("name", ["probs", "indices", "extra"])
@pytest.mark.parametrize("value", [None, 0.5, [[0.5], [0.5], [0.5]], np.ones((3, 1))], ids=lambda v: type(v).__name__)
def test_an_extra_input_is_a_tensor(name: str, value: Any) -> None:
    given = "None" if value is None else f"a {type(value).__name__}"
    with pytest.raises(TypeError, match=f"The extra input '{name}' is {given}, which is no tensor. Give one"):
        call_experts("cpu", name, lambda tensor: value)


@pytest.mark.parametrize("shape", [(2, 2, WIDTH), (2,)])
def test_what_split_sizes_divide_is_named_where_x_is_no_matrix(shape: tuple[int, ...]) -> None:
    message = rf"but x has only 2 rows.*x has shape {re.escape(str(list(shape)))}.*flatten leading dimensions"
    with pytest.raises(ValueError, match=message):
        ops.GroupedLinear(2, WIDTH, WIDTH)(torch.ones(shape), split_sizes=[2, 2])


@pytest.mark.parametrize("door", ["alone", "sequential"])
@pytest.mark.parametrize("outputs", ["extra", None, 3])
def test_outputs_are_names(door: str, outputs: Any) -> None:
    message = rf"outputs is {outputs!r}, but must be names of extra outputs. Pass a tuple of strings"
    with pytest.raises(TypeError, match=message):
        call(door, ops.MakeExtraOutput("extra"), torch.ones(3, WIDTH), {"outputs": outputs})


class SeesSigns(BasicOperation):
    """y = x * other. Notes which tensors it gets have other signs in memory than their own."""

    extra_inputs = {"other": Tensor}
    extra_outputs = {"more": Tensor}

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        self.seen += x.is_neg(), extras["other"].is_neg()
        ctx.kept = x, extras["other"]
        return x * extras["other"], {"more": x + 0}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        self.seen += dy.is_neg(), d_extra_outputs["more"].is_neg()
        x, other = ctx.kept
        return dy * other + d_extra_outputs["more"], {}, {"other": dy * x}


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "Sequential"])
def test_signs_are_those_in_memory(alone):
    """Of z.conj().imag torch keeps the other ones there, and a bit; kernels read memory."""
    one = SeesSigns()
    model = one if alone else Sequential(one)
    z, w, v, u = (torch.randn(3, WIDTH, dtype=torch.complex64, requires_grad=i < 2) for i in range(4))
    given = [t.conj().imag for t in (z, w, v, u)]
    assert all(t.is_neg() for t in given)
    y, extra = model(given[0], other=given[1], outputs=("more",))
    found = torch.autograd.grad((y, extra["more"]), (z, w), (given[2], given[3]))
    assert len(one.seen) == 4 and not any(one.seen)
    expected = (given[0] * given[1], given[0] + 0)
    assert torch.equal(y, expected[0])
    for mine, other in zip(found, torch.autograd.grad(expected, (z, w), (given[2], given[3])), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "Sequential"])
def test_zero_tensors_of_autograd_get_memory(alone):
    one = SeesSigns()
    model = one if alone else Sequential(one)
    x, other = (torch.randn(3, WIDTH, requires_grad=True) for _ in range(2))
    y, extra = model(x, other=other, outputs=("more",))
    nothing = torch._efficientzerotensor(y.shape)
    one.fuser_backward = lambda ctx, dy, d_extra: given.extend([dy, d_extra["more"]]) or (dy, {}, {"other": dy})
    given: list[torch.Tensor] = []
    found = torch.autograd.grad((y, extra["more"]), (x, other), (nothing, nothing))
    assert len(given) == 2 and all(t.data_ptr() and not t.any() for t in given)
    assert not any(grad.any() for grad in found)
