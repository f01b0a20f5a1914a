"""torch.func: tensors that stand in for parameters for one call, their gradients, grad and vjp.

The reference is the same computation in modules of torch, in float64.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fuser import Sequential, autocast, ops, prepare
from tests.computed_cases import F64, MODELS, K, N, assert_close, example, paired
from tests.reference import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # what forward mode imports


def called_with(module: nn.Module, kind: str, **extras: Any) -> dict[str, Tensor | None]:
    """The gradients of tensors that take the place of the parameters for one call."""
    torch.manual_seed(4)
    leaves = {name: torch.randn_like(p).requires_grad_() for name, p in module.named_parameters()}
    given = {
        "leaves": leaves,
        "computed": {name: leaf.sin() for name, leaf in leaves.items()},
        "parameters": {name: nn.Parameter(leaf.detach()) for name, leaf in leaves.items()},
    }[kind]
    y = functional_call(module, given, (example(),), extras)
    assert all(p.grad is None for p in module.parameters())
    y.square().sum().backward()
    assert all(p.grad is None for p in module.parameters())
    return {"y": y.detach()} | {name: (given if kind == "parameters" else leaves)[name].grad for name in given}


@pytest.mark.parametrize("kind", ["leaves", "computed", "parameters"])
@pytest.mark.parametrize("model", MODELS)
def test_tensors_given_for_one_call_get_the_gradients(model: str, kind: str) -> None:
    ours, theirs, extras = paired(model)
    assert_close(called_with(ours, kind, **extras), called_with(theirs, kind))


def test_two_calls_before_one_backward_have_their_own_weights() -> None:
    ours, theirs, _ = paired("dense")

    def both(module: nn.Module) -> dict[str, Any]:
        weights = [{n: (k + p.detach()).requires_grad_() for n, p in module.named_parameters()} for k in (1, 2)]
        sum(functional_call(module, each, (example(),)).square().sum() for each in weights).backward()
        return {f"{k}.{n}": w.grad for k, each in enumerate(weights) for n, w in each.items()}

    assert_close(both(ours), both(theirs))


def test_an_operation_alone_takes_other_weights() -> None:
    ours, theirs = ops.Linear(K, N, dtype=F64), nn.Linear(K, N, dtype=F64)
    assert_close(called_with(ours, "computed"), called_with(theirs, "computed"))


def test_a_computed_weight_changed_before_backward_is_an_error() -> None:
    operation = ops.Linear(K, N, dtype=F64)
    weight = operation.weight.detach() * 2
    x = example().requires_grad_()
    y = functional_call(operation, {"weight": weight}, (x,))
    weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# torch.func.grad and vjp


@pytest.mark.parametrize("model", MODELS)
def test_torch_func_grad_is_that_of_torch(model: str) -> None:
    ours, theirs, extras = paired(model)

    def of(module: nn.Module, **extras: Any) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(module, parameters, (x,), extras).square().sum()

        parameters = {name: p.detach() for name, p in module.named_parameters()}
        d_parameters, dx = grad(loss, (0, 1))(parameters, example())
        y, pull = vjp(lambda p: functional_call(module, p, (example(),), extras), parameters)
        return {"x": dx, "y": y} | d_parameters | {f"vjp.{n}": g for n, g in pull(torch.ones_like(y))[0].items()}

    assert_close(of(ours, **extras), of(theirs))


RECIPES = ["fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise", "nvfp4"]


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", *[pytest.param(r, marks=pytest.mark.rest) for r in RECIPES]])
def test_torch_func_grad_has_the_bits_of_backward(recipe: str) -> None:
    torch.manual_seed(0)
    model = Sequential(
        ops.RMSNorm(32), ops.Router(32, 4, topk=2), ops.Dispatch(4), ops.GroupedLinear(4, 32, 64), ops.ScaledSwiGLU(),
        ops.GroupedLinear(4, 32, 32), ops.Combine(),
    )  # fmt: skip
    x, names = torch.randn(32, 32), ("load_balancing_loss", "tokens_per_expert")

    def loss(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y, made = functional_call(model, parameters, (x,), {"outputs": names})
        return y.square().sum() + made["load_balancing_loss"], made["tokens_per_expert"]

    again = copy.deepcopy(model)
    with autocast(recipe):
        torch.manual_seed(1)
        found, tokens = grad(loss, has_aux=True)(dict(model.named_parameters()))
    with autocast(recipe):
        torch.manual_seed(1)
        y, made = again(x, outputs=names)
    (y.square().sum() + made["load_balancing_loss"]).backward()
    assert torch.equal(tokens, made["tokens_per_expert"])
    for name, parameter in again.named_parameters():
        assert torch.equal(found[name], parameter.grad), name  # type: ignore[arg-type]


def experts_and_loss() -> tuple[Sequential, Callable[[dict[str, Tensor]], Tensor]]:
    torch.manual_seed(0)
    model = Sequential(ops.GroupedLinear(4, 32, 64), ops.SwiGLU(), ops.GroupedLinear(4, 32, 32))
    x, sizes = torch.randn(32, 32), torch.tensor([10, 0, 17, 5])
    return model, lambda given: functional_call(model, given, (x,), {"split_sizes": sizes}).square().sum()


def test_a_step_of_delayed_scaling_may_end_within_the_function_that_is_differentiated() -> None:
    model, loss = experts_and_loss()
    other, loss_of_other = experts_and_loss()

    def step(given: dict[str, Tensor]) -> Tensor:
        with autocast("fp8_delayed"):
            return loss(given)

    for _ in range(2):
        found = grad(step)(dict(model.named_parameters()))
        with autocast("fp8_delayed"):
            expected = grad(loss_of_other)(dict(other.named_parameters()))
    assert_same_bits(found, expected)
    assert_same_bits(dict(model.named_buffers()), dict(other.named_buffers()))


def test_an_error_within_a_step_of_delayed_scaling_that_is_differentiated_is_the_callers() -> None:
    model, loss = experts_and_loss()

    def step(given: dict[str, Tensor]) -> Tensor:
        with autocast("fp8_delayed"):
            loss(given)
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        grad(step)(dict(model.named_parameters()))
    assert not any(history.any() for name, history in model.named_buffers() if name.endswith("amax_history"))


def test_states_that_are_given_to_a_function_that_is_differentiated_are_refused() -> None:
    model, loss = experts_and_loss()
    prepare(model, "fp8_delayed")
    with autocast("fp8_delayed"), pytest.raises(NotImplementedError, match=r"Give .* the parameters alone"):
        grad(loss)({**dict(model.named_parameters()), **dict(model.named_buffers())})


def jvp_along(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    return lambda x: jvp(function, (x,), (x,))


def test_derivatives_that_would_be_wrong_are_refused() -> None:
    model, x = Sequential(ops.Linear(K, K, dtype=F64), ops.GELU()), example()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    with pytest.raises(
        RuntimeError, match=r"Double backward \(create_graph=True\) through a pipeline is not supported"
    ):
        grad(lambda x: grad(loss)(x).sum())(x)
    of_parameters = grad(lambda p: functional_call(model, p, (x,)).square().sum())(dict(model.named_parameters()))
    with pytest.raises(RuntimeError, match="Double backward"):
        of_parameters["0.weight"].sum().backward()
    sentence = (
        "have no rules for torch.func.vmap and jvp.*Give a batch as rows of x, and differentiate by torch.func.grad"
    )
    for transformed in (vmap(loss), vmap(grad(loss)), torch.func.jacrev(model), jvp_along(loss)):
        with pytest.raises(NotImplementedError, match=sentence):
            transformed(x[:, None])
    main_grad = ops.Linear(K, K, accumulate_into_main_grad=True, dtype=F64)
    with pytest.raises(NotImplementedError, match="weight gradients go to main_grad, or are delayed"):
        grad(lambda x: main_grad(x).sum())(x)


def test_a_second_derivative_is_refused_where_backward_reads_nothing_but_what_forward_made() -> None:
    model, x = Sequential(ops.Linear(K, K, dtype=F64), ops.GELU()).requires_grad_(False), example()

    def slope(x: Tensor) -> Tensor:
        return grad(lambda x: model(x).sum())(x).sum()

    assert slope(x) == torch.autograd.grad(model(x.requires_grad_()).sum(), x)[0].sum()
    for differentiate in (grad(slope), lambda x: torch.autograd.grad(slope(x), x)):
        with pytest.raises(RuntimeError, match="Double backward"):
            differentiate(x)
    assert grad(lambda factor: factor * slope(x.detach()))(x.new_ones(())) == slope(x.detach())


def test_vmap_within_a_compiled_function_is_refused_by_the_same_sentence() -> None:
    model, x = Sequential(ops.Linear(K, K, dtype=F64), ops.GELU()), example()
    compiled = torch.compile(vmap(model), backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"have no rules for torch.func.vmap and jvp"):
        compiled(x[:, None])


def test_gradients_within_a_compiled_function_break_its_graph_or_are_refused_by_a_sentence() -> None:
    model, x = Sequential(ops.Linear(K, K, dtype=F64), ops.GELU()), example()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    expected = grad(loss)(x)
    for compiled in (grad(torch.compile(loss, backend="aot_eager")), torch.compile(grad(loss), backend="aot_eager")):
        torch._dynamo.reset()
        assert torch.equal(compiled(x), expected)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"not within what torch.compile traces.*grad\(torch.compile\(loss\)\)"):
        torch.compile(grad(loss), fullgraph=True, backend="aot_eager")(x)


def test_functionalize_runs_without_gradients_and_is_refused_with_them() -> None:
    torch.manual_seed(0)
    model = Sequential(ops.Router(K, 4, topk=2), ops.Dispatch(4), ops.GroupedLinear(4, K, K), ops.Combine())
    x = torch.randn(6, K)
    with torch.no_grad():
        assert torch.equal(functionalize(model)(x), model(x))
    recorded = make_fx(functionalize(model))(x)
    assert torch.equal(recorded(x), model(x))
    for call in (functionalize(model), grad(functionalize(lambda x: model(x).sum()))):
        with pytest.raises(NotImplementedError, match="no gradients within torch.func.functionalize.*Call it under"):
            call(x)


@pytest.mark.parametrize("of", ["x", "extra input", "parameters", "gradient"])
def test_tangents_of_forward_ad_are_refused(of: str) -> None:
    model = Sequential(ops.Linear(K, K, dtype=F64), ops.AddExtraInput("extra")).requires_grad_(of == "gradient")
    x, parameters = example(), dict(model.named_parameters())
    y = model(x, extra=x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="have no rules for forward-mode"):
        dual = forward_ad.make_dual(x, x)
        if of == "parameters":
            parameters["0.weight"] = forward_ad.make_dual(parameters["0.weight"], parameters["0.weight"])
            functional_call(model, parameters, (x,), {"extra": x})
        elif of == "gradient":
            torch.autograd.grad(y, list(parameters.values()), forward_ad.make_dual(torch.ones_like(y), y.detach()))
        else:
            model(dual if of == "x" else x, extra=dual if of == "extra input" else x)
    with forward_ad.dual_level():
        assert torch.equal(model(x, extra=x), y)


def test_tangents_do_not_get_lost_in_what_is_counted_or_compiled() -> None:
    model, x = Sequential(ops.Linear(K, K, dtype=F64)).requires_grad_(False), example()
    compiled = torch.compile(model, backend="aot_eager")
    for called, around in ((model, FlopCounterMode(display=False)), (compiled, nullcontext())):
        with forward_ad.dual_level(), around, pytest.raises(NotImplementedError, match="no rules for forward-mode"):
            called(forward_ad.make_dual(x, x))


def test_batches_of_gradients_are_refused() -> None:
    model, x = Sequential(ops.Linear(K, K, dtype=F64)), example().requires_grad_()
    y = model(x)
    with pytest.raises(NotImplementedError, match="no rules for a batch of gradients.*call backward once for each"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=F64), is_grads_batched=True)
    with pytest.raises(NotImplementedError, match="no rules for a batch of gradients.*vectorize=True. Leave these out"):
        torch.autograd.functional.jacobian(model, x, vectorize=True)


# Tracing


def test_functional_call_is_traced_whole() -> None:
    ours, _, extras = paired("grouped")
    torch.manual_seed(7)
    leaves = [{n: torch.randn_like(p).requires_grad_() for n, p in ours.named_parameters()} for _ in range(2)]
    leaves[1] = {n: t.detach().clone().requires_grad_() for n, t in leaves[0].items()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(ours, parameters, (x,), extras).square().sum()

    for function, each in zip((loss, torch.compile(loss, fullgraph=True, backend="aot_eager")), leaves, strict=True):
        function(each, example()).backward()
    assert_close(*({n: t.grad for n, t in each.items()} for each in leaves))
