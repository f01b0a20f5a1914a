"""Dispatch and Combine over gloo ranks: the bits of the unsharded layer on the tokens of all ranks, in rank order."""
# T tokens, H features, F expert features, E experts, n ranks

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fuser import Sequential, autocast, checkpoint, ops
from fuser.graph import make_graphed_callables
from ops.kernels.routing.all_to_all import ExpertGroup, NeededGradients, _copies, _order, make_sharded_routing_map
from ops.kernels.routing.permute import combine
from recipes import DelayedScaling, HighPrecision, NVFP4BlockScaling
from tests.ranks import on_ranks, quietly
from tests.reference import Tensors, assert_close, assert_same_bits

H, F = 32, 32


class Case(NamedTuple):
    """The same on all ranks. tokens: of each rank; seed: of everything else"""

    tokens: tuple[int, ...]
    experts: int
    topk: int
    dtype: torch.dtype = torch.float32
    bias: bool = False
    routing: str = "random"
    features: tuple[int, int] = (H, F)
    seed: int = 0


class Batch(NamedTuple):
    x: Tensor
    probs: Tensor
    indices: Tensor
    dy: Tensor

    def of_rank(self, case: Case, rank: int) -> Batch:
        return Batch(*(tensor.split(case.tokens)[rank] for tensor in self))


def batch(case: Case) -> Batch:
    """The tokens of all ranks."""
    generator = torch.Generator().manual_seed(case.seed)
    T, width = sum(case.tokens), case.features[0]
    x, dy = torch.randn(2, T, width, generator=generator).to(case.dtype).unbind()
    probs = torch.rand(T, case.topk, generator=generator)
    share = case.experts // len(case.tokens)
    indices = {
        "random": lambda: torch.randint(0, case.experts, (T, case.topk), generator=generator),
        "one expert": lambda: torch.full((T, case.topk), case.experts - 1),
        "one rank": lambda: torch.randint(share, 2 * share, (T, case.topk), generator=generator),
    }[case.routing]()
    return Batch(x, probs, indices, dy)


def whole(case: Case, **settings: Any) -> Sequential:
    return experts_between(ops.Dispatch(case.experts), ops.Combine(), case.experts, case, **settings)


def share_of(layer: Sequential, case: Case, group: Any, **settings: Any) -> Sequential:
    """The same layer on this rank: its own experts of that layer."""
    rank, own = ExpertGroup(group).process_group.rank(), case.experts // len(case.tokens)
    dispatching = ops.Dispatch(case.experts, group=group)
    mine = experts_between(dispatching, ops.Combine(group=group), own, case, **settings)
    with torch.no_grad():
        for parameter, of_all in zip(mine.parameters(), layer.parameters(), strict=True):
            parameter.copy_(of_all[rank * own : (rank + 1) * own])
    return mine


def experts_between(
    first: nn.Module,
    last: nn.Module,
    experts: int,
    case: Case,
    main_grad: bool = False,
    delayed: bool = False,
    **settings: Any,
) -> Sequential:
    torch.manual_seed(case.seed)
    width, inner = case.features
    options = {"bias": case.bias, "dtype": case.dtype}
    options |= {"accumulate_into_main_grad": main_grad, "delay_wgrad_compute": delayed}
    fc1 = ops.GroupedLinear(experts, width, 2 * inner, **options)
    fc2 = ops.GroupedLinear(experts, inner, width, **options)
    layer = Sequential(first, fc1, ops.ScaledSwiGLU(), fc2, last, **settings)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.5, 0.5)
            if main_grad:
                parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
    return layer


Gradients = dict[str, Tensor | None]


def step(layer: Callable[..., Tensor], given: Batch, *, frozen: tuple[str, ...] = ()) -> Gradients:
    """y and the gradients of x and probs."""
    x = given.x.clone().requires_grad_("x" not in frozen)
    probs = given.probs.clone().requires_grad_("probs" not in frozen)
    y = layer(x, probs=probs, indices=given.indices)
    y.backward(given.dy)
    return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}


def weight_gradients(layer: nn.Module, name: str = "grad") -> Gradients:
    return {f"{name} of {key}": getattr(p, name, None) for key, p in layer.named_parameters()}


