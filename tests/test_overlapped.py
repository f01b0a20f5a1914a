"""Overlapped over gloo ranks: the bits of microbatch after microbatch, and the order of the transfers on all ranks."""
# T rows of a rank, H features, F expert features, E experts

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fuser import Branch, Sequential, autocast, checkpoint, ops
from fuser.distributed import Overlapped, TrainingState
from recipes import DelayedScaling
from tests.ranks import on_ranks, quietly
from tests.reference import assert_same_bits

H, F, E = 32, 32, 8


def modules(group: Any, *, shared: bool = False, blocks: int = 1, main_grad: bool = False) -> list[nn.Module]:
    """Blocks of experts on all ranks, with norm and residual. The router's weights are alike on all ranks."""
    torch.manual_seed(0)
    found: list[nn.Module] = []
    own = E // dist.get_world_size(group)
    settings = {"accumulate_into_main_grad": main_grad}
    for block in range(blocks):
        found += [
            ops.MakeExtraOutput(f"residual{block}"),
            ops.RMSNorm(H),
            ops.Router(H, E, topk=2),
            *([Branch(f"shared{block}", nn.Linear(H, H))] if shared else ()),
            ops.Dispatch(E, group=group),
            ops.GroupedLinear(own, H, 2 * F, bias=False, **settings),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(own, F, H, **settings),
            ops.Combine(group=group),
            *([ops.AddExtraInput(f"shared{block}")] if shared else ()),
            ops.AddExtraInput(f"residual{block}"),
        ]
    return found


class InTurn(nn.Module):
    """The formula: microbatch after microbatch."""

    def __init__(self, layer: Sequential, microbatches: int) -> None:
        super().__init__()
        self.layer, self.microbatches = layer, microbatches

    def forward(self, x: Tensor, **extras: Tensor) -> Tensor:
        rows = [len(part) for part in x.tensor_split(self.microbatches)]
        parts = {name: value.split(rows) for name, value in extras.items()}
        ys = [self.layer(part, **{name: p[i] for name, p in parts.items()}) for i, part in enumerate(x.split(rows))]
        return torch.cat(ys)


def results(layer: nn.Module, x: Tensor, steps: int = 2, run: Any = None) -> dict[str, Any]:
    """y, dx and the gradients of parameters, which are accumulated over the steps."""
    found: dict[str, Any] = {}
    for step in range(steps):
        given = (x + step).requires_grad_()
        y = (run or layer)(given)
        y.backward(torch.sin(given.detach()))
        found |= {f"y{step}": y.detach(), f"dx{step}": given.grad}
    for kind in ("grad", "main_grad"):
        found |= {f"{kind} of {key}": getattr(p, kind, None) for key, p in layer.named_parameters()}
    return found


def compare(x: Tensor, microbatches: int, recipe: Any = "bf16", **settings: Any) -> None:
    group = dist.group.WORLD
    layers = Sequential(*modules(group, **settings)), Overlapped(*modules(group, **settings), microbatches=microbatches)
    for layer in layers:
        for parameter in layer.parameters():
            if settings.get("main_grad"):
                parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
    assert layers[0].state_dict().keys() == layers[1].state_dict().keys()
    expected = InTurn(layers[0], microbatches)
    with autocast(recipe):
        wanted = results(layers[0], x, run=expected)
        found = results(layers[1], x)
    assert any(value is not None for key, value in found.items() if key.startswith("grad of"))
    assert_same_bits(found, wanted)


def have_the_bits(rank: int, cases: int) -> None:
    with quietly():
        draw = random.Random(7)
        for case in range(cases):
            rows = [draw.choice((0, 1, 5, 24)) for _ in range(dist.get_world_size())]
            settings = {
                "shared": draw.random() < 0.5,
                "blocks": draw.choice((1, 1, 2)),
                "main_grad": draw.random() < 0.3,
            }
            x = torch.randn(rows[rank], H, generator=torch.Generator().manual_seed(100 * case + rank))
            compare(x, draw.choice((1, 2, 2, 3)), draw.choice(("bf16", "fp8_block", "mxfp8")), **settings)
        x = torch.randn(9 + rank, H, generator=torch.Generator().manual_seed(rank))
        compare(x, 2, DelayedScaling(reduce_amax=False))
        if dist.get_world_size() == 2:
            meet_in_order(rank)
            meet_other_ways(rank)


