"""What every operation promises: any strides, weights made in inference mode, and selective checkpointing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fuser import Sequential, autocast, lora, ops
from tests.check_operation import DEVICES
from tests.pairwise import rest
from tests.reference import ROUNDED_OFTEN, assert_close, assert_same_bits, gradients

WIDTH = 32
QUANTIZING = ["mxfp8", "fp8_current", "fp8_block", "nvfp4", "fp8_delayed"]


class Case(NamedTuple):
    """make: the module for so many groups. extras: which it takes, by name."""

    make: Callable[[int], Sequential]
    extras: tuple[str, ...] = ()


def mlp(inner: int, **settings: Any) -> Callable[[int], Sequential]:
    return lambda groups: Sequential(
        ops.GroupedLinear(groups, WIDTH, 2 * inner),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(groups, inner, WIDTH, scale_bias=True),
        **settings,
    )


def one(kind: Any, *args: Any, **kwargs: Any) -> Callable[[int], Sequential]:
    return lambda groups: Sequential(kind(*args, **kwargs))


def grouped(out_features: int = WIDTH, path: str | None = None, **kwargs: Any) -> Callable[[int], Sequential]:
    return lambda groups: Sequential(ops.GroupedLinear(groups, WIDTH, out_features, **kwargs), path=path)


def adapted(make: Callable[[int], Sequential], frozen: bool) -> Callable[[int], Sequential]:
    """With adapters that are not zero."""

    def made(groups: int) -> Sequential:
        module = make(groups)
        lora.add(module, 4)
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.2)
        return module if frozen else module.requires_grad_(True)

    return made


WEIGHTED = {
    "Linear": Case(one(ops.Linear, WIDTH, WIDTH)),
    "Linear without bias": Case(one(ops.Linear, WIDTH, WIDTH, bias=False)),
    "GroupedLinear": Case(grouped(), ("split_sizes",)),
    "GroupedLinear without bias": Case(grouped(bias=False), ("split_sizes",)),
    "GroupedLinear, one feature": Case(grouped(1), ("split_sizes",)),
    "GroupedLinear, a weight a group": Case(grouped(bias=False, stacked=False), ("split_sizes",)),
    "GroupedLinear, scaled bias": Case(grouped(scale_bias=True), ("split_sizes", "scales")),
    "GroupedLinear, split": Case(grouped(path="split"), ("split_sizes",)),
    "GroupedMLP": Case(mlp(32), ("split_sizes", "scales")),
    "GroupedMLP, op by op": Case(mlp(8), ("split_sizes", "scales")),
    "GroupedMLP, split": Case(mlp(32, path="split"), ("split_sizes", "scales")),
    "GroupedMLP, unfused": Case(mlp(32, fusions=()), ("split_sizes", "scales")),
    "Linear, adapter": Case(adapted(one(ops.Linear, WIDTH, WIDTH), frozen=True)),
    "grouped MLP, adapters": Case(adapted(mlp(32), frozen=True), ("split_sizes", "scales")),
    "grouped MLP, adapters and weights": Case(adapted(mlp(32), frozen=False), ("split_sizes", "scales")),
    "RMSNorm": Case(one(ops.RMSNorm, WIDTH)),
    "LayerNorm": Case(one(ops.LayerNorm, WIDTH)),
    "Bias": Case(one(ops.Bias, WIDTH)),
    "Linear, Bias, GELU": Case(lambda _: Sequential(ops.Linear(WIDTH, WIDTH), ops.Bias(WIDTH), ops.GELU())),
    "Linear and residual": Case(
        lambda _: Sequential(ops.MakeExtraOutput(), ops.Linear(WIDTH, WIDTH), ops.Bias(WIDTH), ops.AddExtraInput())
    ),
    "Linear, scale, residual": Case(
        lambda _: Sequential(ops.Linear(WIDTH, WIDTH), ops.ConstantScale(0.3), ops.AddExtraInput()), ("extra",)
    ),
    "MoE layer": Case(
        lambda _: Sequential(
            ops.Router(WIDTH, 4, 2), ops.Dispatch(4), ops.GroupedLinear(4, WIDTH, 2 * WIDTH), ops.ScaledSwiGLU(),
            ops.GroupedLinear(4, WIDTH, WIDTH), ops.Combine(),
        )
    ),
}  # fmt: skip
_PLAIN = ["GLU", "GEGLU", "ReGLU", "SReGLU", "QGEGLU", "SwiGLU", "ClampedSwiGLU", "SiTUGLU"]
_PLAIN += ["GELU", "QGELU", "ReLU", "SiLU", "SReLU", "Identity", "L2Normalization"]
_SCALED = ["ScaledSwiGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU"]
WITHOUT_WEIGHTS = {
    **{name: Case(one(getattr(ops, name))) for name in _PLAIN},
    **{name: Case(one(getattr(ops, name)), ("scales",)) for name in _SCALED},
    "ConstantScale": Case(one(ops.ConstantScale, 0.3)),
    "Dropout": Case(one(ops.Dropout, 0.0)),
    "Reshape": Case(one(ops.Reshape, (-1, WIDTH // 2))),
    "AddExtraInput": Case(one(ops.AddExtraInput), ("extra",)),
}
OPERATIONS = {**WEIGHTED, **WITHOUT_WEIGHTS}


def split_sizes(rows: int) -> list[int]:
    return [rows // 2, 0, rows - rows // 2]


def extras_of(case: Case, rows: int, device: str = "cpu") -> dict[str, Any]:
    shapes = {"scales": (rows,), "extra": (rows, WIDTH)}
    return {n: split_sizes(rows) if n == "split_sizes" else torch.randn(shapes[n], device=device) for n in case.extras}


def run(
    module: Sequential, x: Tensor, extras: Mapping[str, Any], dy: Callable[[Tensor], Tensor], recipe: Any = None,
    call: Callable[..., Any] | None = None,
) -> dict[str, Tensor | None]:  # fmt: skip
    """y, and the gradients of all that wants one. dy: of y. call: instead of the module."""
    torch.manual_seed(0)  # of stochastic rounding
    module.zero_grad()
    x = x.detach().requires_grad_()
    given = {n: t.detach().requires_grad_() if isinstance(t, Tensor) else t for n, t in extras.items()}
    with autocast(recipe=recipe):
        y = (call or module)(x, **given)
        y.backward(dy(y))
    tensors = {"x": x} | {n: t for n, t in given.items() if isinstance(t, Tensor)} | dict(module.named_parameters())
    return {"y": y.detach()} | gradients(tensors)


def ones_like(y: Tensor) -> Tensor:
    return torch.ones_like(y)


# ---------------------------------------------------------------------------------------------------------- strides


def _within(t: Tensor, begin: int) -> Tensor:
    wider = t.new_full((*t.shape[:-1], t.shape[-1] + 5), 3.0)
    wider[..., begin : begin + t.shape[-1]] = t
    return wider[..., begin : begin + t.shape[-1]]


def _every_second(t: Tensor, axis: int) -> Tensor:
    return t.repeat_interleave(2, axis)[(slice(None),) * axis + (slice(None, None, 2),)]


def _with_odd_strides_of_one(t: Tensor) -> Tensor:
    strides = [1 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, strides)


# The same values, or one row or number of them everywhere, in memory of another form.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "slice of wider rows": lambda t: _within(t, 0),
    "slice off alignment": lambda t: _within(t, 3),
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "every second column": lambda t: _every_second(t, t.dim() - 1),
    "every second row": lambda t: _every_second(t, 0),
    "strides of 1 where a size is 1": _with_odd_strides_of_one,
    "one row expanded": lambda t: t[:1].expand(t.shape),
    "one number expanded": lambda t: t.new_full((), 0.75).expand(t.shape),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [0, 1, rest(2), 9])
@pytest.mark.parametrize("name", OPERATIONS)
def test_strides_change_nothing(name: str, rows: int, device: str) -> None:
    case = OPERATIONS[name]
    module = case.make(3).to(device)
    x, extras = torch.randn(rows, WIDTH, device=device), extras_of(case, rows, device)
    noise = torch.randn(rows, 2 * WIDTH, device=device)

    def relaid(how: Callable[[Tensor], Tensor], tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {n: how(t) if isinstance(t, Tensor) else t for n, t in tensors.items()}

    for of_inputs, of_dy in itertools.chain(
        ((how, torch.Tensor.contiguous) for how in STRIDES.values()),
        ((torch.Tensor.contiguous, how) for how in STRIDES.values()),
        ((how, how) for how in STRIDES.values()),
    ):
        given = relaid(of_inputs, {"x": x, **extras})
        dense = relaid(lambda t: t.clone(memory_format=torch.contiguous_format), given)

        def dy(y: Tensor, of_dy: Callable[[Tensor], Tensor] = of_dy) -> Tensor:
            return of_dy(noise.flatten()[: y.numel()].view(y.shape))

        want = run(module, dense.pop("x"), dense, lambda y, dy=dy: dy(y).contiguous().clone())
        assert_close(run(module, given.pop("x"), given, dy), want, ROUNDED_OFTEN)


@pytest.mark.pairwise
@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("how", STRIDES)
def test_strides_change_nothing_under_recipes(how: str, rows: int, recipe: str) -> None:
    for name in ("Linear", "GroupedLinear", "GroupedMLP", "GroupedMLP, split", "MoE layer"):
        case = OPERATIONS[name]
        x, extras = torch.randn(rows, WIDTH), extras_of(case, rows)
        relaid = {n: STRIDES[how](t) if isinstance(t, Tensor) else t for n, t in {"x": x, **extras}.items()}
        dense = {n: t.contiguous().clone() if isinstance(t, Tensor) else t for n, t in relaid.items()}
        module = case.make(3)
        state = {n: t.clone() for n, t in module.state_dict().items()}
        want = run(module, dense.pop("x"), dense, lambda y: torch.full_like(y, 0.75), recipe)
        module.load_state_dict(state)
        got = run(module, relaid.pop("x"), relaid, lambda y: y.new_full((), 0.75).expand(y.shape), recipe)
        assert_close(got, want, ROUNDED_OFTEN)


def test_a_single_row_of_a_wider_tensor_is_multiplied() -> None:
    op, x = ops.GroupedLinear(2, 4, 4, bias=False), torch.randn(1, 9)[:, :4]
    assert_close({"y": op(x, split_sizes=[1, 0])}, {"y": x @ op.weight[0].T})


# --------------------------------------------------------------------------------------------- selective checkpointing

SAVED = {
    "grouped": [torch.ops.aten._grouped_mm.default],
    "dense": [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("recipe", [None, *QUANTIZING])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("name", WEIGHTED)
def test_selective_checkpointing_of_products_changes_no_bit(name: str, saved: str, recipe: str | None) -> None:
    case = WEIGHTED[name]
    module, rows = case.make(3), 7
    x, extras = torch.randn(rows, WIDTH), extras_of(case, rows)
    if "split_sizes" in extras:
        extras["split_sizes"] = split_sizes(rows - 2)  # and rows of no group
    state = {n: t.clone() for n, t in module.state_dict().items()}
    want = run(module, x, extras, ones_like, recipe)
    module.load_state_dict(state)

    def recomputed(x: Tensor, **given: Any) -> Any:
        contexts = functools.partial(create_selective_checkpoint_contexts, SAVED[saved])
        return checkpoint(lambda x: module(x, **given), x, use_reentrant=False, context_fn=contexts)

    assert_same_bits(run(module, x, extras, ones_like, recipe, recomputed), want)


# ------------------------------------------------------------------------------------------- weights of inference mode


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", [None, *QUANTIZING])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_of_inference_mode_work_as_others(name: str, recipe: str | None, device: str) -> None:
    case, rows = WEIGHTED[name], 7
    ordinary = case.make(3).to(device)
    with torch.inference_mode():
        module = case.make(3).to(device)
        module.load_state_dict(ordinary.state_dict())
    assert all(p.is_inference() for p in module.parameters())
    x, extras = torch.randn(rows, WIDTH, device=device), extras_of(case, rows, device)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode(), autocast(recipe=recipe):
            assert_same_bits({"y": module(x, **extras)}, {"y": ordinary(x, **extras)})
    for frozen in (False, True):
        with torch.inference_mode():
            module.requires_grad_(not frozen)
        ordinary.requires_grad_(not frozen)
        want = run(ordinary, x, extras, ones_like, recipe)
        assert_same_bits(run(module, x, extras, ones_like, recipe), want)


def test_a_state_of_inference_mode_is_taken_over_in_training() -> None:
    modules = [Sequential(ops.Linear(WIDTH, WIDTH)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    x = torch.randn(3, WIDTH)
    for module, mode in zip(modules, (torch.no_grad, torch.inference_mode), strict=True):
        with mode(), autocast(recipe="fp8_delayed"):
            module(x)
        if mode is torch.inference_mode:
            with mode():  # as a checkpoint loaded, or a model moved, there
                for name, buffer in list(module[0]._buffers.items()):
                    module[0]._buffers[name] = buffer.clone()
    results = [[run(module, x, {}, ones_like, "fp8_delayed") for _ in range(3)] for module in modules]
    for ours, wanted in zip(*results, strict=True):
        assert_same_bits(ours, wanted)
