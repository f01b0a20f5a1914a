"""Collectives as operations, and layers that ranks divide, over gloo ranks: against the undivided layer."""
# T rows, H features, F inner features, n ranks

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fused import ForwardLinearBiasActivation
from fuser import Sequential, autocast, checkpoint, ops
from fuser.graph import make_graphed_callables
from recipes import DelayedScaling, NVFP4BlockScaling
from tests.ranks import on_ranks, quietly
from tests.reference import assert_close, assert_same_bits

# Relative to the largest magnitude. Beside the order of summation, bf16 and fp16 round each rank's part of a sum, then
# the sum of every two: with 4 ranks three times what the whole layer rounds.
SUMMED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
DTYPES = tuple(SUMMED)
NVFP4 = NVFP4BlockScaling(disable_stochastic_rounding=True)
RANKS = [2, pytest.param(4, marks=[pytest.mark.rest, pytest.mark.slow])]


def sentence(run: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        run()
    return str(raised.value)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------------------- collectives


def run_collectives(rank: int, ranks: int) -> None:
    """Small integers, whose sums are exact in every dtype: the bits of the formulas."""
    with quietly():
        group = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))["tp"]
        generator = torch.Generator().manual_seed(0)
        for dtype in DTYPES:
            for shape in ((2 * ranks, 3), (0, 4), (ranks,), (ranks, 2, 5)):
                rows = shape[0]
                xs = [torch.randint(-4, 5, shape, generator=generator).to(dtype) for _ in range(ranks)]
                wide = (rows * ranks, *shape[1:])
                more = [torch.randint(-4, 5, wide, generator=generator).to(dtype) for _ in range(ranks)]
                zeros = torch.zeros_like(xs[0])

                def of_rank(whole: Tensor) -> Tensor:
                    return whole.chunk(ranks)[rank] if len(whole) else whole

                cases: list[tuple[Any, list[Tensor], list[Tensor], Tensor, Tensor]] = [
                    (ops.AllGather(group), xs, more, torch.cat(xs), of_rank(sum(more))),
                    (ops.ReduceScatter(group), more, xs, of_rank(sum(more)), torch.cat(xs)),
                    (ops.Gather(group), xs, more[:1] * ranks, torch.cat(xs), of_rank(more[0])),
                    (ops.Scatter(group), more[:1] * ranks, xs, of_rank(more[0]), torch.cat(xs)),
                    (ops.AllReduce(group), xs, xs[::-1], sum(xs), xs[::-1][rank]),
                ]
                for src in (0, ranks - 1):
                    dx = sum(xs) if rank == src else zeros
                    cases.append((ops.Broadcast(src, group), xs[::-1], xs, xs[::-1][src], dx))
                for operation, given, dys, y_wanted, dx_wanted in cases:
                    x = given[rank].clone().requires_grad_()
                    y = operation(x)
                    y.backward(dys[rank])
                    assert_same_bits({"y": y, "dx": x.grad}, {"y": y_wanted, "dx": dx_wanted})
                    assert torch.equal(x, given[rank]), "x stays as it is"
                    # in a pipeline, of columns of something wider, without gradients
                    layer = Sequential(ops.Identity(), operation, ops.ConstantScale(2.0))
                    strided = given[rank].repeat_interleave(2, -1)[..., ::2]
                    assert torch.equal(layer(strided), 2 * y_wanted)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_collectives_and_their_gradients(ranks: int, tmp_path: Path) -> None:
    on_ranks(run_collectives, ranks, folder=tmp_path, ranks=ranks)


