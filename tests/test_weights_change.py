"""However weights are written: the next forward multiplies with their new values.

Judged by bits: a model that was just built from the state dict knows nothing of earlier weights.
"""

from __future__ import annotations

import importlib
import inspect
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fuser import Sequential, autocast, constant_weights, ops
from fuser.graph import make_graphed_step
from recipes import NVFP4BlockScaling
from tests.pairwise import rest
from tests.ranks import on_ranks
from tests.reference import assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = {
    "mxfp8": "mxfp8",
    "fp8_delayed": "fp8_delayed",
    "fp8_current": "fp8_current",
    "fp8_block": "fp8_block",
    "fp8_rowwise": "fp8_rowwise",
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
SIZES = [7, 0, 9]


def build(device="cpu"):
    torch.manual_seed(0)
    return Sequential(
        ops.GroupedLinear(3, 32, 64, bias=False, device=device), ops.SwiGLU(),
        ops.GroupedLinear(3, 32, 32, device=device), ops.Linear(32, 32, bias=False, device=device),
    )  # fmt: skip


def data(seed=0, device="cpu"):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).to(device)


def outcome(model, recipe, x):
    """y and dx, of a copy: neither state nor gradients of the model change."""
    x = x.clone().requires_grad_()
    with autocast(RECIPES[recipe]):
        y = model(x, split_sizes=SIZES)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    return {"y": y.detach(), "dx": dx}


def assert_uses_its_weights(model, recipe, x):
    fresh = build(x.device)
    fresh.load_state_dict(model.state_dict())
    assert_same_bits(outcome(fresh, recipe, x), outcome(model, recipe, x))


def evaluate(model, recipe, x):
    """As between steps: without gradients, so that delayed scaling leaves its scales alone."""
    with torch.no_grad(), autocast(RECIPES[recipe]):
        return model(x, split_sizes=SIZES)


def step(model, recipe, x, optimizer):
    optimizer.zero_grad()
    evaluate(model, recipe, x)

    def closure():
        optimizer.zero_grad()
        with autocast(RECIPES[recipe]):
            loss = model(x, split_sizes=SIZES).square().sum()
        loss.backward()
        return loss

    closure()
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        optimizer.step()


def optimizers():
    """Every optimizer of torch for dense weights of any shape, in each of its implementations."""
    for name, kind in sorted(vars(torch.optim).items()):
        if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
            continue
        if name in ("SparseAdam", "Muon"):  # of sparse gradients, and of matrices alone
            continue
        known = inspect.signature(kind).parameters
        for way in ("default", "foreach", "fused", "capturable"):
            if way != "default" and way not in known:
                continue
            for device in ("cpu", "cuda"):
                if (device == "cpu" and way == "capturable") or (device, way, name) == ("cuda", "fused", "Adagrad"):
                    continue  # torch has none
                marks = [pytest.mark.gpu] if device == "cuda" else []
                settings = {} if way == "default" else {way: True}
                yield pytest.param(kind, settings, device, marks=marks, id=f"{name}-{way}-{device}")


@pytest.mark.parametrize(("kind", "settings", "device"), list(optimizers()))
def test_every_optimizers_step_is_seen(kind, settings, device):
    model, x = build(device), data(device=device)
    optimizer = kind(model.parameters(), lr=torch.tensor(0.1) if settings.get("capturable") else 0.1, **settings)
    for seed in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        step(model, "mxfp8", data(seed, device), optimizer)
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "it does something"
        assert_uses_its_weights(model, "mxfp8", x)


FUSED = [(kind, "cpu") for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)]
FUSED += [pytest.param(kind, "cuda", marks=pytest.mark.gpu) for kind, _ in FUSED[:3]]  # torch's Adagrad has none there


@pytest.mark.parametrize(("kind", "device"), FUSED)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_optimizers_under_every_recipe(kind, recipe, device):
    model = build(device)
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    for seed in range(4):
        step(model, recipe, data(seed, device), optimizer)
        evaluate(model, recipe, data(seed, device))
    assert_uses_its_weights(model, recipe, data(9, device))


