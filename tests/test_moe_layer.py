"""A whole mixture-of-experts layer as one Sequential, against a loop over the experts in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuser import Sequential, autocast, checkpoint, ops
from tests import reference
from tests.reference import assert_close, assert_same_bits

# T tokens, H hidden, E experts
H, E, INNER = 24, 5, 16

DTYPES = [pytest.param(torch.float64, id="fp64"), pytest.param(torch.float32, id="fp32")]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = [None, "fp8_current", "mxfp8", "fp8_block"]
LAYER = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.05}


def make(
    topk: int = 2, *, dtype: torch.dtype = torch.float64, device: str = "cpu", experts: int = E, **router: Any
) -> Sequential:
    torch.manual_seed(1)
    layer = Sequential(
        ops.MakeExtraOutput("residual"),
        ops.RMSNorm(H),
        ops.Router(H, experts, topk, **router),
        ops.Dispatch(experts),
        ops.GroupedLinear(experts, H, 2 * INNER, bias=False),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(experts, INNER, H, bias=False),
        ops.Combine(),
        ops.AddExtraInput("residual"),
    )
    with torch.no_grad():
        layer[1].weight.uniform_(0.5, 1.5)
        layer[2].weight.normal_()
    return layer.to(device, dtype)


def plain(layer: Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """(y, load-balancing loss), differentiable: each expert in turn, on the tokens that chose it."""
    norm, router, _, fc1, _, fc2 = layer[1:7]
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    logits = n @ router.weight.T
    softmax = logits.softmax(-1)
    _, indices = logits.topk(router.topk, dim=-1)
    probs = softmax.gather(1, indices) if router.use_pre_softmax else logits.gather(1, indices).softmax(-1)
    if router.normalize_probs:
        probs = probs / probs.sum(-1, keepdim=True)
    y = x
    for expert in range(router.num_experts):
        tokens, slots = (indices == expert).nonzero(as_tuple=True)
        gate, up = (n[tokens] @ fc1.weight[expert].T).chunk(2, -1)
        out = (F.silu(gate) * up) @ fc2.weight[expert].T
        y = y.index_add(0, tokens, out * probs[tokens, slots, None])
    chosen = F.one_hot(indices, router.num_experts).to(x.dtype).mean((0, 1))
    return y, router.num_experts * (chosen * softmax.mean(0)).sum()


def run(
    layer: Sequential, x: Tensor, dy: Tensor, coefficient: float | None = 0.3, plainly: bool = False
) -> dict[str, Any]:
    """y, the loss and every gradient of  y . dy + coefficient * loss."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    if plainly:
        y, loss = plain(layer, x)
    else:
        y, extras = layer(x, outputs=("load_balancing_loss",))
        loss = extras["load_balancing_loss"]
    objective = (y * dy).sum()
    (objective if coefficient is None else objective + coefficient * loss).backward()
    return {"y": y.detach(), "loss": loss.detach(), **reference.gradients({"x": x, **dict(layer.named_parameters())})}