def refuse_collectives(rank: int) -> None:
    with quietly():
        group = dist.group.WORLD
        scatter = ops.ReduceScatter(group)
        x = drawn(0, 4, 3)
        assert sentence(lambda: scatter(x[:3]), ValueError).endswith(
            "x has 3 rows, but the 2 ranks of the group must divide them. Pad x to a multiple of 2 rows."
        )
        assert "x has 3 rows, but the 2 ranks" in sentence(lambda: ops.Scatter(group)(x[:3]), ValueError)
        for kind in (ops.AllGather, ops.ReduceScatter, ops.Gather, ops.Scatter):
            assert "x has no dimension, but rows are needed" in sentence(lambda k=kind: k(group)(x[0, 0]), ValueError)
        assert "src is 2, but the group has the ranks 0 to 1" in sentence(lambda: ops.Broadcast(2, group), ValueError)
        assert "src is 1.5, but must be an integer" in sentence(lambda: ops.Broadcast(1.5, group), TypeError)

        # ranks that differ get one sentence, and can go on
        for mine in (x[: 2 + rank], x.to((torch.float32, torch.float64)[rank]), x.clone().requires_grad_(rank == 0)):
            said = sentence(lambda mine=mine: ops.AllGather(group)(mine), RuntimeError)
            assert "The ranks of one process group differ in what they exchange: rank 0: AllGather of [" in said
            told: list[str] = ["", ""]
            dist.all_gather_object(told, said)
            assert told[0] == told[1]
        said = sentence(lambda: scatter(x[: 3 + rank]), RuntimeError if rank else ValueError)
        assert "x has 3 rows, but the 2 ranks of the group must divide them" in said
        assert torch.equal(ops.AllReduce(group)(x), 2 * x)

        said = sentence(lambda: ops.Scatter(group)(x[: 2 + 2 * rank]), RuntimeError)
        assert "rank 0: Scatter of [2, 3] in torch.float32 without a gradient; rank 1: Scatter of [4, 3]" in said

        # a device without a backend
        elsewhere = ops.AllReduce(group)
        elsewhere.group.backends = {"cuda": "nccl"}
        assert "x is on cpu, but the group has nccl for cuda. Move x," in sentence(lambda: elsewhere(x), ValueError)
        assert elsewhere.group.why_not_captured(torch.device("cuda")) is None, "NCCL's can be captured"

        # groups
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        assert 'but ranks meet along one. Name it: mesh["tp"].' in sentence(lambda: ops.AllReduce(mesh), ValueError)
        first = dist.new_group([0])
        if rank == 1:
            assert "group does not contain this process" in sentence(lambda: ops.AllReduce(first), ValueError)
        assert "group is 'tp', but must be a torch.distributed ProcessGroup, or a DeviceMesh" in sentence(
            lambda: ops.AllReduce("tp"), TypeError
        )
        operation = ops.Broadcast(1, mesh["tp"])
        assert copy.deepcopy(operation).group == operation.group
        assert repr(operation) == "Broadcast(src=1, group=<ranks 0, 1>)"
        assert "A process group cannot be written down" in sentence(lambda: pickle.dumps(operation), TypeError)

        # explained, not repeated; captured with NCCL alone
        says = Sequential(ops.Scatter(group)).explain()
        assert "Scatter  [this rank's rows, backward all_gather, over 2 ranks (gloo)]" in says
        assert "Its group has gloo for cpu" in ops.Scatter(group).group.why_not_captured(torch.device("cpu"))
        with autocast(batch_invariant=True):
            assert_same_bits({"y": ops.Scatter(group)(x)}, {"y": x.chunk(2)[rank]})

        layer = Sequential(ops.Bias(3), operation)
        lines = layer.explain(device="cuda").splitlines()
        assert any(
            line.endswith("Broadcast  [broadcast, backward reduce, over 2 ranks (gloo), rank 1]") for line in lines
        )
        assert sum("not repeated: A collective is issued by its process group" in line for line in lines) > 0
        said = sentence(lambda: make_graphed_callables(layer, (x,)), NotImplementedError)
        assert "Operation 1 (Broadcast) cannot be captured: Its group has gloo for " in said
        assert "whose collectives run on the host, where a graph stops; NCCL's can be captured." in said


def test_collectives_refuse_what_they_cannot_exchange(tmp_path: Path) -> None:
    on_ranks(refuse_collectives, folder=tmp_path)


# ------------------------------------------------------------------------------------------------------------- Linear


class Block(NamedTuple):
    """Column, an activation, row: the pair of layers that Megatron divides, with what may stand around them.

    shape: of all rows; tail: an operation that follows
    residual: between MakeExtraOutput and AddExtraInput, so that the fusions with these match
    """

    shape: tuple[int, ...] = (8,)
    H: int = 6
    F: int = 8
    dtype: torch.dtype = torch.float64
    bias: bool = True
    sequence_parallel: bool = False
    activation: str = "GELU"
    residual: bool = False
    tail: str | None = None
    main_grad: bool = False
    delay: bool = False
    fusions: Any = None
    seed: int = 0

    def layer(self, group: Any = None) -> Sequential:
        """The whole layer, or this rank's share of it."""
        torch.manual_seed(self.seed)
        settings: dict[str, Any] = {"bias": self.bias, "dtype": self.dtype, "accumulate_into_main_grad": self.main_grad}
        settings["delay_wgrad_compute"] = self.delay
        gated = self.activation == "SwiGLU"
        if group is not None:
            settings |= {"group": group, "sequence_parallel": self.sequence_parallel}
        column = {} if group is None else {"tensor_parallel": "column", "gated": gated}
        row = {} if group is None else {"tensor_parallel": "row"}
        pair = [
            ops.Linear(self.H, (2 if gated else 1) * self.F, **settings, **column),
            getattr(ops, self.activation)(),
            ops.Linear(self.F, self.H, **settings, **row),
        ]
        if self.tail is not None:
            pair += [ops.ConstantScale(0.5) if self.tail == "ConstantScale" else getattr(ops, self.tail)()]
        if self.residual:
            pair = [ops.MakeExtraOutput("kept"), *pair, ops.AddExtraInput("kept")]
        layer = Sequential(*pair) if self.fusions is None else Sequential(*pair, fusions=self.fusions)
        for parameter in layer.parameters() if self.main_grad else ():
            parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
        return layer

    def rows(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """A rank's share, for sequence_parallel; else all."""
        return whole.chunk(ranks)[rank] if self.sequence_parallel and len(whole) else whole


def forward_and_backward(layer: Callable[..., Tensor], x: Tensor, dy: Tensor, frozen: bool = False) -> dict[str, Any]:
    x = x.clone().requires_grad_(not frozen)
    y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad}


