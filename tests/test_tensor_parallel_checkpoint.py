"""Checkpoints and norms of models that tensor_parallel divides, alone, with divided experts, and `fully_shard`."""
# H hidden size, F inner size, E experts on all ranks

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fuser import Sequential, autocast, ops, prepare
from fuser.distributed import TrainingState, clip_grad_norm_
from recipes import DelayedScaling
from tests.ranks import on_ranks
from tests.reference import assert_same_bits
from tests.test_distributed_checkpoint import adam, check_same, spoil, tokens_of, whole_of

H, F, E = 16, 32, 8


def model_of(tp: Any = None, ep: Any = None, stacked: bool = True) -> Sequential:
    """A dense block, halves of which are divided, and one of experts. Without groups the undivided model."""
    torch.manual_seed(0)
    column: dict[str, Any] = {} if tp is None else {"tensor_parallel": "column", "gated": True, "group": tp}
    row: dict[str, Any] = {} if tp is None else {"tensor_parallel": "row", "group": tp}
    own = E if ep is None else E // ep.size()
    return Sequential(
        ops.Linear(H, 2 * F, **column),
        ops.SwiGLU(),
        ops.Linear(F, H, **row),
        ops.Router(H, E, topk=2),
        ops.Dispatch(E, group=ep),
        ops.GroupedLinear(own, H, 2 * F, stacked=stacked, **column),
        ops.ScaledSwiGLU(group=tp),
        ops.GroupedLinear(own, F, H, stacked=stacked, **row),
        ops.Combine(group=ep),
    )


def trained(stacked: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(stacked=stacked)
    optimizer = adam(model)
    for step in range(2):
        optimizer.zero_grad()
        model(tokens_of(step)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def compare_norms(whole: nn.Module, mine: nn.Module) -> None:
    """Of gradients that are the parameters' numbers, before and behind clipping."""
    for model in (whole, mine):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
    for _ in range(2):
        expected, found = (clip_grad_norm_(model, 0.5) for model in (whole, mine))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert found <= 0.5 * (1 + 1e-5)


def exchange(rank: int, folder: Path, shapes: list[tuple[int, int, int]], stacked: bool) -> None:
    """Undivided -> meshes of dp x ep x tp, one after the other -> undivided: the same bits, and the same norms."""
    torch.set_num_threads(1)
    model, optimizer = trained(stacked)
    reference = copy.deepcopy(whole_of(TrainingState(model, optimizer)))
    if rank == 0:
        dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder / "undivided", no_dist=True)
    dist.barrier()
    previous = "undivided"
    for dp, ep, tp in shapes:
        mesh = init_device_mesh("cpu", (dp, ep, tp), mesh_dim_names=("dp", "ep", "tp"))
        divided = model_of(mesh["tp"], mesh["ep"] if ep > 1 else None, stacked)
        if dp > 1:
            fully_shard(divided, mesh=mesh["dp"])
        spoil(divided)
        state = TrainingState(divided, adam(divided))
        dcp.load({"training": state}, checkpoint_id=folder / previous)
        check_same(whole_of(state), reference)
        if dp == ep == 1:
            share = divided[0].parallel.share(model[0].weight)
            assert_same_bits({"share": divided[0].weight}, {"share": share})
        previous = f"{dp}x{ep}x{tp}"
        dcp.save({"training": state}, checkpoint_id=folder / previous)

        # of whole tensors, as torch.save writes them
        other = spoil(model_of(mesh["tp"], mesh["ep"] if ep > 1 else None, stacked))
        if dp > 1:
            fully_shard(other, mesh=mesh["dp"])
        whole = TrainingState(other, adam(other))
        whole.load_state_dict(copy.deepcopy(TrainingState(model, optimizer).whole_state_dict()))
        check_same(whole_of(whole), reference)
        compare_norms(copy.deepcopy(model), divided)

    again = spoil(model_of(stacked=stacked))
    optimizer_again = adam(again)
    dcp.load({"training": TrainingState(again, optimizer_again)}, checkpoint_id=folder / previous, no_dist=True)
    check_same(whole_of(TrainingState(again, optimizer_again)), reference)


REST = (pytest.mark.rest, pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shapes", "stacked"),
    [
        pytest.param(2, [(1, 1, 2), (1, 2, 1), (2, 1, 1)], True, id="2"),
        pytest.param(2, [(1, 1, 2)], False, id="2, one a group", marks=REST),
        pytest.param(4, [(1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1)], True, id="4", marks=REST),
        pytest.param(4, [(1, 2, 2), (1, 1, 4)], False, id="4, one a group", marks=REST),
        pytest.param(8, [(2, 2, 2)], True, id="8", marks=REST),
    ],
)
def test_a_divided_model_is_saved_and_loaded_as_the_whole_one(
    ranks: int, shapes: list[tuple[int, int, int]], stacked: bool, tmp_path: Path
) -> None:
    on_ranks(exchange, tmp_path, shapes, stacked, folder=tmp_path, ranks=ranks)


def meet_details(rank: int) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def scaled(reduce_amax: bool) -> Sequential:
        model = prepare(model_of(mesh["tp"])[:3], "fp8_delayed")
        with autocast(DelayedScaling(reduce_amax=reduce_amax)):
            model(tokens_of(0)).square().sum().backward()
        return model

    # the state of scales is that of the whole layer, where all ranks have the same
    entries = whole_of(TrainingState(scaled(True)))
    other = TrainingState(prepare(spoil(model_of(mesh["tp"])[:3]), "fp8_delayed"))
    other.load_state_dict({"model": {key.removeprefix("model "): value for key, value in entries.items()}})
    check_same(whole_of(other), entries)
    alone = TrainingState(prepare(model_of()[:3], "fp8_delayed"))
    alone.load_state_dict({"model": {key.removeprefix("model "): value for key, value in entries.items()}})
    check_same(whole_of(alone), entries)
    with pytest.raises(
        ValueError, match=r"amax_history differs between the ranks .* Take DelayedScaling\(reduce_amax=T"
    ):
        TrainingState(scaled(False)).state_dict()

    state = TrainingState(model_of(mesh["tp"]))
    with pytest.raises(ValueError, match=r"0.weight has shape \[32, 16\], but needs 64 along dimension -2"):
        state.load_state_dict({"model": model_of(mesh["tp"]).state_dict()})
    sharded = model_of(mesh["tp"])
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"Parameters that are divided over the ranks \[0, 1\] are sharded over \[0, 1\]"
    ):
        TrainingState(sharded).state_dict()


@pytest.mark.rest
def test_states_of_scales_and_refusals(tmp_path: Path) -> None:
    on_ranks(meet_details, folder=tmp_path)