def check_shares(case: Case, rank: int, of_all: Tensors, of_weights: Tensors, mine: Tensors) -> None:
    """What this rank of the group has is its part of what the unsharded layer has."""
    own = case.experts // len(case.tokens)
    expected = {name: t if t is None else t.split(case.tokens)[rank] for name, t in of_all.items()}
    expected |= {name: t if t is None else t[rank * own : (rank + 1) * own] for name, t in of_weights.items()}
    try:
        # On CPUs torch computes SiLU of what is left of 32 numbers by other instructions, at the end of a tensor.
        (assert_close if case.features[1] % 32 else assert_same_bits)(mine, expected)
    except AssertionError as error:
        error.add_note(f"rank {rank} in {case}")
        raise


def compare(case: Case, recipe: Any = None, steps: int = 1, group: Any = None, **settings: Any) -> None:
    group = dist.group.WORLD if group is None else group
    rank = ExpertGroup(group).process_group.rank()
    layer = whole(case, **settings)
    mine = share_of(layer, case, group, **settings)
    for number in range(steps):
        given = batch(case._replace(seed=case.seed + number))
        with autocast(recipe or "bf16"):
            of_all = step(layer, given)
            of_rank = step(mine, given.of_rank(case, rank))
        check_shares(case, rank, of_all, weight_gradients(layer), of_rank | weight_gradients(mine))


def sentence(run: Callable[[], object], kind: type[Exception] = RuntimeError) -> str:
    with pytest.raises(kind) as raised:
        run()
    return str(raised.value)


def same_everywhere(text: str) -> str:
    everywhere: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everywhere, text)
    assert set(everywhere) == {text}
    return text


# ------------------------------------------------------------------------------------- the bits of the unsharded layer


def random_case(seed: int, ranks: int) -> Case:
    draw = random.Random(seed)
    return Case(
        tokens=tuple(draw.choice([0, 0, 1, 2, draw.randint(3, 40)]) for _ in range(ranks)),
        experts=ranks * draw.randint(1, 4),
        topk=draw.randint(1, 4),
        dtype=draw.choice([torch.float32, torch.bfloat16]),
        bias=draw.random() < 0.3,
        routing=draw.choice(["random", "random", "one expert", "one rank"]),
        seed=seed,
    )


def leave_pairs_out(rank: int) -> None:
    """Pairs of no expert, which only a GPU lets pass, stay where they are and return as zeros."""
    indices = torch.tensor([[0, 4], [3, 1], [4, 4]]) if rank == 0 else torch.tensor([[2, 4]])
    x = torch.randn(indices.shape[0], 5)
    group = ExpertGroup(dist.group.WORLD)
    sharded, _, sizes = make_sharded_routing_map(indices, 4, group, "the same", NeededGradients(True, rank == 1))
    assert sizes.tolist() == [1, 1]
    assert sharded.pairs == (([2, 1], [2, 0]) if rank == 0 else ([0, 1], [1, 1]))
    assert sharded.needed == (True, True, True)
    rows = sharded.send_tokens(x)
    assert rows.shape == (2, 5)
    y = combine(sharded.send_back(rows), sharded)
    assert torch.equal(y, x * (indices < 4).sum(1, keepdim=True))


def compare_cases(rank: int, ranks: int, seeds: int) -> None:
    with quietly():
        for dtype in (torch.float32, torch.bfloat16):
            compare(Case((7, 0, 12, 1)[:ranks], 2 * ranks, 2, dtype))
        compare(Case((0,) * ranks, 2 * ranks, 2))
        for seed in range(seeds):
            case = random_case(seed, ranks)
            compare(case)
            if seed % 4 == 0:
                compare(case, path="split")
                compare(case, fusions=())
                compare(case._replace(features=(5, 3)))
        compare(Case((3, 5, 0, 9)[:ranks], 2 * ranks, 3, torch.float64))
        if ranks == 2:
            leave_pairs_out(rank)
        else:  # two layers, each on ranks that are not the first ones of the job
            pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            compare(Case((4, 7), 6, 2, seed=rank % 2), group=pairs[rank % 2])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=[pytest.mark.rest, pytest.mark.slow])])
def test_a_sharded_layer_has_the_bits_of_the_whole_one(ranks: int, tmp_path: Path) -> None:
    on_ranks(compare_cases, ranks, 24, folder=tmp_path, ranks=ranks)