def shares_of(layer: Sequential, mine: Sequential, name: str) -> dict[str, Any]:
    """What the rank's parameters should have of the whole layer's `name`: data, grad, main_grad."""
    found = {}
    for (key, whole), own in zip(layer.named_parameters(), mine.parameters(), strict=True):
        tensor = getattr(whole, name)
        parallel = mine.get_submodule(key.rpartition(".")[0]).parallel
        is_bias = "bias" in key
        found[f"{name} of {key}"] = None if tensor is None else parallel.share(tensor, is_bias=is_bias)
        assert tensor is None or found[f"{name} of {key}"].shape == own.shape
    return found


def own(mine: Sequential, name: str) -> dict[str, Any]:
    return {f"{name} of {key}": getattr(parameter, name) for key, parameter in mine.named_parameters()}


def compare(block: Block, group: Any, recipe: Any = "bf16", bounds: Any = None, run: Any = None) -> None:
    """This rank's output and gradients with those of the whole layer, which each rank computes."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    layer, mine = block.layer(), block.layer(group)
    assert_same_bits(own(mine, "data"), shares_of(layer, mine, "data"))
    x, dy = (drawn(block.seed + i, *block.shape, block.H, dtype=block.dtype) for i in (1, 2))
    try:
        with autocast(recipe):
            wanted = forward_and_backward(layer, x, dy)
            found = forward_and_backward(
                mine if run is None else lambda x: run(mine, x),
                block.rows(x, rank, ranks), block.rows(dy, rank, ranks),
            )  # fmt: skip
        for each in (*layer, *mine) if block.delay else ():
            if isinstance(each, ops.Linear):
                each.backward_dw()
        wanted = {name: block.rows(tensor, rank, ranks) for name, tensor in wanted.items()}
        for name in ("grad", "main_grad") if block.main_grad else ("grad",):
            wanted |= shares_of(layer, mine, name)
            found |= own(mine, name)
        assert_close(found, wanted, bounds or SUMMED, computed_in=block.dtype, floor=0.1)
    except AssertionError as error:
        error.add_note(f"rank {rank} in {block} under {recipe}")
        raise


def go_on_with_own_rows(rank: int, ranks: int) -> None:
    """Behind a row-parallel layer: the gradients of the undivided layer on all rows."""
    with quietly():
        group = dist.group.WORLD
        for dtype in (torch.float64, torch.float32):
            for shape in ((3 * ranks,), (ranks, 2), (0,)):
                block = Block(shape, dtype=dtype)
                tail = [ops.RMSNorm(block.H, dtype=dtype) for _ in range(2)]
                layer = Sequential(*block.layer(), tail[0])
                mine = Sequential(*block.layer(group), ops.Scatter(group), tail[1])
                x, dy = (drawn(i, *shape, block.H, dtype=dtype) for i in (1, 2))

                def rows(whole: Tensor, shape: tuple[int, ...] = shape) -> Tensor:
                    return whole.chunk(ranks)[rank] if shape[0] else whole

                wanted = forward_and_backward(layer, x, dy)
                found = forward_and_backward(mine, x, rows(dy))
                wanted["y"] = rows(wanted["y"])
                dist.all_reduce(tail[1].weight.grad, group=group)
                wanted |= {"norm": tail[0].weight.grad} | shares_of(layer[:3], mine[:3], "grad")
                found |= {"norm": tail[1].weight.grad} | own(mine[:3], "grad")
                assert_close(found, wanted, SUMMED, computed_in=dtype, floor=0.1)


@pytest.mark.parametrize("ranks", RANKS)
def test_own_rows_behind_a_row_parallel_layer_have_the_gradients_of_all(ranks: int, tmp_path: Path) -> None:
    on_ranks(go_on_with_own_rows, ranks, folder=tmp_path, ranks=ranks)


def go_through_what_all_have(rank: int, ranks: int) -> None:
    """A MoE layer that every rank has, between rows that are divided: the gradients of the layer on all rows."""
    with quietly():
        group, H, E = dist.group.WORLD, 6, 3
        torch.manual_seed(0)
        moe = Sequential(
            ops.Router(H, E, topk=2), ops.Dispatch(E), ops.GroupedLinear(E, H, 8), ops.ScaledSwiGLU(),
            ops.GroupedLinear(E, 4, H), ops.Combine(),
        ).double()  # fmt: skip
        mine = Sequential(ops.Gather(group), *copy.deepcopy(moe), ops.Scatter(group))
        for rows in (3 * ranks, 0):
            x, dy = (drawn(i, rows, H, dtype=torch.float64) for i in (1, 2))
            wanted = forward_and_backward(moe, x, dy)
            found = forward_and_backward(mine, x.chunk(ranks)[rank], dy.chunk(ranks)[rank])
            assert_same_bits(found, {name: t.chunk(ranks)[rank] for name, t in wanted.items()})
            for of_all, of_mine in zip(moe.parameters(), mine.parameters(), strict=True):
                assert_same_bits({"gradient": of_mine.grad}, {"gradient": of_all.grad})


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_gathered_for_layers_that_all_have_get_the_gradients_of_one_rank(ranks: int, tmp_path: Path) -> None:
    on_ranks(go_through_what_all_have, ranks, folder=tmp_path, ranks=ranks)


def random_block(seed: int, ranks: int) -> Block:
    draw = random.Random(seed)
    return Block(
        shape=tuple(draw.choice([(0,), (ranks,), (5 * ranks,), (2 * ranks, 3), (ranks, 0), (2 * ranks, 2, 2)])),
        H=draw.randint(1, 9),
        F=ranks * draw.randint(1, 5),
        dtype=draw.choice(DTYPES),
        bias=draw.random() < 0.7,
        sequence_parallel=draw.random() < 0.5,
        activation=draw.choice(["GELU", "SwiGLU", "ReLU"]),
        residual=draw.random() < 0.3,
        tail=draw.choice([None, None, "GELU", "ConstantScale"]),
        main_grad=draw.random() < 0.2,
        delay=draw.random() < 0.2,
        fusions=draw.choice([None, None, ()]),
        seed=seed,
    )


def compare_linears(rank: int, ranks: int, seeds: int) -> None:
    with quietly():
        group = dist.group.WORLD
        for dtype in DTYPES:
            for sequence_parallel in (False, True):
                compare(Block(shape=(3 * ranks,), dtype=dtype, sequence_parallel=sequence_parallel), group)
        for seed in range(seeds):
            compare(random_block(seed, ranks), group)
        for sequence_parallel in (False, True):
            block = Block((2 * ranks, 2), sequence_parallel=sequence_parallel)
            for again in (checkpoint, torch_checkpoint):
                compare(block, group, run=lambda f, x, again=again: again(f, x, use_reentrant=False))
            need_some_gradients(block, group)
            follow_losses(block._replace(dtype=torch.float32, residual=True), group)
        compare_recipes(group)
        refuse_linears(rank, group)
        if ranks == 4:  # two layers, each on ranks that are not the first ones of the job
            pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            compare(Block((4,), seed=rank % 2, sequence_parallel=True), pairs[rank % 2])


def need_some_gradients(block: Block, group: Any) -> None:
    """Frozen weights, biases, or an x without a gradient; and without any."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    x, dy = (drawn(i, *block.shape, block.H, dtype=block.dtype) for i in (1, 2))
    for frozen in (("x",), ("weight",), ("bias",), ("x", "weight"), ("0.",), ("x", "0."), ("weight", "2.bias")):
        layer, mine = block.layer(), block.layer(group)
        for each in (layer, mine):
            for key, parameter in each.named_parameters():
                parameter.requires_grad_(not any(part in key for part in frozen))
        wanted = forward_and_backward(layer, x, dy, "x" in frozen)
        given = block.rows(x, rank, ranks), block.rows(dy, rank, ranks)
        found = forward_and_backward(mine, *given, "x" in frozen) | own(mine, "grad")
        wanted = {name: None if t is None else block.rows(t, rank, ranks) for name, t in wanted.items()}
        assert_close(found, wanted | shares_of(layer, mine, "grad"), SUMMED)
    with torch.no_grad():
        assert_close({"y": block.layer(group)(given[0])}, {"y": wanted["y"]}, SUMMED)


