"""Checkpoints of expert-parallel models, between numbers of ranks and the unsharded model, and with `fully_shard`."""
# H hidden size, F expert size, E experts on all ranks

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fuser import MasterWeights, Sequential, autocast, lora, ops, prepare, to_quantized
from fuser.distributed import TrainingState, clip_grad_norm_, expert_parameters
from recipes import DelayedScaling
from tests.ranks import on_ranks
from tests.reference import assert_close, assert_same_bits
from tests.shared_memory import symmetric_on_cpu

H, F, E, TOKENS = 16, 32, 8, 24
REST = (pytest.mark.rest, pytest.mark.slow)


def block(
    group: Any = None,
    stacked: bool = True,
    bias: bool = True,
    device: str = "cpu",
    adapter_rank: int = 0,
    transport: str = "alltoall",
) -> Sequential:
    """An unsharded block, or one with this rank's experts of it. adapter_rank: of their adapters, if they have some."""
    torch.manual_seed(0)
    over_ranks: dict[str, Any] = {"group": group, "transport": transport}
    own = E if group is None else E // group.size()
    options = {"bias": bias, "stacked": stacked}
    layer = Sequential(
        ops.RMSNorm(H),
        ops.Router(H, E, topk=2),
        ops.Dispatch(E, capacity=2 * TOKENS if transport == "symmetric" else None, **over_ranks),
        ops.GroupedLinear(own, H, 2 * F, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(own, F, H, scale_bias=bias, **options),
        ops.Combine(**over_ranks),
        ops.Linear(H, H),
    ).to(device)
    if adapter_rank:
        lora.add(layer, adapter_rank, ["3", "5"])
    return layer


def sum_over(group: Any, model: nn.Module) -> None:
    """The gradients of replicated parameters, over the ranks that divide the experts."""
    experts = expert_parameters(model)
    for key, parameter in model.named_parameters():
        grad = parameter.grad
        if key not in experts and grad is not None:
            dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)


def tokens_of(step: int, rank: int = 0, ranks: int = 1) -> Tensor:
    x = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(step))
    return x.chunk(ranks)[rank]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, group: Any = None) -> list[float]:
    """The losses, and the norms of the gradients behind them, of all tokens: of the rank's share with a group."""
    rank, ranks = (0, 1) if group is None else (group.get_local_rank(), group.size())
    figures = []
    for step in steps:
        optimizer.zero_grad()
        x = tokens_of(step, rank, ranks).to(next(model.parameters()).device)
        loss = model(x).square().sum() / TOKENS
        loss.backward()
        total = loss.detach().clone()
        if group is not None:
            sum_over(group.get_group(), model)
            dist.all_reduce(total, group=group.get_group())
        norm = clip_grad_norm_(model, 0.5)
        optimizer.step()
        figures += [total.item(), norm.item()]
    return figures