@triton.jit
def double_kernel(w_ptr, size, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(w_ptr + offs, 2 * tl.load(w_ptr + offs, mask=offs < size), mask=offs < size)


def assign_data(parameter):
    parameter.data = parameter.data * 2


def assign_data_twice(parameter):
    """The memory of the first goes to the next."""
    parameter.data = torch.full_like(parameter, 3)
    parameter.data = parameter.detach() * 2


WRITERS = {
    "in-place": lambda p: p.mul_(2),
    "data-copy": lambda p: p.data.copy_(2 * p.detach()),
    "main-weights": lambda p: p.data.view(-1).copy_((2 * p.detach()).flatten()),
    "data": assign_data,
    "data-twice": assign_data_twice,
    "foreach": lambda p: torch._foreach_mul_([p.data], 2),
    "numpy": lambda p: p.detach().numpy().__imul__(2),
    "kernel": lambda p: double_kernel[(triton.cdiv(p.numel(), 256),)](p, p.numel(), BLOCK=256),
}
ON = [(name, "cpu") for name in WRITERS if name != "kernel"]
ON += [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in WRITERS if name != "numpy"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("writer", "device"), ON)
def test_every_writer_is_seen(writer, device, recipe):
    model, x = build(device), data(device=device)
    for _ in range(3):
        evaluate(model, recipe, x)
        outcome(model, recipe, x)
        with torch.no_grad():
            for parameter in model.parameters():
                WRITERS[writer](parameter)
        assert_uses_its_weights(model, recipe, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graphed_step_between_evaluations_is_seen(recipe, device):
    torch.utils.deterministic.fill_uninitialized_memory = False
    model, x = build(device), data(device=device)
    sizes = torch.tensor(SIZES, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=device == "cuda", fused=True)

    def train(x):
        optimizer.zero_grad()
        with autocast(RECIPES[recipe]):
            loss = model(x, split_sizes=sizes).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    graphed = make_graphed_step(train, (x,), modules=model, optimizers=optimizer)
    for seed in range(3):
        with constant_weights(model):  # which the replay ends
            evaluate(model, recipe, x)
            graphed(data(seed, device))
            assert_uses_its_weights(model, recipe, x)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_optimizer_in_a_cuda_graph_is_seen(recipe):
    torch.utils.deterministic.fill_uninitialized_memory = False
    model, x = build("cuda"), data(device="cuda")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    for _ in range(3):
        evaluate(model, recipe, x)
        graph.replay()
        assert_uses_its_weights(model, recipe, x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_accumulated_microbatches_use_the_weights_of_their_step(recipe):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for seed in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            with autocast(RECIPES[recipe]):
                model(data(10 * seed + micro), split_sizes=SIZES).square().sum().backward()
        optimizer.step()
        assert_uses_its_weights(model, recipe, data())


def on_each_rank(rank: int, wrapper: str, recipe: str) -> None:
    model = build()
    if wrapper == "zero1":
        optim = importlib.import_module("torch.distributed.optim")  # which warns: not in the tests' process
        module = DistributedDataParallel(model)
        optimizer = optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, fused=True)
    elif wrapper == "ddp":
        module = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    else:
        module = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for seed in range(3):
        step(module, recipe, data(10 * seed + rank), optimizer)
    evaluate(module, recipe, data())
    state = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}
    fresh = build()
    fresh.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    assert_same_bits(outcome(fresh, recipe, data()), outcome(module, recipe, data()))
    first = torch.cat([t.flatten().float() for t in state.values()])
    mine = first.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, mine), "the ranks have the same weights"


@pytest.mark.parametrize("recipe", ["mxfp8", rest("fp8_delayed")])
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "fsdp2"])
def test_distributed_wrappers(wrapper, recipe, tmp_path: Path):
    on_ranks(on_each_rank, wrapper, recipe, folder=tmp_path)