def compare_recipes(group: Any) -> None:
    """Under any recipe a share is multiplied as a plain Linear of that share multiplies it, on all rows.

    So what is gathered is quantized as a whole, and shares of features by themselves.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for recipe in ("fp8_current", DelayedScaling(reduce_amax=False), "fp8_block", "fp8_rowwise", "mxfp8", NVFP4):
        for sequence_parallel in (False, True):
            for mode, K, N in (("column", 64, 32 * ranks), ("row", 32 * ranks, 64)):
                torch.manual_seed(0)
                mine = ops.Linear(K, N, sequence_parallel=sequence_parallel, tensor_parallel=mode, group=group)
                plain = ops.Linear(mine.own_in_features, mine.own_out_features)
                plain.load_state_dict(mine.state_dict())
                x, dy = drawn(1, 8 * ranks, K), drawn(2, 8 * ranks, N)
                with torch.no_grad():
                    plain.bias.mul_(mode == "column" or rank == 0)

                def rows(t: Tensor, divided: bool = sequence_parallel) -> Tensor:
                    return t.chunk(ranks)[rank] if divided else t

                if mode == "column":
                    dy = dy.chunk(ranks, -1)[rank]
                    given = rows(x), dy
                else:
                    x = x.chunk(ranks, -1)[rank]
                    given = x, rows(dy)
                for _ in range(2):  # delayed scaling has seen amaxes then
                    plain.zero_grad()
                    mine.zero_grad()
                    with autocast(recipe):
                        wanted = forward_and_backward(plain, x, dy)
                        found = forward_and_backward(mine, *given)
                summed, other = ("dx", "y") if mode == "column" else ("y", "dx")
                dist.all_reduce(wanted[summed], group=group)
                assert_close({summed: found[summed]}, {summed: rows(wanted[summed])})
                assert_same_bits({other: found[other]}, {other: wanted[other]})
                assert_same_bits(
                    {"dW": mine.weight.grad, "db": mine.bias.grad}, {"dW": plain.weight.grad, "db": plain.bias.grad}
                )
    # blocks of 32 features that no share cuts have the codes of the whole layer
    for sequence_parallel in (False, True):
        block = Block((8 * ranks,), 64, 32 * ranks, torch.float32, sequence_parallel=sequence_parallel)
        compare(block, group, "mxfp8")
    compare_experts(Experts(H=64, F=32 * ranks, dtype=torch.float32), group, "mxfp8")


def refuse_linears(rank: int, group: Any) -> None:
    ranks = dist.get_world_size(group)
    column = {"tensor_parallel": "column", "group": group}
    row = {"tensor_parallel": "row", "group": group}
    for said, kind, settings in (
        ("tensor_parallel is 'rows', but must be 'column', 'row' or None.", ValueError, {"tensor_parallel": "rows"}),
        ("tensor_parallel='row' needs the group of ranks", ValueError, {"tensor_parallel": "row"}),
        ("group is given without tensor_parallel", ValueError, {"group": group}),
        ("sequence_parallel is given without tensor_parallel", ValueError, {"sequence_parallel": True}),
        ("gated=True is about the halves of out_features", ValueError, row | {"gated": True}),
        ("but must be True or False. Pass a bool.", TypeError, row | {"sequence_parallel": 1}),
        ("group is 'tp', but must be a torch.distributed ProcessGroup", TypeError, row | {"group": "tp"}),
    ):
        assert said in sentence(lambda settings=settings: ops.Linear(8, 8, **settings), kind)
    said = sentence(lambda: ops.Linear(8, 9, **column), ValueError)
    assert said.startswith(f"out_features is 9, but must be a multiple of {ranks} for the {ranks} ranks of group.")
    assert "in_features is 9" in sentence(lambda: ops.Linear(9, 8, **row), ValueError)

    # before anything is sent, on every rank
    scattering = ops.Linear(8, 8, sequence_parallel=True, **row)
    x = drawn(0, 2 * ranks, 8 // ranks)
    said = sentence(lambda: scattering(x[:-1]), ValueError)
    assert f"x has {2 * ranks - 1} rows, but the {ranks} ranks of the group must divide them" in said
    assert "sequence_parallel needs rows, too" in sentence(lambda: scattering(x[0]), ValueError)
    assert "but [..., " in sentence(lambda: scattering(x[:, :1]), ValueError)
    said = sentence(lambda: scattering(x[: 2 * ranks - ranks * (rank == 0)]), RuntimeError)
    assert "differ in what they exchange: rank 0: Linear(in_features=8, out_features=8, bias=True, tensor_par" in said
    assert scattering(x).shape == (2, 8)

    # a copy has the same group; of x its own rows are kept, and gathered again
    gathering = ops.Linear(8, 8 * ranks, bias=False, sequence_parallel=True, **column)
    twin = copy.deepcopy(gathering)
    assert twin.parallel.group == gathering.parallel.group
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        twin(drawn(0, 3, 8))
    assert max(t.numel() for t in kept if t.shape != twin.weight.shape) == 3 * 8

    # explained, with what is fused around it; not repeated, not captured with gloo
    layer = Sequential(ops.Linear(8, 8, sequence_parallel=True, **column), ops.GELU(), scattering, ops.GELU())
    lines = layer.explain(device="cuda").splitlines()
    forward = "ForwardLinearBiasActivation = Linear -> GELU  [torch; "
    assert any(f"{forward}column-parallel: all_gather of x, reduce_scatter of dx, over" in line for line in lines)
    assert any(f"{forward}row-parallel: reduce_scatter of y, all_gather of dy, over" in line for line in lines)
    explained = layer.explain()  # not for inference: with a backward
    assert "not fused: BackwardActivationBias on operations 2-3: Linear divides the rows of y" in explained
    assert any("not repeated: A collective is issued by its process group" in line for line in lines)
    said = sentence(lambda: make_graphed_callables(layer, (drawn(0, 2, 8),)), NotImplementedError)
    assert "Operation 0 (Linear) cannot be captured: Its group has gloo for " in said

    # a fusion that computes with the weight itself is refused
    own_fusion = type("OwnFusion", (ForwardLinearBiasActivation,), {"handles_transfers": False})
    layer = Sequential(*layer, fusions=(own_fusion,))
    assert "Linear exchanges tensors with other ranks, which it does not: see handles_transfers." in layer.explain()


def follow_losses(block: Block, group: Any) -> None:
    """AdamW on shares of the weights follows AdamW on the whole ones."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    layer, mine = block.layer(), block.layer(group)
    adams = [torch.optim.AdamW(each.parameters(), lr=0.01, fused=True) for each in (layer, mine)]
    losses = []
    for step in range(6):
        x = drawn(step, *block.shape, block.H)
        target = x.flip(-1)
        loss = (layer(x) - target).square().mean()
        y = mine(block.rows(x, rank, ranks))
        # the mean over all rows: of a share, its part of the sum
        part = (y - block.rows(target, rank, ranks)).square().sum() / target.numel()
        for adam, each in zip(adams, (loss, part), strict=True):
            adam.zero_grad()
            each.backward()
            adam.step()
        whole = part.detach().clone()
        if block.sequence_parallel:
            dist.all_reduce(whole, group=group)
        losses.append((loss.item(), whole.item()))
    assert losses[-1][0] < losses[0][0]
    for expected, found in losses:
        assert found == pytest.approx(expected, rel=1e-5)
    # Adam divides by the root of a small second moment: what differs in the last bits may grow
    assert_close(own(mine, "data"), shares_of(layer, mine, "data"), {torch.float32: 1e-3})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_divided_linears_equal_the_whole_ones(ranks: int, tmp_path: Path) -> None:
    on_ranks(compare_linears, ranks, 40, folder=tmp_path, ranks=ranks)