def data(tokens: int, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, H, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(device, dtype), dy.to(device, dtype)


def in_float64(layer: Sequential, x: Tensor, dy: Tensor, coefficient: float | None = 0.3) -> dict[str, Any]:
    wide = make(layer[2].topk, use_pre_softmax=layer[2].use_pre_softmax, normalize_probs=layer[2].normalize_probs)
    wide.load_state_dict(layer.state_dict())
    return run(wide, x.double().cpu(), dy.double().cpu(), coefficient, plainly=True)


# ------------------------------------------------------------------------------------------------ against plain torch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("topk", [1, 2, E])
@pytest.mark.parametrize(
    ("use_pre_softmax", "normalize_probs"),
    [(True, False), (True, True), (False, False)],
    ids=["pre", "normalized", "post"],
)
def test_the_layer_is_what_a_loop_over_the_experts_gives(use_pre_softmax, normalize_probs, topk, dtype, device):
    layer = make(topk, dtype=dtype, device=device, use_pre_softmax=use_pre_softmax, normalize_probs=normalize_probs)
    for tokens, coefficient in ((37, 0.3), (1, 0.3), (64, None)):
        x, dy = data(tokens, dtype, device)
        got, want = run(layer, x, dy, coefficient), in_float64(layer, x, dy, coefficient)
        router = "gradient of 2.weight"
        if topk == 1 and (normalize_probs or not use_pre_softmax) and coefficient is None:
            # The only probability is 1, and nothing but the loss would move the router.
            assert got[router].abs().max() < 1e-5
            del got[router], want[router]
        assert_close(got, want, LAYER, floor=1e-2)


def test_the_loss_alone_trains_the_router_alone():
    layer = make()
    x, _ = data(37)
    x.requires_grad_()
    _, extras = layer(x, outputs=("load_balancing_loss",))
    extras["load_balancing_loss"].backward()
    got = reference.gradients({"x": x, **dict(layer.named_parameters())})
    wide = x.detach().clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    plain(layer, wide)[1].backward()
    want = reference.gradients({"x": wide, **dict(layer.named_parameters())})
    for name in ("gradient of 4.weight", "gradient of 6.weight"):
        assert got[name] is None or not got[name].any()
        got[name] = want[name] = None
    assert_close(got, want)


@pytest.mark.slow
def test_gradcheck():
    layer = make(2, experts=3)
    layer = Sequential(*layer)
    x, _ = data(4)

    def function(x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        y, extras = layer(x, outputs=("load_balancing_loss",))
        return y, extras["load_balancing_loss"]

    assert torch.autograd.gradcheck(function, (x.requires_grad_(), *layer.parameters()))


@pytest.mark.parametrize("frozen", ["router", "experts", "all but the router", "all"])
def test_frozen_parts_change_no_other_gradient(frozen):
    layer = make()
    x, dy = data(37)
    want = run(layer, x, dy)
    names = {
        "router": ["2.weight"],
        "experts": ["4.weight", "6.weight"],
        "all but the router": ["1.weight", "4.weight", "6.weight"],
        "all": ["1.weight", "2.weight", "4.weight", "6.weight"],
    }[frozen]
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
        layer.get_parameter(name).grad = None
    assert_same_bits(run(layer, x, dy), want | {f"gradient of {name}": None for name in names})


# -------------------------------------------------------------------------------------------------------- properties


def test_permuting_the_experts_permutes_their_gradients():
    layer, permuted = make(), make()
    order = torch.tensor([3, 0, 4, 1, 2])
    experts = ("2.weight", "4.weight", "6.weight")
    reference.set_parameters(permuted, {name: layer.get_parameter(name)[order] for name in experts})
    x, dy = data(37)
    got, want = run(permuted, x, dy), run(layer, x, dy)
    for name in experts:
        want[f"gradient of {name}"] = want[f"gradient of {name}"][order]
    assert_close(got, want)


def test_a_token_does_not_depend_on_the_others():
    layer = make()
    x, _ = data(37)
    together, alone = layer(x), torch.cat([layer(token) for token in x.split(1)])
    assert_close({"y": together}, {"y": alone})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_without_tokens_get_exactly_zero(recipe, device):
    layer = make(2, dtype=torch.float32, device=device)
    idle = [0, 3]
    with torch.no_grad():
        layer[1].weight.fill_(1.0)
        layer[2].weight[idle] = -10.0  # x is positive, so their logits are far below the others
        layer[2].weight.clamp_(max=1.0)
    x, dy = data(37, torch.float32, device)
    with autocast(recipe=recipe):
        got = run(layer, x.abs() + 0.1, dy)
    for name in ("gradient of 4.weight", "gradient of 6.weight"):
        assert not got[name][idle].any()
        busy = [expert for expert in range(E) if expert not in idle]
        assert got[name][busy].abs().amax((1, 2)).min() > 0
    if recipe is None:
        assert_close(got, in_float64(layer, x.abs() + 0.1, dy), LAYER, floor=1e-2)


def test_all_tokens_may_go_to_one_expert():
    layer = make(1, dtype=torch.float32)
    with torch.no_grad():
        layer[1].weight.fill_(1.0)
        layer[2].weight.fill_(-1.0)
        layer[2].weight[2] = 1.0
    x, dy = data(37, torch.float32)
    x = x.abs() + 0.1
    _, extras = layer(x, outputs=("split_sizes", "indices"))
    assert extras["split_sizes"].tolist() == [0, 0, 37, 0, 0]
    assert (extras["indices"] == 2).all()
    assert_close(run(layer, x, dy), in_float64(layer, x, dy), LAYER, floor=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_without_tokens(recipe, device):
    layer = make(dtype=torch.float32, device=device)
    x, dy = data(0, torch.float32, device)
    with autocast(recipe=recipe):
        got = run(layer, x, dy)
    assert got["y"].shape == (0, H)
    assert got["loss"] == 0
    for name, _ in layer.named_parameters():
        assert not got[f"gradient of {name}"].any()


def test_the_extra_outputs_belong_together():
    layer = make(2)
    x, _ = data(37)
    names = ("probs", "indices", "split_sizes", "scales", "load_balancing_loss", "residual")
    _, extras = layer(x, outputs=names)
    assert set(extras) == set(names)
    assert torch.equal(extras["split_sizes"], torch.bincount(extras["indices"].flatten(), minlength=E))
    assert torch.equal(extras["scales"].sort().values, extras["probs"].flatten().sort().values)
    assert torch.equal(extras["residual"], x)
    assert (extras["probs"].diff(dim=1) <= 0).all()
    by_expert = extras["indices"].flatten().argsort(stable=True)
    assert torch.equal(extras["scales"], extras["probs"].flatten()[by_expert])


# ------------------------------------------------------------------------------------- fused, paths, recipes, memory


def test_the_plan_holds_the_fused_experts():
    plan = make().explain()
    assert "4-6" in plan
    assert "GroupedMLP = GroupedLinear -> ScaledSwiGLU -> GroupedLinear" in plan
    assert plan.count("stage ") == 1


@pytest.mark.parametrize("dtype", [*DTYPES, pytest.param(torch.bfloat16, id="bf16")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_equals_unfused_bit_for_bit(recipe, dtype):
    layer = make(dtype=dtype)
    x, dy = data(37, dtype)
    with autocast(recipe=recipe):
        found, expected = run(layer, x, dy), run(Sequential(*layer, fusions=()), x, dy)
    if dtype is torch.bfloat16:  # BackwardAddRMSNorm rounds dx once, and unfused it is rounded twice
        dx, twice = found.pop("gradient of x"), expected.pop("gradient of x")
        torch.testing.assert_close(dx, twice, rtol=2**-7, atol=2**-7 * twice.abs().max().item())
    assert_same_bits(found, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_paths_give_the_same(recipe):
    layer = make()
    x, dy = data(37)
    with autocast(recipe=recipe):
        grouped, split = (run(Sequential(*layer, path=path), x, dy) for path in ("grouped", "split"))
    assert_close(grouped, split)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "fp8_block"])
def test_a_recipe_stays_near_high_precision(recipe):
    layer = make(dtype=torch.float32)
    x, dy = data(64, torch.float32)
    plain_results = run(layer, x, dy)
    with autocast(recipe=recipe):
        got = run(layer, x, dy)
    for name, want in plain_results.items():
        error = (got[name] - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert error < 0.15, f"{name}: RMS error {error:.3f}"
    assert not torch.equal(got["y"], plain_results["y"])
    assert torch.equal(got["loss"], plain_results["loss"]), "the router is in high precision"


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_changes_no_bit(recipe, use_reentrant):
    layer = make(dtype=torch.float32)
    x, dy = data(37, torch.float32)
    with autocast(recipe=recipe):
        want = run(layer, x, dy, None)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=use_reentrant)
    y.backward(dy)
    got = {"y": y.detach(), **reference.gradients({"x": leaf, **dict(layer.named_parameters())})}
    del want["loss"]
    assert_same_bits(got, want)


def test_saved_tensors_may_be_moved():
    layer = make(dtype=torch.float32)
    x, dy = data(37, torch.float32)
    with autocast(recipe="mxfp8"):
        want = run(layer, x, dy)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            assert_same_bits(run(layer, x, dy), want)


def test_several_layers_share_no_names_when_renamed():
    """Two layers in one Sequential: every extra tensor of the second goes by a name of its own."""
    first, second = make(), make()
    for op in second:
        op.rename_extras(**{name: f"{name}_b" for name in {**op.extra_inputs, **op.extra_outputs}})
    both = Sequential(*first, *second)
    # Forward and backward are told apart: the norms' backward is fused as well.
    assert both.explain().count("GroupedMLP = ") == 4
    x, _ = data(37)
    assert torch.equal(both(x), make()(make()(x)))
    unnamed = Sequential(*make(), *make())
    assert torch.equal(unnamed(x), both(x)) and unnamed.explain().count("GroupedMLP = ") == 4


# ------------------------------------------------------------------------------------------------- only on the GPU


@pytest.fixture
def as_in_training():
    """Without deterministic algorithms, which add host syncs of their own to torch's scatters."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_waits_for_the_device(recipe, as_in_training):
    layer = make(dtype=torch.bfloat16, device="cuda")
    x, dy = data(64, torch.bfloat16, "cuda")
    with autocast(recipe=recipe):
        run(layer, x, dy)  # compiles
        with reference.no_host_sync():
            run(layer, x, dy)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_layer_routes_other_tokens_on_replay(recipe, as_in_training):
    layer = make(dtype=torch.bfloat16, device="cuda")
    x, dy = data(64, torch.bfloat16, "cuda")
    x.requires_grad_()
    inputs = [x, *layer.parameters()]

    def step() -> list[Tensor]:
        with autocast(recipe=recipe):
            y, extras = layer(x, outputs=("load_balancing_loss", "split_sizes"))
            objective = (y.float() * dy).sum() + 0.3 * extras["load_balancing_loss"]
            return [y.detach(), extras["split_sizes"], *torch.autograd.grad(objective, inputs)]

    graph, captured = reference.capture(step)
    seen = set()
    for seed in range(20):
        with torch.no_grad():
            x.copy_(data(64, torch.bfloat16, seed=seed)[0])
        graph.replay()
        replayed = {str(i): t.clone() for i, t in enumerate(captured)}
        seen.add(tuple(replayed["1"].tolist()))
        assert_same_bits(replayed, {str(i): t for i, t in enumerate(step())})
    assert len(seen) > 10, "the tokens were routed in other ways each time"


@pytest.mark.gpu
def test_runs_repeat_bit_for_bit_on_the_gpu(as_in_training):
    layer = make(dtype=torch.bfloat16, device="cuda")
    x, dy = data(500, torch.bfloat16, "cuda")
    for recipe in RECIPES:
        with autocast(recipe=recipe):
            first = run(layer, x, dy)
            for _ in range(5):
                assert_same_bits(run(layer, x, dy), first)