def compare_recipes(rank: int) -> None:
    with quietly():
        case = Case((20, 13), 4, 2, torch.bfloat16)
        nearest = NVFP4BlockScaling(disable_stochastic_rounding=True)
        for recipe in ("fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", nearest):
            compare(case, recipe)
            compare(case._replace(dtype=torch.float32, tokens=(0, 9)), recipe)
        # amaxes are those of an expert, which is on one rank: nothing is to be reduced
        compare(case, DelayedScaling(reduce_amax=False), steps=3)
        # reduced over all ranks, they are of two experts: the scales are other ones, and no more than that
        mine = share_of(whole(case), case, dist.group.WORLD)
        own = batch(case).of_rank(case, rank)
        with autocast("bf16"):
            expected = step(mine, own)
        with autocast("fp8_delayed"):
            step(mine, own)
            assert_close(step(mine, own), expected, {torch.bfloat16: 0.3, torch.float32: 0.3})
        # stochastic rounding draws by the position of a row, which is another one: only forward is the same
        layer = whole(case)
        mine = share_of(layer, case, dist.group.WORLD)
        given = batch(case)
        with autocast("nvfp4"), torch.no_grad():
            y = layer(given.x, probs=given.probs, indices=given.indices)
            own = given.of_rank(case, rank)
            assert_same_bits(
                {"y": mine(own.x, probs=own.probs, indices=own.indices)}, {"y": y.split(case.tokens)[rank]}
            )


@pytest.mark.slow
def test_scales_of_an_expert_are_those_of_the_whole_layer(tmp_path: Path) -> None:
    on_ranks(compare_recipes, folder=tmp_path)


# ------------------------------------------------------------------------------------------- which gradients are needed


def need_some_gradients(rank: int) -> None:
    with quietly():
        case = Case((6, 11), 4, 2)
        given = batch(case)
        own = given.of_rank(case, rank)
        everything = ("x", "probs")

        def compare_with(
            frozen: tuple[tuple[str, ...], ...], frozen_experts: bool = False, run: Callable[..., Any] | None = None
        ) -> None:
            """frozen: of each rank."""
            layer = whole(case)
            mine = share_of(layer, case, dist.group.WORLD)
            if frozen_experts and rank == 1:
                mine.requires_grad_(False)
            of_all = step(layer, given, frozen=() if frozen[rank] != everything else everything)
            of_rank = step(mine if run is None else lambda *a, **k: run(mine, *a, **k), own, frozen=frozen[rank])
            of_all |= {name: None for name, t in of_rank.items() if t is None}
            of_weights = weight_gradients(layer)
            if frozen_experts and rank == 1:
                of_weights = dict.fromkeys(of_weights)
            check_shares(case, rank, of_all, of_weights, of_rank | weight_gradients(mine))

        compare_with((("probs",), ("probs",)))  # a frozen router
        compare_with((("x",), ("x",)))
        compare_with((everything, everything))  # nothing before the experts is trained
        compare_with((("x",), ("probs",)))  # not all ranks need the same
        compare_with(((), ("x",)))
        compare_with((("probs",), ()))
        compare_with(((), ()), frozen_experts=True)  # on one rank
        # computed again in backward, with the collectives of forward
        for again in (checkpoint, torch_checkpoint):
            compare_with(((), ()), run=lambda f, *a, again=again, **k: again(f, *a, use_reentrant=False, **k))

        # main_grad is added to, as unsharded
        layer = whole(case, main_grad=True)
        mine = share_of(layer, case, dist.group.WORLD, main_grad=True)
        of_all, of_rank = step(layer, given), step(mine, own)
        check_shares(
            case, rank, of_all, weight_gradients(layer, "main_grad"), of_rank | weight_gradients(mine, "main_grad")
        )

        # without gradients, and a second backward
        with torch.no_grad():
            y = whole(case)(given.x, probs=given.probs, indices=given.indices)
            part = share_of(whole(case), case, dist.group.WORLD)(own.x, probs=own.probs, indices=own.indices)
        assert_same_bits({"y": part}, {"y": y.split(case.tokens)[rank]})
        twice = share_of(whole(case), case, dist.group.WORLD)
        x = own.x.clone().requires_grad_()
        y = twice(x, probs=own.probs, indices=own.indices)
        first, second = (torch.autograd.grad(y, x, own.dy, retain_graph=True) for _ in range(2))
        assert torch.equal(first[0], second[0])

        # heads that leave y or the scales of Dispatch without a gradient, on one rank only
        alone = ops.Dispatch(case.experts, group=dist.group.WORLD)
        x, probs = own.x.clone().requires_grad_(), own.probs.clone().requires_grad_()
        y, made = alone(x, probs=probs, indices=own.indices, outputs=("scales",))
        (y.sum() if rank == 0 else made["scales"].sum()).backward()
        assert torch.equal(x.grad, (own.indices < 2).sum(1, keepdim=True).expand_as(x).float())
        assert torch.equal(probs.grad, (own.indices >= 2).float())