# ------------------------------------------------------------------------------------------------------- GroupedLinear


class Experts(NamedTuple):
    """FC1 by column, an activation, FC2 by row, for experts whose width is divided.

    sizes: rows of each; more: rows past their sum; interleave: of the activation's halves
    """

    sizes: tuple[int, ...] = (3, 0, 4)
    more: int = 0
    H: int = 6
    F: int = 8
    dtype: torch.dtype = torch.float64
    bias: bool = True
    scale_bias: bool = False
    stacked: bool = True
    activation: str = "ScaledSwiGLU"
    interleave: int | None = None
    main_grad: bool = False
    path: str | None = None
    fusions: Any = None
    seed: int = 0

    @property
    def scaled(self) -> bool:
        return self.activation.startswith("Scaled")

    def layer(self, group: Any = None) -> Sequential:
        torch.manual_seed(self.seed)
        gated = self.activation != "ScaledSReLU"
        settings: dict[str, Any] = {"bias": self.bias, "dtype": self.dtype, "stacked": self.stacked}
        settings["accumulate_into_main_grad"] = self.main_grad
        column, row, between = {}, {}, {"glu_interleave_size": self.interleave} if gated else {}
        if group is not None:
            column = {"tensor_parallel": "column", "group": group, "gated": gated and self.interleave is None}
            row = {"tensor_parallel": "row", "group": group}
            between |= {"group": group} if self.scaled else {}
        G = len(self.sizes)
        layer = Sequential(
            ops.GroupedLinear(G, self.H, (2 if gated else 1) * self.F, **settings, **column),
            getattr(ops, self.activation)(**between),
            ops.GroupedLinear(G, self.F, self.H, scale_bias=self.scale_bias, **settings, **row),
            path=self.path,
            **({} if self.fusions is None else {"fusions": self.fusions}),
        )
        for i, (key, parameter) in enumerate(layer.named_parameters()):
            if "bias" in key and group is None:  # they start at zero
                with torch.no_grad():
                    parameter.copy_(drawn(self.seed + i, *parameter.shape))
            if self.main_grad:
                parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
        return layer

    def pair(self, group: Any) -> tuple[Sequential, Sequential]:
        layer, mine = self.layer(), self.layer(group)
        weights = {key: tensor for key, tensor in own(mine, "data").items() if "weight" in key}
        wanted = shares_of(layer, mine, "data")
        assert_same_bits(weights, {key: wanted[key] for key in weights})
        with torch.no_grad():
            for key, parameter in mine.named_parameters():
                parameter.copy_(wanted[f"data of {key}"])
        return layer, mine