@pytest.mark.parametrize(("ranks", "cases"), [(2, 6), pytest.param(4, 30, marks=[pytest.mark.rest, pytest.mark.slow])])
def test_it_has_the_bits_and_the_order_of_microbatches_in_turn(ranks: int, cases: int, tmp_path: Path) -> None:
    on_ranks(have_the_bits, cases, folder=tmp_path, ranks=ranks)


# ------------------------------------------------------------------------------------------ the order of the transfers


@contextmanager
def logged(log: list[str]) -> Iterator[None]:
    """Write down where transfers of rows start and where they are awaited, and where a product begins."""
    original = dist.all_to_all_single
    forward = nn.Linear.forward

    def record(output: Tensor, given: Tensor, *args: Any, async_op: bool = False, **named: Any) -> Any:
        work = original(output, given, *args, async_op=async_op, **named)
        if async_op:
            number = sum("start" in line for line in log)
            log.append(f"start {number}")
            return Awaited(work, number, log)
        log.append("exchange")
        return work

    def product(module: nn.Linear, x: Tensor) -> Tensor:
        log.append("shared")
        return forward(module, x)

    dist.all_to_all_single, nn.Linear.forward = record, product  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.all_to_all_single, nn.Linear.forward = original, forward  # type: ignore[method-assign]


class Awaited:
    def __init__(self, work: Any, number: int, log: list[str]) -> None:
        self.work, self.number, self.log = work, number, log

    def wait(self) -> None:
        self.log.append(f"await {self.number}")
        self.work.wait()


def meet_in_order(rank: int) -> None:
    group = dist.group.WORLD
    layer = Overlapped(*modules(group, shared=True))
    x = torch.randn(4 + 5 * rank, H).requires_grad_()
    log: list[str] = []
    with logged(log):
        y = layer(x)
        forward, log[:] = [line for line in log if line != "exchange"], []
        y.sum().backward()
    # Of microbatch 0 even numbers, of 1 odd ones: the next one starts before the last one is awaited.
    assert forward == [
        "start 0", "shared", "start 1", "shared",
        "await 0", "start 2", "await 1", "start 3",
        "await 2", "await 3",
    ]  # fmt: skip
    backward = [line for line in log if line != "exchange"]
    assert backward == ["start 0", "start 1", "await 0", "start 2", "await 1", "start 3", "await 2", "await 3"]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [forward, log])
    assert all(of_rank == everywhere[0] for of_rank in everywhere)
    assert layer[4].group is not None and not any("Half" in type(m).__name__ for m in layer.modules())