@pytest.mark.parametrize("scope", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_rows_of_one_memory_are_other_weights(recipe, scope):
    """`.data` that is assigned from the same storage, at another place or in another order; within constant_weights."""
    model, x = Sequential(ops.Linear(32, 32, bias=False)), data()
    bank = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(1))
    with constant_weights(model) if scope else nullcontext():
        for values in (bank[0], bank[1], bank[1].t(), bank[0]):
            model[0].weight.data = values
            fresh = Sequential(ops.Linear(32, 32, bias=False))
            fresh.load_state_dict(model.state_dict())
            found = []
            for each in (model, fresh):
                leaf = x.clone().requires_grad_()
                with autocast(RECIPES[recipe]):
                    y = each(leaf)
                found.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaf)))
            assert all(map(torch.equal, *found))


def test_other_data_of_one_memory_between_forward_and_backward_is_refused():
    model, bank = build(), torch.randn(2, 32, 32)
    model[3].weight.data = bank[0]
    y = model(data().requires_grad_(), split_sizes=SIZES)
    model[3].weight.data = bank[1]
    with pytest.raises(RuntimeError, match="got other data"):
        y.sum().backward()


# ------------------------------------------------------------------------------- a stand-in for DeepSpeed's ZeRO-3


class Parameters(OrderedDict):
    """In place of a module's dictionary, which DeepSpeed replaces."""


class Gathered(torch.autograd.Function):
    """y, in front of whose backward the weights are gathered."""

    @staticmethod
    def forward(ctx, y, gather):
        ctx.gather = gather
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        ctx.gather()
        return dy, None


class Zero3:
    """Owns a module's parameters: `full` has their values, and `.data`, which is assigned, has them in a pass of the
    module alone, each time elsewhere. What is released is overwritten. Gradients are taken as they come."""

    def __init__(self, module):
        self.parameters = list(module.parameters())
        for each in module.modules():
            each._parameters = Parameters(each._parameters)
        for at, parameter in enumerate(self.parameters):
            parameter.ds_id, parameter.full = at, parameter.data.clone()
            parameter.data = parameter.data.new_empty(0)
            parameter.register_post_accumulate_grad_hook(self.take)
        self.to_come = len(self.parameters)
        module.register_forward_pre_hook(lambda module, args: self.gather())
        module.register_forward_hook(self.forward_ended)

    def gather(self):
        for parameter in self.parameters:
            if not parameter.numel():
                parameter.data = parameter.full.clone()

    def release(self):
        for parameter in self.parameters:
            parameter.data.fill_(torch.nan)
            parameter.data = parameter.data.new_empty(0)

    def forward_ended(self, module, args, y):
        self.release()
        return Gathered.apply(y, self.gather) if torch.is_grad_enabled() else y

    def take(self, parameter):
        parameter.full.grad, parameter.grad = parameter.grad, None
        self.to_come -= 1
        if not self.to_come:
            self.to_come = len(self.parameters)
            self.release()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("whole", [True, False])
def test_weights_that_their_owner_gathers_for_each_pass(whole, recipe, device):
    """Of the whole Sequential at once, as deepspeed.utils.set_z3_leaf_modules wants it, and of each operation.
    DeepSpeed itself has not been run."""

    def trained(model, weights):
        optimizer = torch.optim.AdamW(weights, lr=0.1)
        outputs = []
        for seed in range(6):
            x = data(seed, device).requires_grad_()
            with autocast(RECIPES.get(recipe)):
                y = model(x, split_sizes=SIZES)
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), autocast(RECIPES.get(recipe)):
                outputs += y.detach(), x.grad, model(x, split_sizes=SIZES)
        return dict(enumerate(outputs))

    plain, model = build(device), build(device)
    owners = [Zero3(module) for module in ([model] if whole else [each for each in model if [*each.parameters()]])]
    full = [parameter.full for owner in owners for parameter in owner.parameters]
    assert_same_bits(trained(model, full), trained(plain, plain.parameters()))