def step_of_experts(experts: Experts, layer: Callable[..., Tensor], **settings: Any) -> dict[str, Any]:
    T = sum(experts.sizes) + experts.more
    x, dy = (drawn(experts.seed + i, T, experts.H, dtype=experts.dtype) for i in (1, 2))
    scales = drawn(experts.seed + 3, T, dtype=torch.promote_types(experts.dtype, torch.float32)).requires_grad_()
    x.requires_grad_()
    extras = {"scales": scales} if experts.scaled else {}
    y = layer(x, split_sizes=torch.tensor(experts.sizes), **extras, **settings)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dscales": scales.grad}


def compare_experts(experts: Experts, group: Any, recipe: Any = "bf16", bounds: Any = None) -> None:
    layer, mine = experts.pair(group)
    try:
        with autocast(recipe):
            wanted, found = step_of_experts(experts, layer), step_of_experts(experts, mine)
        for name in ("grad", "main_grad") if experts.main_grad else ("grad",):
            wanted |= shares_of(layer, mine, name)
            found |= own(mine, name)
        assert_close(found, wanted, bounds or SUMMED, computed_in=experts.dtype, floor=0.1)
    except AssertionError as error:
        error.add_note(f"rank {dist.get_rank(group)} in {experts} under {recipe}")
        raise


