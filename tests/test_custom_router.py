"""CustomRouter: a module of the user's own where Router stands, differentiated by autograd."""
# T tokens, H hidden size, E experts

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuser import Sequential, autocast, ops
from tests.check_operation import DEVICES
from tests.reference import assert_close, assert_same_bits

H, E, INNER, TOPK = 16, 6, 8, 2
NAMES = ("probs", "indices")


class Softmax(nn.Module):
    """What `ops.Router` computes by default, as a user would write it."""

    def __init__(self, hidden: int = H) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, E, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(x).softmax(-1).topk(TOPK, dim=-1)


class Cosine(nn.Module):
    """Another formula: the cosine with a learned direction of each expert, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.directions = nn.Parameter(torch.randn(E, H))
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        logits = F.normalize(x, dim=-1) @ F.normalize(self.directions, dim=-1).T / self.temperature
        values, indices = logits.topk(TOPK, dim=-1)
        return logits, values.sigmoid(), indices.int()


def experts() -> list[nn.Module]:
    return [
        ops.Dispatch(E), ops.GroupedLinear(E, H, 2 * INNER, bias=False), ops.ScaledSwiGLU(),
        ops.GroupedLinear(E, INNER, H, bias=False), ops.Combine(),
    ]  # fmt: skip


def layer_with(router: nn.Module) -> Sequential:
    return Sequential(
        ops.MakeExtraOutput("residual"), ops.RMSNorm(H), router, *experts(), ops.AddExtraInput("residual")
    )


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    return {"x": x.grad, **{name.replace("module.gate.", ""): p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_in_a_layer_it_is_as_the_router_whose_formula_it_has(tokens: int, device: str) -> None:
    ours, own = layer_with(ops.Router(H, E, TOPK)), layer_with(ops.CustomRouter(Softmax()))
    own.load_state_dict({k.replace("2.weight", "2.module.gate.weight"): t for k, t in ours.state_dict().items()})
    ours, own = ours.to(device, torch.float64), own.to(device, torch.float64)
    x = torch.randn(tokens, H, dtype=torch.float64, device=device)
    results = []
    for layer in (ours, own):
        given = x.clone().requires_grad_()
        y, made = layer(given, outputs=NAMES)
        (y.square().sum() + made["probs"].square().sum()).backward()
        results.append({"y": y, **made, **gradients(layer, given)})
    assert_close(results[1], results[0], {torch.float64: 1e-12, torch.int64: 0})


def test_more_outputs_and_any_formula_with_every_gradient() -> None:
    router = ops.CustomRouter(Cosine().double(), returns=("logits", "probs", "indices"))
    layer = Sequential(router, *experts()).double()
    x = torch.randn(23, H, dtype=torch.float64, requires_grad=True)
    y, made = layer(x, outputs=("logits", "indices"))
    assert router.module.calls == 1 and made["indices"].dtype == torch.int32

    plain = copy.deepcopy(layer)
    z = x.detach().clone().requires_grad_()
    logits, probs, indices = plain[0].module(z)
    expected = torch.zeros_like(z)
    for expert in range(E):
        tokens, slots = (indices == expert).nonzero(as_tuple=True)
        gate, up = (z[tokens] @ plain[2].weight[expert].T).chunk(2, -1)
        out = (F.silu(gate) * up) @ plain[4].weight[expert].T
        expected = expected.index_add(0, tokens, out * probs[tokens, slots, None])
    dy, dlogits = torch.randn_like(y), torch.randn_like(logits)
    torch.autograd.backward([y, made["logits"]], [dy, dlogits])
    torch.autograd.backward([expected, logits], [dy, dlogits])
    assert_close(
        {"y": y, "logits": made["logits"], **gradients(layer, x)},
        {"y": expected, "logits": logits, **gradients(plain, z)},
        {torch.float64: 1e-11},
    )


def test_alone_it_is_called_as_a_router() -> None:
    router, x = ops.CustomRouter(Softmax()), torch.randn(5, H)
    assert router(x) is x
    y, made = router(x, outputs=("indices",))
    assert y is x and list(made) == ["indices"]
    assert torch.equal(made["indices"], router.module(x)[1])
    with pytest.raises(ValueError, match="No operation makes the extra output 'logits'. There are: 'probs', 'indices'"):
        router(x, outputs=("logits",))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_it_is_checkpointed_hooked_and_copied_as_any_module(use_reentrant: bool) -> None:
    layer = layer_with(ops.CustomRouter(Softmax()))
    other, x = copy.deepcopy(layer), torch.randn(9, H, requires_grad=True)
    seen = []
    layer[2].register_forward_hook(lambda module, given, result: seen.append(module))
    z = x.detach().clone().requires_grad_()
    layer(x).sum().backward()
    checkpoint(other, z, use_reentrant=use_reentrant).sum().backward()
    assert seen == [layer[2]]
    assert_same_bits(gradients(layer, x), gradients(other, z))


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_a_recipe_leaves_it_as_it_is(recipe: str) -> None:
    router, x = ops.CustomRouter(Softmax()), torch.randn(8, H)
    plain = Sequential(router, ops.Dispatch(E))(x, outputs=NAMES)[1]
    with autocast(recipe=recipe):
        assert_same_bits(Sequential(router, ops.Dispatch(E))(x, outputs=NAMES)[1], plain)


def test_two_of_them_have_names_of_their_own() -> None:
    first, second = ops.CustomRouter(Softmax()), ops.CustomRouter(Softmax())
    with pytest.raises(ValueError, match="2 operations make the extra output 'probs'.*Give one of them another name"):
        Sequential(first, ops.Dispatch(E), ops.Combine(), second)(torch.randn(5, H), outputs=("probs",))
    layer = Sequential(first, ops.Dispatch(E), ops.Combine())
    x = torch.randn(5, H)
    before = layer(x)
    first.rename_extras(probs="p", indices="i")
    with pytest.raises(ValueError, match="missing: 'probs', 'indices'"):  # the change is seen
        layer(x)
    layer[1].rename_extras(probs="p", indices="i")
    y, made = layer(x, outputs=("p", "i"))
    assert torch.equal(y, before) and made["p"].shape == (5, TOPK)
    with pytest.raises(ValueError, match="CustomRouter has no extra tensor 'scales'. It has: 'probs', 'indices'"):
        first.rename_extras(scales="s")


def test_it_trains_with_fused_adamw() -> None:
    layer = layer_with(ops.CustomRouter(Softmax()))
    optimizer, x = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True), torch.randn(64, H)
    target, losses, start = x.roll(1, 1), [], layer[2].module.gate.weight.detach().clone()
    for _ in range(40):
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and not torch.equal(layer[2].module.gate.weight, start)
    assert "2.module.gate.weight" in layer.state_dict()


def test_explain_names_it_with_the_reason() -> None:
    text = layer_with(ops.CustomRouter(Softmax())).explain()
    assert "stage 1: 2  CustomRouter, called by itself because autograd differentiates it" in text


class Returns(nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result


PROBS, INDICES = torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (PROBS, TypeError, r"Returns returned a Tensor, but \(probs, indices\) is needed"),
        ((PROBS,), TypeError, r"Returns returned 1 values, but \(probs, indices\) is needed"),
        ((PROBS, None), TypeError, "Returns returned a NoneType as indices, but it must be a tensor"),
        ((INDICES, PROBS), TypeError, "probs as torch.int64 and indices as torch.float32, but a floating dtype and"),
        ((PROBS, PROBS > 0), TypeError, "Returns returned a mask as indices. Return the index of each chosen expert"),
        ((PROBS[:3], INDICES[:3]), ValueError, r"for 4 tokens, but both must be \[4, topk\]"),
        ((PROBS[:, :1], INDICES), ValueError, r"probs of shape \[4, 1\] and indices of shape \[4, 2\]"),
        ((PROBS[0], INDICES[0]), ValueError, r"probs of shape \[2\] and indices of shape \[2\] for 4 tokens"),
    ],
)
def test_other_results_are_refused(result: Any, error: type[Exception], message: str) -> None:
    layer = Sequential(ops.CustomRouter(Returns(result)), ops.Dispatch(E))
    with pytest.raises(error, match=message):
        layer(torch.randn(4, H))


def test_experts_that_do_not_exist_are_refused_by_dispatch() -> None:
    layer = Sequential(ops.CustomRouter(Returns((PROBS, INDICES + E))), ops.Dispatch(E))
    with pytest.raises(ValueError, match="indices reach from 6 to 6, but num_experts is 6"):
        layer(torch.randn(4, H))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="module is a function, but must be a torch.nn.Module"):
        ops.CustomRouter(lambda x: x)  # type: ignore[arg-type]
    for names in (("probs",), "probs", ("probs", "indices", "probs"), ()):
        with pytest.raises(ValueError, match="but must name 'probs' and 'indices', and nothing twice"):
            ops.CustomRouter(Softmax(), returns=names)
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 16\], but a router needs \[tokens, features\]"):
        ops.CustomRouter(Softmax())(torch.randn(2, 3, H))


def test_settings_are_shown() -> None:
    assert "returns=('logits', 'probs', 'indices')" in repr(
        ops.CustomRouter(Cosine(), returns=("logits", "probs", "indices"))
    )