def meet_other_ways(rank: int) -> None:
    group, x = dist.group.WORLD, torch.randn(7, H)
    # gradients that only some ranks need, none at all, a frozen router, and a second backward
    layer = Overlapped(*modules(group)[2:-1])
    y = layer(torch.randn(6, H).requires_grad_(rank == 0))
    y.sum().backward(retain_graph=True)
    first = layer[2].weight.grad.clone()
    y.sum().backward()
    assert torch.equal(layer[2].weight.grad, 2 * first)
    with torch.no_grad():
        layer(torch.randn(3, H))
    layer[0].requires_grad_(False)
    layer(torch.randn(6, H)).sum().backward()
    with pytest.raises(RuntimeError, match="rank 1: .* gradients not computed"):
        layer(torch.randn(6, H).requires_grad_(rank == 0))
    refuse(group)

    # extra inputs and outputs, copies, checkpoints of activations and of the model
    layer = Overlapped(ops.Dispatch(E, group=group), *modules(group)[4:7], ops.Combine(group=group))
    probs, indices = torch.rand(7, 2), torch.randint(0, E, (7, 2))
    y, made = layer(x, probs=probs, indices=indices, outputs=("split_sizes",))
    assert [len(sizes) for sizes in made["split_sizes"]] == [E // 2, E // 2]
    wanted = InTurn(Sequential(*layer), 2)(x, probs=probs, indices=indices)
    assert_same_bits({"y": y}, {"y": wanted})
    layer = Overlapped(*modules(group))
    again = copy.deepcopy(layer)
    assert torch.equal(again(x), layer(x))
    plain, repeated = results(layer, x), results(again, x, run=lambda x: checkpoint(again, x))
    assert_same_bits(repeated, plain)
    assert TrainingState(layer).state_dict()["model"].keys() == Sequential(*modules(group)).state_dict().keys()
    layer.eval()
    assert torch.equal(layer(x), again(x))
    layer[1] = ops.LayerNorm(H)
    assert not torch.equal(layer(x), again(x)), "the halves follow a change of the modules"
    explained = layer.explain()
    assert "3.0  DispatchStart  [torch; all_to_all_single over 2 ranks (gloo)" in explained
    assert "3.1  DispatchFinish  [awaits the rows" in explained


def refuse(group: Any) -> None:
    dispatch, combine = ops.Dispatch(E, group=group), ops.Combine(group=group)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="microbatches"):
            Overlapped(dispatch, combine, microbatches=wrong)
    with pytest.raises(ValueError, match="No Dispatch or Combine here has a group, so nothing is transferred"):
        Overlapped(ops.Linear(H, H))
    with pytest.raises(ValueError, match="A Sequential holds a Dispatch or Combine with a group, and would await"):
        Overlapped(dispatch, Sequential(combine))
    symmetric = {"group": group, "transport": "symmetric"}
    given = {"probs": torch.rand(4, 2), "indices": torch.zeros(4, 2, dtype=torch.int64)}
    with pytest.raises(ValueError, match="transport='symmetric', which is not divided"):
        Overlapped(ops.Dispatch(E, capacity=64, **symmetric), ops.Combine(**symmetric))(torch.randn(4, H), **given)
    layer = Overlapped(dispatch, combine)
    with pytest.raises(ValueError, match=r"probs is divided .* must be a tensor of 3 rows, but is \[4, 2\]"):
        layer(torch.randn(3, H), **given)
    said = r"probs is divided .* must be a tensor of 3 rows, but is \[4, 2\]"
    error, message = (ValueError, said) if dist.get_rank() == 0 else (RuntimeError, f"rank 0: its arguments .*: {said}")
    with pytest.raises(error, match=message):
        layer(torch.randn(3 + dist.get_rank(), H), **given)
    with pytest.raises(ValueError, match="buffers belong to one microbatch"):
        layer(torch.randn(4, H), buffers={0: {}}, **given)
    assert torch.equal(layer(torch.ones(4, H), **given), torch.full((4, H), 2.0))
    dispatch.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Dispatch has hooks, which its two halves would not call"):
        layer(torch.randn(4, H), **given)


def shard_over_the_other_dimension(rank: int) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    x = torch.randn(10, H, generator=torch.Generator().manual_seed(rank))
    found = []
    for overlaps in (False, True):
        own = modules(mesh["ep"].get_group(), shared=True)
        layer = Overlapped(*own) if overlaps else InTurn(Sequential(*own), 2)
        fully_shard(layer, mesh=mesh["dp"])
        of_rank = {key.replace("layer.", ""): value for key, value in results(layer, x).items()}
        found.append({key: v.to_local() if isinstance(v, DTensor) else v for key, v in of_rank.items()})
    assert_same_bits(*found[::-1])


@pytest.mark.rest
@pytest.mark.slow
def test_fully_shard_over_the_other_dimension_has_the_same_bits(tmp_path: Path) -> None:
    on_ranks(shard_over_the_other_dimension, folder=tmp_path, ranks=4)


def test_a_branch_is_computed_beside_what_follows() -> None:
    expert = nn.Linear(H, H)
    layer = Sequential(Branch("shared", expert), ops.Linear(H, H), ops.AddExtraInput("shared"))
    x = torch.randn(5, H)
    assert torch.equal(layer(x), layer[1](x) + expert(x))
    assert torch.equal(Branch("shared", expert)(x), x)
    with pytest.raises(TypeError, match="module is a int, but must be a"):
        Branch("shared", 1)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.gpu2
def test_on_two_gpus_it_has_the_bits_of_microbatches_one_after_the_other(tmp_path: Path) -> None:
    on_ranks(on_a_gpu, folder=tmp_path, backend="nccl")


def on_a_gpu(rank: int) -> None:
    group = dist.group.WORLD
    for shared in (False, True):
        layers = [kind(*modules(group, shared=shared)).to("cuda", torch.bfloat16) for kind in (Sequential, Overlapped)]
        x = torch.randn(512 + rank, H, device="cuda", dtype=torch.bfloat16)
        for recipe in ("bf16", "mxfp8"):
            with autocast(recipe):
                wanted = results(layers[0], x, run=InTurn(layers[0], 2))
                found = results(layers[1], x)
            assert_same_bits(found, wanted)