def test_every_rank_takes_part_in_backward_whatever_it_needs(tmp_path: Path) -> None:
    on_ranks(need_some_gradients, folder=tmp_path)


# ---------------------------------------------------------------------------------------------- ranks that differ


def meet_ranks_that_differ(rank: int) -> None:
    with quietly():
        group = dist.group.WORLD
        x, probs, indices = torch.randn(3, 8), torch.rand(3, 2), torch.tensor([[0, 3], [1, 2], [3, 0]])

        def run(operation: ops.Dispatch, x: Tensor, probs: Tensor, indices: Tensor) -> Callable[[], object]:
            return lambda: operation(x, probs=probs, indices=indices)

        alike = ops.Dispatch(4, group=group)
        of_rank_1 = {
            "num_experts=8,": (ops.Dispatch(8, group=group), x, probs, indices),
            " 4 features in torch.float32,": (alike, x[:, :4], probs, indices),
            "torch.bfloat16,": (alike, x.bfloat16(), probs, indices),
            " 1 slots,": (alike, x, probs[:, :1], indices[:, :1]),
            "probs in torch.float64,": (alike, x, probs.double(), indices),
            "gradients computed": (alike, x.clone().requires_grad_(), probs, indices),
        }
        for what, given in of_rank_1.items():
            said = same_everywhere(sentence(run(*(given if rank else (alike, x, probs, indices)))))
            assert said.startswith(
                "In operation 0 (Dispatch): The ranks of one process group differ in what they exchange: rank 0: "
                "num_experts=4, 8 features in torch.float32, 2 slots, probs in torch.float32, gradients not computed, "
                f"recipe {HighPrecision().name}; rank 1: "
            ), said
            assert what in said.split("rank 1: ")[1] and "Only the tokens and their number may differ" in said

        def run_under_a_recipe() -> object:
            with autocast("mxfp8" if rank else "fp8_block"):
                return run(alike, x, probs, indices)()

        said = same_everywhere(sentence(run_under_a_recipe))
        assert (
            "not computed, recipe fp8_block; rank 1: num_experts=4," in said and "recipe mxfp8. Only the tokens" in said
        )

        # one that refuses its arguments says why, and so do those that would wait for it
        wrong = run(alike, x, probs, indices + (rank == 0))
        if rank == 0:
            assert sentence(wrong, ValueError).endswith("Give both the Router and Dispatch the same number of experts.")
        else:
            assert "rank 0: its arguments are refused: indices reach from 1 to 4, but num_experts is 4" in sentence(
                wrong
            )
        assert "indices is torch.float32" in sentence(run(alike, x, probs, indices.float()), TypeError)

        # after a refusal the ranks can go on
        y = Sequential(alike, ops.Combine(group=group))(x, probs=probs, indices=indices)
        assert torch.equal(y, 2 * x)


def test_ranks_that_differ_get_one_sentence(tmp_path: Path) -> None:
    on_ranks(meet_ranks_that_differ, folder=tmp_path)


def fail_between_the_transfers(rank: int) -> None:
    """An error of one rank alone, which the others cannot learn: they wait as long as the group says."""
    with quietly():
        group = dist.new_group(timeout=timedelta(seconds=2))
        layer = Sequential(ops.Dispatch(4, group=group), FailsOn(1), ops.Combine(group=group))
        x, probs, indices = torch.randn(3, 8), torch.rand(3, 2), torch.tensor([[0, 3], [1, 2], [3, 0]])
        said = sentence(lambda: layer(x, probs=probs, indices=indices))
        assert said == "this rank fails" if rank == 1 else "Timed out waiting 2000ms" in said, said
        y = Sequential(ops.Dispatch(4, group=dist.group.WORLD), ops.Combine(group=dist.group.WORLD))
        assert torch.equal(y(x, probs=probs, indices=indices), 2 * x), "another group is as it was"