def adam(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def unsharded_after(steps: int, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = block(**settings)
    optimizer = adam(model)
    train(model, optimizer, range(steps))
    return model, optimizer


def spoil(model: nn.Module) -> nn.Module:
    """Parameters that a load has to overwrite."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    return model


def whole_of(state: TrainingState) -> dict[str, Tensor]:
    parts = state.whole_state_dict()
    return {f"{part} {key}": value for part, entries in parts.items() for key, value in entries.items()}


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    tensors = [key for key, value in expected.items() if isinstance(value, Tensor)]
    assert_same_bits({k: found[k] for k in tensors}, {k: expected[k] for k in tensors})
    assert {k: v for k, v in found.items() if k not in tensors} == {
        k: v for k, v in expected.items() if k not in tensors
    }


# ------------------------------------------------------------------------------ between numbers of ranks, and one


def exchange(rank: int, folder: Path, ranks: int, settings: dict[str, Any]) -> None:
    """Unsharded -> n ranks -> 2 x n/2 ranks -> unsharded: the same bits, and the optimizer goes on as it would have."""
    torch.set_num_threads(1)
    model, optimizer = unsharded_after(2, **settings)
    reference = whole_of(TrainingState(model, optimizer))
    if rank == 0:
        dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder / "unsharded", no_dist=True)
    dist.barrier()

    previous = "unsharded"
    for name, shape in (("all", (1, ranks)), ("half", (2, ranks // 2))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        sharded = spoil(block(mesh["ep"], **settings))
        state = TrainingState(sharded, adam(sharded))
        dcp.load({"training": state}, checkpoint_id=folder / previous)
        check_same(whole_of(state), reference)
        if settings["stacked"]:
            weight = "3.lora_B.weight" if settings.get("adapter_rank") else "3.weight"
            assert state.state_dict()["model"][weight].shape[:2] == (E, 2 * F)
            assert state.state_dict()["optimizer"][f"state.{weight}.exp_avg"].to_local().shape[0] == E // shape[1]
        dcp.save({"training": state}, checkpoint_id=folder / name)
        previous = name

    again = spoil(block(**settings))
    optimizer_again = adam(again)
    dcp.load({"training": TrainingState(again, optimizer_again)}, checkpoint_id=folder / "half", no_dist=True)
    check_same(whole_of(TrainingState(again, optimizer_again)), reference)
    assert train(again, optimizer_again, range(2, 4)) == train(model, optimizer, range(2, 4))

    # the same on ranks, of whole tensors: what torch.save writes
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
    model, optimizer = unsharded_after(2, **settings)
    sharded = spoil(block(mesh["ep"], **settings))
    optimizer_sharded = adam(sharded)
    written = copy.deepcopy(TrainingState(model, optimizer).whole_state_dict())
    TrainingState(sharded, optimizer_sharded).load_state_dict(written)
    found = train(sharded, optimizer_sharded, range(2, 5), mesh["ep"])
    torch.testing.assert_close(found, train(model, optimizer, range(2, 5)), rtol=1e-5, atol=1e-6)


def train_over_symmetric(rank: int, folder: Path) -> None:
    with symmetric_on_cpu(folder):
        shard_over_the_other_dimension(rank, folder, "symmetric")


def shard_over_the_other_dimension(rank: int, folder: Path, transport: str = "alltoall") -> None:
    """`fully_shard` over dp, experts over ep: trained as the unsharded model is, saved, and loaded on one rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model, optimizer = unsharded_after(0)
    sharded = block(mesh["ep"], transport=transport)
    TrainingState(sharded).load_state_dict(copy.deepcopy(TrainingState(model).whole_state_dict()))
    for operation in (sharded[3], sharded[5], sharded):
        fully_shard(operation, mesh=mesh["dp"])
    optimizer_sharded = adam(sharded)

    def step(number: int) -> None:
        x = tokens_of(number)
        loss = model(x).square().sum() / TOKENS
        loss.backward()
        part = sharded(x.chunk(4)[rank]).square().sum() / TOKENS * mesh["dp"].size()  # fully_shard takes the mean
        part.backward()
        sum_over(mesh["ep"].get_group(), sharded)
        total = part.detach() / mesh["dp"].size()
        dist.all_reduce(total)
        torch.testing.assert_close(total, loss.detach(), rtol=1e-5, atol=1e-6)
        norms = [clip_grad_norm_(m, 0.5) for m in (sharded, model)]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=1e-6)
        for each in (optimizer, optimizer_sharded):
            each.step()
            each.zero_grad()

    for number in range(3):
        step(number)
    state = TrainingState(sharded, optimizer_sharded)
    weight = state.state_dict()["model"]["3.weight"]
    assert isinstance(sharded[3].weight, DTensor) and weight.shape == (E, 2 * F, H)
    assert weight.to_local().shape[0] == E // 4
    expected = whole_of(TrainingState(model, optimizer))
    found = whole_of(state)
    tensors = [key for key, value in expected.items() if isinstance(value, Tensor)]
    assert_close({k: found[k] for k in tensors}, {k: expected[k] for k in tensors}, {torch.float32: 1e-4})

    dcp.save({"training": state}, checkpoint_id=folder / "fsdp")
    again = spoil(block())
    loaded = TrainingState(again, adam(again))
    dcp.load({"training": loaded}, checkpoint_id=folder / "fsdp", no_dist=True)
    check_same(whole_of(loaded), found)

    # and back: of what the unsharded model has, and of the checkpoint
    for source in ("whole", "checkpoint"):
        spoil(sharded)
        if source == "whole":
            TrainingState(sharded, optimizer_sharded).load_state_dict(copy.deepcopy(loaded.whole_state_dict()))
        else:
            dcp.load({"training": TrainingState(sharded, optimizer_sharded)}, checkpoint_id=folder / "fsdp")
        check_same(whole_of(TrainingState(sharded, optimizer_sharded)), found)

    # what is sharded may be replicated too
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "dp", "ep"))
    hybrid = block(mesh["ep"])
    fully_shard(hybrid, mesh=mesh["replicas", "dp"])
    state = TrainingState(hybrid, adam(hybrid))
    dcp.load({"training": state}, checkpoint_id=folder / "fsdp")
    check_same(whole_of(state), found)


