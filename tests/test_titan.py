"""The override of torchtitan, against a stand-in with its interface (`tests.titan_stand_in`): torchtitan is not run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fuser
from fuser import autocast
from recipes.registry import as_recipe
from tests import titan_stand_in as titan
from tests.ranks import on_ranks
from tests.reference import assert_close, assert_same_bits

T, D, F, E, TOPK = 12, 32, 48, 4, 2
OVERRIDE = "fuser.titan.experts"
BF16 = {torch.float32: 2e-2}  # float32 in and out, bf16 between


@pytest.fixture(autouse=True)
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as context:
        for name, module in titan.modules().items():
            context.setitem(sys.modules, name, module)
        import_module("fuser.titan")
        yield


def config(padding: int = 0, **changes: Any) -> Any:
    return titan.RoutedExperts.Config(
        w13=titan.GroupedLinear.Config(group_size=E, in_features=D, out_features=F, num_linears=2),
        w2=titan.GroupedLinear.Config(group_size=E, in_features=F, out_features=D),
        token_dispatcher=titan.LocalTokenDispatcher.Config(num_experts=E, top_k=TOPK, padding=padding),
        **changes,
    )


def pair(recipe: str | None = None, padding: int = 0) -> tuple[Any, Any]:
    """The experts of the stand-in, and ours with the same weights."""
    torch.manual_seed(0)
    theirs = config(padding).build()
    ours = titan.apply(OVERRIDE, config(padding), **({} if recipe is None else {"recipe": recipe})).build()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def given(seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, and a routing in which the last expert receives none."""
    generator = torch.Generator().manual_seed(seed)
    x, scores = torch.randn(T, D, generator=generator), torch.rand(T, TOPK, generator=generator)
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:TOPK] for _ in range(T)])
    return x, scores, ids, ids.flatten().bincount(minlength=E)


def step(experts: nn.Module, run: Any = None) -> dict[str, Tensor | None]:
    x, scores, ids, counts = given()
    x.requires_grad_(), scores.requires_grad_()
    y = (experts if run is None else run)(x, scores, ids, counts)
    y.square().sum().backward()
    gradients = {name: whole(p.grad) for name, p in experts.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "dscores": scores.grad} | gradients


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("padding", [0, 5])
def test_it_computes_what_torchtitan_computes_on_the_same_parameters(padding: int) -> None:
    theirs, ours = pair(padding=padding)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    result = step(ours)
    assert_close(result, step(theirs), BF16)
    assert not result["w13.weight"][E - 1].any()


def test_the_grouped_mlp_is_fused_and_explained() -> None:
    _, ours = pair("mxfp8")
    assert "GroupedMLP" in fuser.explain(ours) and "mxfp8" in fuser.explain(ours)


def test_the_recipe_of_the_entry_is_that_of_an_autocast() -> None:
    _, ours = pair("mxfp8")
    _, plain = pair()
    with autocast("mxfp8"):
        expected = step(plain)
    assert_same_bits(step(ours), expected)
    assert not torch.equal(expected["y"], step(plain)["y"])


def test_the_rest_of_the_config_is_kept() -> None:
    before = config(sharding_config="kept", param_init={"w2": None})
    after = titan.apply(OVERRIDE, before)
    assert after.sharding_config == "kept" and after.param_init == {"w2": None} and after.w13 is before.w13


class Converted(titan.GroupedLinear):
    class Config(titan.GroupedLinear.Config):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_fn": titan.Module.Config()}, "their activation is Module.Config, and this is SwiGLU"),
        (
            {"w2": Converted.Config(group_size=E, in_features=F, out_features=D)},
            r"w2 is .*Converted\.Config, whose",
        ),
        ({"postprocess": "norm"}, "they have postprocess='norm', which would be left out"),
    ],
)
def test_experts_that_compute_something_else_are_refused(changes: dict[str, Any], message: str) -> None:
    experts = config()
    for name, value in changes.items():
        setattr(experts, name, value)
    with pytest.raises(NotImplementedError, match=message):
        titan.apply(OVERRIDE, experts)


def test_a_recipe_that_there_is_not_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="mxfp9"):
        titan.apply(OVERRIDE, config(), recipe="mxfp9")


def test_configs_of_a_subclass_are_left_to_others() -> None:
    class Other(titan.RoutedExperts):
        class Config(titan.RoutedExperts.Config):
            pass

    experts = config()
    other = Other.Config(w13=experts.w13, w2=experts.w2, token_dispatcher=experts.token_dispatcher)
    assert titan.apply(OVERRIDE, other) is other


def test_without_torchtitan_the_import_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fuser.titan")
    monkeypatch.setitem(sys.modules, "torchtitan.models.common.moe", None)
    with pytest.raises(ImportError, match=r"fuser\.titan needs torchtitan's main branch"):
        import_module("fuser.titan")


@pytest.mark.rest
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_it_is_compiled_whole_with_the_bits_of_eager_steps(recipe: str | None) -> None:
    _, ours = pair(recipe)
    expected = step(deepcopy(ours))
    assert_same_bits(step(ours, torch.compile(ours, fullgraph=True, backend="aot_eager")), expected)


def sharded(rank: int) -> None:
    for name, module in titan.modules().items():
        sys.modules[name] = module
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for recipe in (None, "mxfp8"):
        _, plain = pair(recipe)
        ours = deepcopy(plain)
        fully_shard(ours, mesh=mesh, mp_policy=policy)
        for _ in range(2):
            assert_close(step(ours), step(plain), BF16)
    # Of expert parallelism: a rank holds its experts as DTensors, and receives rows for these alone.
    _, ours = pair()
    for linear in (ours.w13, ours.w2):
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
    x, scores, _, _ = given()
    mine = torch.tensor([0, E // 2])[torch.arange(T * TOPK).view(T, TOPK) % 2]
    half = E // 2
    y = ours(x, scores, mine // half, torch.tensor([T, T]))
    y.square().sum().backward()
    assert ours.w13.weight.grad.to_local().shape == (half, 2, F, D)
    assert ours.w13.weight.grad.to_local().any()


@pytest.mark.rest
def test_sharded_parameters_are_trained(tmp_path: Path) -> None:
    on_ranks(sharded, folder=tmp_path)


@pytest.mark.rest
def test_another_recipe_is_compiled_anew() -> None:
    _, ours = pair("mxfp8")
    run = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for recipe in ("mxfp8", "fp8_current"):
        ours.recipe = as_recipe(recipe)
        assert_same_bits(step(ours, run), step(ours))