class FailsOn(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == self.rank:
            raise RuntimeError("this rank fails")
        return x


@pytest.mark.rest
def test_an_error_between_the_transfers_ends_all_ranks_within_the_timeout(tmp_path: Path) -> None:
    on_ranks(fail_between_the_transfers, folder=tmp_path)


# ---------------------------------------------------------------------------------------------------- groups


def name_groups(rank: int) -> None:
    with quietly():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
        case = Case((5, 8), 4, 2)
        compare(case, group=mesh["ep"])
        own = batch(case).of_rank(case, rank)
        mine = share_of(whole(case), case, mesh["ep"])

        # a copy has the same group
        twin = copy.deepcopy(mine)
        assert twin[0].group == mine[0].group == ops.Combine(group=mesh["ep"].get_group()).group
        assert "Dispatch(num_experts=4, group=<ranks 0, 1>)" in repr(twin)
        assert_same_bits(step(twin, own), step(mine, own))
        assert "A process group cannot be written down. Save the model's state_dict()" in sentence(
            lambda: pickle.dumps(mine[0]), TypeError
        )
        assert list(mine.state_dict()) == ["1.weight", "3.weight"]

        # what is no group of this rank
        assert 'Name it: mesh["ep"]' in sentence(lambda: ops.Dispatch(4, group=mesh), ValueError)
        first, mesh_of_first = dist.new_group([0]), dist.DeviceMesh("cpu", [0], mesh_dim_names=("ep",))
        for group in (first, mesh_of_first) if rank == 1 else ():
            said = sentence(lambda group=group: ops.Combine(group=group), ValueError)
            assert said.startswith("group does not contain this process.")
        assert "num_experts is 5, but must be a multiple of the 2 ranks" in sentence(
            lambda: ops.Dispatch(5, group=dist.group.WORLD), ValueError
        )
        assert "group is 'ep', but must be a torch.distributed ProcessGroup" in sentence(
            lambda: ops.Dispatch(4, group="ep"), TypeError
        )
        # Dispatch and Combine of different groups
        x, probs, indices, _ = own
        for last in (ops.Combine(), ops.Combine(group=mesh["dp"])):
            said = sentence(lambda last=last: Sequential(mine[0], last)(x, probs=probs, indices=indices), ValueError)
            assert "but this Combine has group=" in said and said.endswith("Give both the same group.")
        said = sentence(lambda: Sequential(ops.Dispatch(4), mine[4])(x, probs=probs, indices=indices), ValueError)
        assert "routing_map is of a Dispatch with group=None, but this Combine has group=<ranks 0, 1>" in said

        # explained, not repeated, not captured
        lines = mine.explain(device="cuda").splitlines()
        assert sum("not repeated: all_to_all_single takes the row counts from the host" in line for line in lines) == 2
        dispatching = next(line for line in lines if "Dispatch  [" in line)
        assert dispatching.endswith(
            "all_to_all_single over 2 ranks (gloo), which every backend has; row counts are read on the host once a "
            "forward; tokens sent in the dtype of x: the recipe 'high_precision' does not quantize the input of fprop]"
        )
        assert (
            sum("all_to_all_single over 2 ranks (gloo), with the row counts of Dispatch]" in line for line in lines)
            == 1
        )
        assert sum("GroupedMLP = " in line for line in lines) == 1, "the experts are fused as ever"
        said = sentence(
            lambda: make_graphed_callables(mine, (x,), sample_kwargs={"probs": probs, "indices": indices}),
            NotImplementedError,
        )
        assert "Operation 0 (Dispatch) cannot be captured: all_to_all_single takes the row counts from the host" in said


def test_a_group_is_a_process_group_or_one_dimension_of_a_mesh(tmp_path: Path) -> None:
    on_ranks(name_groups, folder=tmp_path)


def test_a_token_goes_once_to_each_rank_that_owns_any_of_its_experts() -> None:
    counts, ends, copy_of_slot = _copies(torch.tensor([[0, 1], [3, 0]]), 2, 2)
    assert (counts.tolist(), ends.tolist(), copy_of_slot.tolist()) == ([2, 1], [1, 2, 2, 3], [[0, 0], [0, 1]])
    indices = torch.randint(-1, 7, (20, 3))  # -1 counts for expert 0, 6 for none
    counts, ends, copy_of_slot = _copies(indices, 2, 3)
    going = [
        sorted({t for t, row in enumerate(indices.tolist()) if any(max(e, 0) // 2 == r for e in row)}) for r in range(3)
    ]
    assert counts.tolist() == [len(tokens) for tokens in going]
    assert ends.diff(prepend=torch.zeros(1)).nonzero().flatten().tolist() == [
        r * 20 + t for r in range(3) for t in going[r]
    ]
    for t, row in enumerate(indices.tolist()):
        for k, expert in enumerate(row):
            assert expert == 6 or going[max(expert, 0) // 2][copy_of_slot[t, k]] == t
    assert [t.shape for t in _copies(torch.zeros(0, 2, dtype=torch.int32), 2, 2)] == [(2,), (0,), (0, 2)]


def test_rows_are_ordered_by_expert_and_then_rank() -> None:
    row_of_arrived, arrived_of_row = _order(torch.tensor([[2, 1], [1, 0]]), 4)
    assert row_of_arrived.tolist() == arrived_of_row.tolist() == [0, 1, 3, 2]
    counts = torch.randint(0, 4, (3, 5))
    arrived = [
        (expert, rank, i) for rank, row in enumerate(counts.tolist()) for expert, c in enumerate(row) for i in range(c)
    ]
    row_of_arrived, arrived_of_row = _order(counts, len(arrived))
    assert [arrived[i] for i in arrived_of_row.tolist()] == sorted(arrived)
    assert [sorted(arrived)[i] for i in row_of_arrived.tolist()] == arrived
    assert [t.shape for t in _order(torch.zeros(2, 3, dtype=torch.int64), 0)] == [(0,), (0,)]


# ------------------------------------------------------------------------------------------------- as it is used


def train_together(rank: int, ranks: int) -> None:
    """Experts are divided among the ranks, all other weights are on each; the gradients of those are summed."""
    experts, classes, tokens = 8, 4, (24, 40)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    ep = mesh["ep"]

    def model(group: Any = None) -> Sequential:
        own = experts if group is None else experts // group.size()
        return Sequential(
            ops.MakeExtraOutput("residual"),
            ops.RMSNorm(H),
            ops.Router(H, experts, topk=2),
            ops.Dispatch(experts, group=group),
            ops.GroupedLinear(own, H, 2 * F, bias=False),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(own, F, H, bias=False),
            ops.Combine(group=group),
            ops.AddExtraInput("residual"),
            ops.Linear(H, classes),
        )

    torch.manual_seed(0)
    unsharded, sharded = model(), model(ep)
    own = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
    state = unsharded.state_dict()
    sharded.load_state_dict(
        {key: value[own] if key in ("4.weight", "6.weight") else value for key, value in state.items()}
    )
    replicated = [p for key, p in sharded.named_parameters() if key not in ("4.weight", "6.weight")]

    adams = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (unsharded, sharded)]
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(6):
        x = torch.randn(sum(tokens), H, generator=generator)
        target = x[:, :classes].argmax(1)
        loss = nn.functional.cross_entropy(unsharded(x), target)
        adams[0].zero_grad()
        loss.backward()
        adams[0].step()

        mine, labels = x.split(tokens)[rank], target.split(tokens)[rank]
        part = nn.functional.cross_entropy(sharded(mine), labels, reduction="sum") / sum(tokens)
        adams[1].zero_grad()
        part.backward()
        for parameter in replicated:
            dist.all_reduce(parameter.grad, group=ep.get_group())
        adams[1].step()

        total = part.detach().clone()
        dist.all_reduce(total, group=ep.get_group())
        losses.append((loss.item(), total.item()))
    assert losses[-1][0] < losses[0][0]
    for expected, found in losses:
        assert found == pytest.approx(expected, rel=1e-4)
    # Adam divides by the root of a small second moment: what differs in the last bits may grow
    after = {
        key: value[own] if key in ("4.weight", "6.weight") else value for key, value in unsharded.state_dict().items()
    }
    assert_close(dict(sharded.state_dict()), after, {torch.float32: 2e-3})


def test_a_model_on_two_ranks_follows_the_losses_of_one(tmp_path: Path) -> None:
    on_ranks(train_together, 2, folder=tmp_path)


# ------------------------------------------------------------------------------------------------ without a group


def test_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    indices: Any = SimpleNamespace(is_cuda=True)
    group: Any = None
    with pytest.raises(
        RuntimeError, match="A CUDA graph is being captured, but all_to_all_single takes the row counts"
    ):
        make_sharded_routing_map(indices, 4, group, "", NeededGradients(True, True))


def test_without_a_group_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_to_all_single", None)
    case = Case((9,), 4, 2)
    step(whole(case), batch(case))
    assert "all_to_all" not in whole(case).explain(device="cuda") + repr(whole(case))
    assert "not repeated" not in whole(case).explain(device="cuda")


@pytest.mark.parametrize("group", ["ep", 0, [0, 1], 1.5], ids=repr)
def test_what_is_no_group_is_refused(group: Any) -> None:
    for make in (lambda: ops.Dispatch(4, group=group), lambda: ops.Combine(group=group)):
        with pytest.raises(TypeError, match="group is .*, but must be a torch.distributed ProcessGroup, a DeviceMesh"):
            make()