@pytest.mark.rest
@pytest.mark.slow
def test_experts_over_one_dimension_and_fully_shard_over_the_other(tmp_path: Path) -> None:
    on_ranks(shard_over_the_other_dimension, tmp_path, folder=tmp_path, ranks=4)


@pytest.mark.interpreter
@pytest.mark.rest
@pytest.mark.slow
def test_the_same_over_symmetric_memory(tmp_path: Path) -> None:
    on_ranks(train_over_symmetric, tmp_path, folder=tmp_path, ranks=4)


def exchange_with_sharded(rank: int, folder: Path, device: str) -> None:
    """Two ranks that divide the experts -> two that divide everything -> one: the same bits."""
    previous, figures = None, []
    for name, shape in (("experts", (1, 2)), ("everything", (2, 1))):
        mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "ep"))
        sharded = block(mesh["ep"], device=device)
        if shape[0] > 1:
            fully_shard(sharded, mesh=mesh["dp"])
        optimizer = adam(sharded)
        state = TrainingState(sharded, optimizer)
        if previous is None:
            figures = train(sharded, optimizer, range(3), mesh["ep"])
            expected = whole_of(state)
        else:
            dcp.load({"training": state}, checkpoint_id=folder / previous)
            check_same(whole_of(state), expected)
        dcp.save({"training": state}, checkpoint_id=folder / name)
        previous = name
    alone = block(device=device)
    optimizer = adam(alone)
    dcp.load({"training": TrainingState(alone, optimizer)}, checkpoint_id=folder / "everything")
    check_same(whole_of(TrainingState(alone, optimizer)), expected)
    assert all(math.isfinite(figure) for figure in [*figures, *train(alone, optimizer, range(3, 5))])


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param("cpu", "gloo", marks=REST),
        pytest.param("cuda", "nccl", marks=(pytest.mark.gpu, pytest.mark.gpu2)),
    ],
)
def test_experts_become_shards_of_everything(device: str, backend: str, tmp_path: Path) -> None:
    on_ranks(exchange_with_sharded, tmp_path, device, folder=tmp_path, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, {"stacked": True}, id="2"),
        pytest.param(4, {"stacked": True}, id="4", marks=REST),
        pytest.param(2, {"stacked": False}, id="2, one a group", marks=REST),
        pytest.param(4, {"stacked": False, "bias": False}, id="4, one a group", marks=REST),
        pytest.param(2, {"stacked": True, "adapter_rank": 2}, id="2, adapters", marks=REST),
        pytest.param(2, {"stacked": False, "adapter_rank": 2}, id="2, one a group, adapters", marks=REST),
    ],
)
def test_a_checkpoint_loads_on_other_numbers_of_ranks(ranks: int, settings: dict[str, Any], tmp_path: Path) -> None:
    on_ranks(exchange, tmp_path, ranks, settings, folder=tmp_path, ranks=ranks)


# ------------------------------------------------------------------------------------------------ what else there is