def random_experts(seed: int, ranks: int) -> Experts:
    draw = random.Random(seed)
    activation = draw.choice(["ScaledSwiGLU", "ScaledSwiGLU", "SwiGLU", "ScaledClampedQGeGLU", "ScaledSReLU"])
    interleave = draw.choice([None, 1, 2]) if activation != "ScaledSReLU" else None
    bias = draw.random() < 0.6
    return Experts(
        sizes=tuple(draw.choice([0, 0, 1, draw.randint(2, 9)]) for _ in range(draw.randint(1, 4))),
        more=draw.choice([0, 0, 3]),
        H=draw.randint(1, 9),
        F=2 * ranks * draw.randint(1, 4),
        dtype=draw.choice(DTYPES),
        bias=bias,
        scale_bias=bias and activation.startswith("Scaled") and draw.random() < 0.5,
        stacked=draw.random() < 0.7,
        activation=activation,
        interleave=interleave,
        main_grad=draw.random() < 0.2,
        path=draw.choice([None, None, "split"]),
        fusions=draw.choice([None, None, ()]),
        seed=seed,
    )


def compare_grouped(rank: int, ranks: int, seeds: int) -> None:
    with quietly():
        group = dist.group.WORLD
        for interleave in (None, 2):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                compare_experts(Experts(interleave=interleave, dtype=dtype, F=16, scale_bias=True), group)
        for seed in range(seeds):
            compare_experts(random_experts(seed, ranks), group)
        whole_layer_of_experts(group)
        buffers_and_scaled_biases(group)
        refuse_grouped(rank, group)


def whole_layer_of_experts(group: Any) -> None:
    """Router to Combine, with the router's gradient, and AdamW following the losses of the whole layer."""
    H, F, E = 8, 16, 4

    def model(group: Any = None, ep: Any = None) -> Sequential:
        torch.manual_seed(0)
        column = {} if group is None else {"tensor_parallel": "column", "group": group, "gated": True}
        own_experts = E if ep is None else E // ep.size()
        row = {} if group is None else {"tensor_parallel": "row", "group": group}
        return Sequential(
            ops.MakeExtraOutput("residual"),
            ops.RMSNorm(H),
            ops.Router(H, E, topk=2),
            ops.Dispatch(E, group=ep),
            ops.GroupedLinear(own_experts, H, 2 * F, bias=False, **column),
            ops.ScaledSwiGLU(group=group),
            ops.GroupedLinear(own_experts, F, H, bias=False, **row),
            ops.Combine(group=ep),
            ops.AddExtraInput("residual"),
        )

    if dist.get_world_size(group) == 4:  # two ranks divide the experts, two the width of each
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        divide_experts_and_width(model, mesh)
    layer, mine = model(), model(group)
    adams = [torch.optim.AdamW(each.parameters(), lr=0.01, fused=True) for each in (layer, mine)]
    losses = []
    for number in range(5):
        x = drawn(number, 24, H)
        both = []
        for adam, each in zip(adams, (layer, mine), strict=True):
            adam.zero_grad()
            loss = (each(x) - x.flip(-1)).square().mean()
            loss.backward()
            if number == 0:
                both.append({key: p.grad for key, p in each.named_parameters() if "weight" in key and p.dim() < 3})
            adam.step()
            losses.append(loss.item())
        if number == 0:
            assert len(both[0]) == 2
            assert_close(both[1], both[0], SUMMED)  # of the router and the norm
    assert losses[-2] < losses[0]
    assert losses[1::2] == pytest.approx(losses[::2], rel=1e-5)


