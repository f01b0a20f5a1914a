"""Stages of `torch.distributed.pipelining`: every schedule, those too that compute dx and dW apart (zero bubble).

Such a schedule runs backward twice: `torch.autograd.grad` of the stage's inputs, its graph retained, and later of its
weights. Each computes what it is asked for alone. With a `dw_builder` it runs one backward, which leaves weights'
gradients to `backward_dw()`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.utils.checkpoint import checkpoint

from fuser import Sequential, autocast, ops
from ops.products.paths import GroupedPath
from recipes import DelayedScaling, NVFP4BlockScaling, Recipe
from recipes.recipe import HighPrecision
from tests.check_operation import DEVICES
from tests.ranks import on_ranks, quietly

HIDDEN, WIDTH, EXPERTS, TOKENS, MICROBATCHES = 32, 64, 4, 16, 8
# Those of one stage a rank, and of two: rank 0 has the first and the third, or, in a V, the last.
LINE, LOOP, V = ((0,), (1,)), ((0, 2), (1, 3)), ((0, 3), (1, 2))
SCHEDULES = {
    ScheduleGPipe: LINE, Schedule1F1B: LINE, ScheduleLoopedBFS: LOOP, ScheduleInterleaved1F1B: LOOP,
    ScheduleInterleavedZeroBubble: LOOP, ScheduleZBVZeroBubble: V, ScheduleDualPipeV: V,
}  # fmt: skip
OLD = torch.__version__ < "2.13"
APART = ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV  # dx and dW


class Stage(nn.Module):
    def __init__(self, recipe: Recipe, switch: str | None = None) -> None:
        super().__init__()
        experts = {"bias": False, **({switch: True} if switch else {})}
        self.recipe = recipe
        self.layer = Sequential(
            ops.MakeExtraOutput("residual"), ops.RMSNorm(HIDDEN), ops.Router(HIDDEN, EXPERTS, topk=2),
            ops.Dispatch(EXPERTS), ops.GroupedLinear(EXPERTS, HIDDEN, 2 * WIDTH, **experts), ops.ScaledSwiGLU(),
            ops.GroupedLinear(EXPERTS, WIDTH, HIDDEN, **experts), ops.Combine(), ops.AddExtraInput("residual"),
        )  # fmt: skip
        if switch == "accumulate_into_main_grad":
            for linear in (self.layer[4], self.layer[6]):
                linear.weight.grad_added_to_main_grad = False  # for which autograd gets a placeholder

    def forward(self, x: Tensor) -> Tensor:
        with autocast(self.recipe):
            y: Tensor = self.layer(x)
        return y

    def give_main_grads(self) -> None:
        for parameter in self.parameters():
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: p.main_grad if hasattr(p, "main_grad") else p.grad  # type: ignore[misc]
            for name, p in self.named_parameters()
        }


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def begins_at_functions() -> bool:
    """Whether torch begins a backward at the node of an `autograd.Function` whose output is gone: 2.13 does, 2.11 does
    not, since nothing keeps the node."""
    x = torch.ones(1, requires_grad=True)
    node = Sequential(ops.ConstantScale(2.0))(x).grad_fn
    try:
        torch.autograd.grad(GradientEdge(node, 0), x, torch.ones(1))
    except RuntimeError:
        return False
    return True


def run_schedules(rank: int, device_type: str) -> None:
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    with quietly():
        begins = begins_at_functions()
        assert begins or OLD
        alone = [dist.new_group([other]) for other in range(2)][rank]
        delayed = DelayedScaling(amax_reduction_group=alone)
        for kind, of_ranks in SCHEDULES.items():
            for recipe, switch in (
                (HighPrecision(), None), (HighPrecision(), "accumulate_into_main_grad"), (delayed, None),
                (delayed, "delay_wgrad_compute"),
            ):  # fmt: skip
                twice = switch != "delay_wgrad_compute" and kind in APART
                # Backward from the last microbatch to the first finds other scales.
                compares = kind is not ScheduleLoopedBFS or recipe is not delayed
                if compares and (begins or not twice):
                    run_schedule(kind, of_ranks[rank], 2 * len(of_ranks[0]), recipe, switch, twice, device)


def run_schedule(
    kind: type, own: tuple[int, ...], stages: int, recipe: Recipe, switch: str | None, twice: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    delays = switch == "delay_wgrad_compute"
    layers = [Stage(recipe, switch).to(device) for _ in range(stages)]
    expected = [Stage(recipe, None if delays else switch).to(device) for _ in range(stages)]
    for layer, other in zip(layers, expected, strict=True):
        other.load_state_dict(layer.state_dict())
        layer.give_main_grads()
        other.give_main_grads()
    x, target = torch.randn(2, MICROBATCHES * TOKENS, HIDDEN, device=device)
    for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        for layer in expected:
            part = layer(part)
        loss_of(part, wanted).backward()

    # Without these torch runs each stage once on uninitialised memory, whose amaxes would be recorded.
    like = torch.empty(TOKENS, HIDDEN, device=device, requires_grad=True)
    known = {"input_args": (like,), "output_args": (like,)}
    made = [
        PipelineStage(
            layers[at], at, stages, device, **known,
            dw_builder=partial(getattr, layers[at].layer, "backward_dw") if delays else None,
        )
        for at in own
    ]  # fmt: skip
    settings = {"n_microbatches": MICROBATCHES, "loss_fn": loss_of, "scale_grads": False}
    schedule = kind(made[0] if len(made) == 1 else made, **settings)
    targets = {"target": target} if stages - 1 in own else {}
    schedule.step(*([x] if 0 in own else []), **targets)
    # The later backward of delayed scaling has later scales, under which E5M2 rounds otherwise, by up to an eighth.
    bound = 0.125 if twice and isinstance(recipe, DelayedScaling) else 1e-5
    for at in own:
        for name, gradient in layers[at].gradients().items():
            of_one = expected[at].gradients()[name]
            assert gradient is not None and of_one.any()
            error = (gradient - of_one).norm() / of_one.norm()
            assert error < bound, (kind.__name__, type(recipe).__name__, switch, at, name, error)


@pytest.mark.rest
@pytest.mark.skipif(OLD, reason="In torch 2.11 gloo does not connect the ranks of a schedule with two stages a rank.")
def test_every_schedule_has_the_gradients_of_microbatches_one_after_the_other(tmp_path: Path) -> None:
    on_ranks(run_schedules, "cpu", folder=tmp_path)


@pytest.mark.gpu2
def test_every_schedule_on_two_gpus(tmp_path: Path) -> None:
    on_ranks(run_schedules, "cuda", folder=tmp_path, backend="nccl")


@contextmanager
def counted_products() -> Iterator[list[str]]:
    done: list[str] = []

    def noted(name: str):
        product = getattr(GroupedPath, name)

        def call(self, *arguments, **settings):
            done.append(name)
            return product(self, *arguments, **settings)

        return patch.object(GroupedPath, name, call)

    with noted("fprop"), noted("dgrad"), noted("wgrad"):
        yield done


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fusions", ["fused", "unfused"])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", NVFP4BlockScaling(disable_stochastic_rounding=True)], ids=str)
def test_two_backwards_divide_the_gradients_between_them(recipe: str | Recipe, fusions: str, device: str) -> None:
    torch.manual_seed(0)
    operations = ops.GroupedLinear(3, 32, 64), ops.ScaledSwiGLU(), ops.GroupedLinear(3, 32, 32)
    model = Sequential(*operations, fusions=None if fusions == "fused" else ()).to(device, torch.bfloat16)
    weights = list(model.parameters())
    for step in range(3):  # a GPU's launches are repeated
        x = torch.randn(13, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
        with autocast(recipe):
            y = model(x, split_sizes=[5, 0, 8], scales=torch.rand(13, device=device))
        dy = torch.randn_like(y)
        expected = torch.autograd.grad(y, [x, *weights], dy, retain_graph=True)
        with counted_products() as done:
            (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        assert sorted(done) == ["dgrad", "dgrad"] or step
        with counted_products() as done:
            dw = torch.autograd.grad(y, weights, dy)
        assert sorted(done) == ["dgrad", "wgrad", "wgrad"] or step, "FC1's dgrad is dx alone"
        for found, of_both in zip((dx, *dw), expected, strict=True):
            assert torch.equal(found, of_both)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_so_do_two_backwards_of_a_checkpoint(recipe: str, device: str) -> None:
    torch.manual_seed(0)
    model = Sequential(ops.GroupedLinear(3, 32, 64), ops.ScaledSwiGLU(), ops.GroupedLinear(3, 32, 32)).to(device)
    x, scales = torch.randn(13, 32, device=device, requires_grad=True), torch.rand(13, device=device)
    call = partial(model, split_sizes=[5, 0, 8], scales=scales)
    with autocast(recipe):
        y, of_checkpoint = call(x), checkpoint(call, x, use_reentrant=False)
    leaves, dy = [x, *model.parameters()], torch.randn_like(y)
    dx = torch.autograd.grad(of_checkpoint, leaves[:1], dy, retain_graph=True)
    dw = torch.autograd.grad(of_checkpoint, leaves[1:], dy)
    for found, expected in zip((*dx, *dw), torch.autograd.grad(y, leaves, dy), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("before", ["the same", "of a loss that no quantizer sees"])
def test_of_several_backwards_the_first_that_casts_alone_records_amaxes(before: str) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    once, twice = (Sequential(ops.MakeExtraOutput("seen"), ops.Linear(32, 32)) for _ in range(2))
    twice.load_state_dict(once.state_dict())
    x = torch.randn(16, 32)
    for model in (once, twice):
        with autocast(recipe):
            y, made = model(x.clone().requires_grad_(), outputs=("seen",))
        if model is twice:
            (y if before == "the same" else made["seen"]).sum().backward(retain_graph=True)
        y.sum().backward()
    histories = [name for name in once.state_dict() if "grad" in name and "history" in name]
    assert histories and once.state_dict()[histories[0]].any()
    for of_once, of_twice in zip(once.state_dict().values(), twice.state_dict().values(), strict=True):
        assert torch.equal(torch.as_tensor(of_once), torch.as_tensor(of_twice))