def meet_details(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    ep = mesh["ep"]
    experts = {"3.weight", "3.bias", "5.weight", "5.bias"}

    # delayed scaling's state has a column for each expert; it is made before a load
    model = block()
    with autocast(DelayedScaling(reduce_amax=False)):
        model(tokens_of(0)).square().sum().backward()
    expected = whole_of(TrainingState(model))
    assert expected["model 3.quantizer_input_amax_history"].shape[1] == E
    sharded = prepare(spoil(block(ep)), "fp8_delayed")
    TrainingState(sharded).load_state_dict(copy.deepcopy(TrainingState(model).whole_state_dict()))
    check_same(whole_of(TrainingState(sharded)), expected)
    dcp.save({"training": TrainingState(sharded)}, checkpoint_id=folder / "delayed")
    again = prepare(spoil(block()), "fp8_delayed")
    dcp.load({"training": TrainingState(again)}, checkpoint_id=folder / "delayed", no_dist=True)
    check_same(whole_of(TrainingState(again)), expected)

    # the norm: of any order, with experts that one rank has frozen, not finite, and without ranks torch's to the bit
    model, sharded = block(), block(ep)
    TrainingState(sharded).load_state_dict(TrainingState(model).whole_state_dict())
    assert expert_parameters(sharded).keys() == experts and not expert_parameters(model)
    model(tokens_of(0)).square().sum().backward()
    sharded(tokens_of(0, rank, 2)).square().sum().backward()
    sum_over(ep.get_group(), sharded)
    for order in (1.0, 2.0, math.inf):
        norm = clip_grad_norm_(model, 1e9, order)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, order))
        torch.testing.assert_close(clip_grad_norm_(sharded, 1e9, order), norm, rtol=1e-5, atol=0)
    before = clip_grad_norm_(sharded, 1e-3)
    torch.testing.assert_close(clip_grad_norm_(sharded, 1e9), before.new_tensor(1e-3), rtol=1e-3, atol=0)
    for name in experts if rank else ():
        sharded.get_parameter(name).grad = None
    assert same_everywhere(clip_grad_norm_(sharded, 1e9).item()) < 1e-3
    if rank == 0:
        sharded[3].weight.grad[0, 0, 0] = math.inf
    with pytest.raises(RuntimeError, match="The norm of order 2.0 of all gradients is inf"):
        clip_grad_norm_(sharded, 1.0, error_if_nonfinite=True)

    # wrapped, the keys are the same
    wrapped = block(ep)
    wrapped[3] = checkpoint_wrapper(wrapped[3])
    state = TrainingState(wrapped).state_dict()["model"]
    assert state.keys() == block().state_dict().keys() and state["3.weight"].shape[0] == E

    # an optimizer that has not run, where gradients are there
    fresh = block(ep)
    given = copy.deepcopy(TrainingState(fresh, adam(fresh)).whole_state_dict())
    given["optimizer"]["state.0.weight.exp_avg"].fill_(3.0)
    given["optimizer"]["state.0.weight.step"].fill_(1.0)
    optimizer = adam(fresh)
    fresh(tokens_of(0, rank, 2)).square().sum().backward()
    gradients = [parameter.grad for parameter in fresh.parameters()]
    TrainingState(fresh, optimizer).load_state_dict(given)
    assert all(p.grad is gradient for p, gradient in zip(fresh.parameters(), gradients, strict=True))
    assert (optimizer.state[fresh[0].weight]["exp_avg"] == 3).all()

    # and one that would not take its state
    some = torch.optim.Adam([fresh[0].weight])
    some.step()
    some.add_param_group({"params": list(fresh[1:].parameters())})
    with pytest.raises(RuntimeError, match=r"The optimizer has no state\.1\.weight\.\w+ \(and \d+ others\)"):
        TrainingState(fresh, some).load_state_dict(given)

    # what it cannot know
    with pytest.raises(ValueError, match="0 is a Dispatch over ranks, but no GroupedLinear follows it"):
        TrainingState(nn.ModuleList([ops.Dispatch(E, group=ep), ops.Combine(group=ep), ops.GroupedLinear(4, H, H)]))
    with pytest.raises(ValueError, match="1 has 8 experts on each of 2 ranks, but its Dispatch, 0, has num_experts=8"):
        expert_parameters(nn.ModuleList([ops.Dispatch(E, group=ep), ops.GroupedLinear(E, H, H)]))
    divided = ops.GroupedLinear(4, H, H, tensor_parallel="row", group=ep)
    with pytest.raises(
        ValueError, match=r"1 has its experts divided over the ranks \[0, 1\], and their width over \[0"
    ):
        TrainingState(nn.ModuleList([ops.Dispatch(E, group=ep), divided]))
    with pytest.raises(ValueError, match=r"3.weight has shape \[4, 64, 16\], but needs 8 experts along dimension 0"):
        TrainingState(block(ep)).load_state_dict({"model": block(ep).state_dict()})
    sharded = block(ep)
    fully_shard(sharded, mesh=ep)
    with pytest.raises(ValueError, match=r"over the ranks \[0, 1\] are sharded over \[0, 1\], whose ranks have other"):
        TrainingState(sharded).state_dict()