def divide_experts_and_width(model: Callable[..., Sequential], mesh: Any) -> None:
    layer, mine = model(), model(mesh["tp"], mesh["ep"])
    at = mesh["ep"].get_local_rank()
    wanted = dict(layer.named_parameters())
    with torch.no_grad():
        for key, parameter in mine.named_parameters():
            whole = wanted[key].chunk(2)[at] if parameter.dim() == 3 else wanted[key]
            operation = mine.get_submodule(key.rpartition(".")[0])
            parameter.copy_(operation.parallel.share(whole) if parameter.dim() == 3 else whole)
    x, dy = drawn(1, 24, 8), drawn(2, 24, 8)
    results = forward_and_backward(layer, x, dy)
    found = forward_and_backward(mine, x.chunk(2)[at], dy.chunk(2)[at])
    assert_close(found, {name: tensor.chunk(2)[at] for name, tensor in results.items()}, SUMMED)
    for key, parameter in mine.named_parameters():
        gradient, whole = parameter.grad, wanted[key].grad
        if parameter.dim() == 3:
            whole = mine.get_submodule(key.rpartition(".")[0]).parallel.share(whole.chunk(2)[at])
        else:
            dist.all_reduce(gradient, group=mesh["ep"].get_group())
        assert_close({key: gradient}, {key: whole}, SUMMED)


def buffers_and_scaled_biases(group: Any) -> None:
    """The caller's buffers have the sums; FC1's own scaled bias gives the whole gradient of scales."""
    T, sizes = 5, torch.tensor([2, 3])
    whole = ops.GroupedLinear(2, 4, 8, scale_bias=True)
    torch.nn.init.normal_(whole.bias, generator=torch.Generator().manual_seed(0))
    torch.nn.init.normal_(whole.weight, generator=torch.Generator().manual_seed(1))
    for mode in ("column", "row"):
        mine = ops.GroupedLinear(2, 4, 8, scale_bias=True, tensor_parallel=mode, group=group)
        x, scales, dy = drawn(0, T, 4), drawn(1, T), drawn(2, T, 8)
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        with torch.no_grad():
            mine.weight.copy_(mine.parallel.share(whole.weight))
            mine.bias.copy_(mine.parallel.share(whole.bias, is_bias=True))
        results = []
        for layer in (whole, mine):
            divides = layer is mine and mode == "row"
            x_own = (x.chunk(n, -1)[rank] if divides else x).clone().requires_grad_()
            dy_own = dy.chunk(n, -1)[rank] if layer is mine and mode == "column" else dy
            given = scales.clone().requires_grad_()
            buffers = {"output": torch.empty_like(dy_own), "grad_input": torch.empty_like(x_own)}
            y = layer(x_own, split_sizes=sizes, scales=given, buffers=buffers)
            assert y.data_ptr() == buffers["output"].data_ptr()
            y.backward(dy_own.contiguous())
            assert torch.equal(y, buffers["output"]) and torch.equal(x_own.grad, buffers["grad_input"])
            results.append({"y": y.detach(), "dx": x_own.grad, "dscales": given.grad})
        divided = "dx" if mode == "row" else "y"
        results[0][divided] = results[0][divided].chunk(n, -1)[rank]
        assert_close(results[1], results[0], SUMMED)


def refuse_grouped(rank: int, group: Any) -> None:
    fc1 = ops.GroupedLinear(2, 4, 16, tensor_parallel="column", group=group, gated=True)
    fc2 = ops.GroupedLinear(2, 8, 4, tensor_parallel="row", group=group)
    n = dist.get_world_size(group)
    assert sentence(lambda: Sequential(fc1, ops.ScaledSwiGLU(), fc2), ValueError).endswith(
        "but group is None, and dscales is summed over it. Give ScaledSwiGLU the group of the column-parallel layer "
        "before it."
    )
    layer = Sequential(fc1, ops.ScaledSwiGLU(group=group), fc2)
    explained = layer.explain()
    assert "GroupedMLP = GroupedLinear -> ScaledSwiGLU -> GroupedLinear" in explained
    for words in ("column-parallel: all_reduce of dx", "row-parallel: all_reduce of y", "; all_reduce of dscales"):
        assert f"{words}, over {n} ranks (gloo)" in explained
    mixed = Sequential(fc1, ops.SwiGLU(), ops.GroupedLinear(2, 8 // n, 4))
    assert "FC1 has tensor_parallel='column' and FC2 None; fused are 'column' and 'row'." in mixed.explain()
    with pytest.raises(ValueError, match="out_features is 18, but must be a multiple of"):
        ops.GroupedLinear(2, 4, 18, tensor_parallel="column", group=group, gated=True)
    x, sizes = drawn(0, 5 + (rank == 0), 4), torch.tensor([2, 3])
    given = {"split_sizes": sizes, "scales": torch.ones(len(x))}
    assert "differ in what they exchange: rank 0: GroupedLinear(num_groups=2," in sentence(
        lambda: layer(x, **given), RuntimeError
    )
    x, given["scales"] = x[:5], torch.ones(5)
    wrong = (lambda: layer(x[:, :3], **given)) if rank == 0 else lambda: layer(x, **given)
    said = sentence(wrong, RuntimeError if rank else ValueError)
    assert "x has shape [5, 3], but [rows, 4] is needed" in said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_divided_experts_equal_the_whole_ones(ranks: int, tmp_path: Path) -> None:
    on_ranks(compare_grouped, ranks, 40, folder=tmp_path, ranks=ranks)