def same_everywhere(number: float) -> float:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, number)
    assert set(everywhere) == {number}
    return number


@pytest.mark.rest
def test_recipe_state_norms_and_refusals(tmp_path: Path) -> None:
    on_ranks(meet_details, tmp_path, folder=tmp_path)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for seed in steps:
        x = torch.randn(16, H, generator=torch.Generator().manual_seed(seed))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def dense() -> Sequential:
    torch.manual_seed(0)
    return Sequential(ops.Linear(H, F), ops.GELU(), ops.Linear(F, H))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("before", ["nothing", "backward", "zero_grad"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9, dampening=0.5)])
def test_a_run_goes_on_as_if_uninterrupted_whatever_ran_before_the_load(kind: Any, before: str, tmp_path: Path) -> None:
    model = dense()
    optimizer = kind(model.parameters(), lr=1e-2)
    trained(model, optimizer, range(3))
    dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    expected = trained(model, optimizer, range(3, 6))

    again = dense()
    optimizer = kind(again.parameters(), lr=1e-2)
    if before != "nothing":
        again(torch.randn(4, H)).sum().backward()
    if before == "zero_grad":
        optimizer.zero_grad(set_to_none=False)
    dcp.load({"training": TrainingState(again, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    optimizer.zero_grad()
    assert trained(again, optimizer, range(3, 6)) == expected


WITH_STEPS = ("AdamW", "NAdam", "RAdam", "ASGD", "Rprop", "Adagrad", "Adadelta", "RMSprop", "Adamax")


@pytest.mark.parametrize(
    "kind",
    [*(getattr(torch.optim, name) for name in WITH_STEPS), partial(torch.optim.SGD, momentum=0.9, dampening=0.5)],
)
def test_a_state_before_the_first_step_changes_nothing_and_begins_as_a_new_run(kind: Any) -> None:
    model, other = dense(), dense()
    optimizers = [kind(m.parameters(), lr=1e-2) for m in (model, other)]
    saved = copy.deepcopy(TrainingState(other, optimizers[1]).state_dict())
    assert bool(optimizers[1].state) == (kind is torch.optim.Adagrad)  # which makes it at once
    expected = trained(model, optimizers[0], range(3))
    assert trained(other, optimizers[1], range(3)) == expected
    if not isinstance(kind, partial):  # what SGD does in its first step alone its state does not tell
        again = dense()
        optimizer = kind(again.parameters(), lr=1e-2)
        TrainingState(again, optimizer).load_state_dict(saved)
        assert trained(again, optimizer, range(3)) == expected


def test_an_optimizer_whose_first_step_fails_is_as_before() -> None:
    model = dense()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)  # which needs a closure
    model(torch.randn(4, H)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    with pytest.raises(TypeError, match="is not callable"):
        TrainingState(model, optimizer).state_dict()
    assert optimizer.param_groups[0]["lr"] == 0.5 and not optimizer.state
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_an_optimizer_of_masters_is_refused() -> None:
    model = to_quantized(dense(), "mxfp8")
    masters = MasterWeights(model.parameters())
    with pytest.raises(ValueError, match="AdamW steps what is no parameter of Sequential, such as masters"):
        TrainingState(model, masters.attach(torch.optim.AdamW(masters.parameters())))


@pytest.mark.parametrize("flagged", [False, True], ids=["plain", "placeholders"])
def test_main_grad_is_clipped_where_it_is_the_gradient(flagged: bool) -> None:
    plain, model = dense(), dense()
    for linear in (model[0], model[2]):
        linear.accumulate_into_main_grad = True
        linear.weight.main_grad = torch.zeros_like(linear.weight)
        if flagged:
            linear.weight.grad_added_to_main_grad = False
    x = torch.randn(8, H)
    for one in (plain, model):
        one(x).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    placeholders = [linear.weight.grad for linear in (model[0], model[2])]
    assert all((placeholder is not None) == flagged for placeholder in placeholders)
    torch.testing.assert_close(clip_grad_norm_(model, 0.5), expected)
    for linear, reference in ((model[0], plain[0]), (model[2], plain[2])):
        torch.testing.assert_close(linear.weight.main_grad, reference.weight.grad)
        torch.testing.assert_close(linear.bias.grad, reference.bias.grad)
