"""Partial sums over gloo ranks: the order that Combine states, its bounds against float64, and what stays bit-equal."""
# T tokens, H features, F expert features, E experts, K slots, n ranks, R rows for the experts of a rank

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.exchange import Transfers
from fuser import Sequential, autocast, checkpoint, ops
from fuser.distributed import Overlapped
from ops.kernels.routing.all_to_all import (
    ExpertGroup,
    NeededGradients,
    ShardedRoutingMap,
    _copies,
    _copies_of_tokens,
    make_sharded_routing_map,
)
from ops.kernels.routing.permute import combine
from ops.kernels.routing.transports import PARTIAL_SUMS, sent_dtype
from tests.ranks import on_ranks, quietly
from tests.reference import ROUNDED_ONCE, assert_close, assert_same_bits

H, F = 32, 32
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
# What is summed is rounded once, in another order than without partial sums; "rounded" once more, before the last sum.
SUMMED = {dtype: 3 * bound for dtype, bound in ROUNDED_ONCE.items()}


class Case(NamedTuple):
    """The same on all ranks. tokens: of each rank"""

    tokens: tuple[int, ...]
    experts: int
    topk: int
    dtype: torch.dtype = torch.float32
    lowest: int = 0
    seed: int = 0

    def indices(self, rank: int) -> Tensor:
        """Experts from `lowest`, different ones for each token."""
        generator = torch.Generator().manual_seed(100 * self.seed + rank)
        among = self.experts - self.lowest
        return self.lowest + torch.rand(self.tokens[rank], among, generator=generator).argsort(1)[:, : self.topk]


def cases(ranks: int) -> list[Case]:
    tokens, experts = (9, 0, 14, 1)[:ranks], 4 * ranks
    found = [Case(tokens, experts, topk, dtype) for dtype in EPS for topk in (1, 3, 4)]
    found += [Case((0,) * ranks, experts, 2), Case(tokens[::-1], experts, 3, lowest=experts - 3)]
    return found + [Case(tokens, experts, experts, torch.bfloat16, seed=1)]


def sentence(run: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        run()
    return str(raised.value)


# ----------------------------------------------------------------------------------------------------------- the sums


def made_map(case: Case, rank: int, partial_sums: str | None, device: str = "cpu") -> ShardedRoutingMap:
    group, needed = ExpertGroup(dist.group.WORLD), NeededGradients(True, True)
    indices = case.indices(rank).to(device)
    return make_sharded_routing_map(indices, case.experts, group, "the same", needed, partial_sums)[0]


def in_the_stated_order(terms_TKH: Tensor, owner_TK: Tensor, sent_in: torch.dtype) -> Tensor:
    """Slot by slot on each rank, rounded to what is sent, then rank by rank."""
    wide = torch.promote_types(terms_TKH.dtype, torch.float32)
    y = torch.zeros(len(terms_TKH), terms_TKH.shape[2], dtype=wide, device=terms_TKH.device)
    for rank in range(dist.get_world_size()):
        partial = torch.zeros_like(y)
        for slot in range(terms_TKH.shape[1]):
            mine = (owner_TK[:, slot] == rank)[:, None]
            partial += torch.where(mine, terms_TKH[:, slot].to(wide), 0)
        y += partial.to(sent_in).to(wide)
    return y.to(terms_TKH.dtype)


def sum_as_stated(rank: int, case: Case, partial_sums: str, device: str) -> bool:
    """Whether any sum is further away than the bound of sums that are not rounded."""
    ranks = dist.get_world_size()
    routing_map = made_map(case, rank, partial_sums, device)
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(routing_map.num_rows, H, generator=generator)
    rows = (rows * torch.exp2(torch.randint(-4, 5, rows.shape, generator=generator))).to(device, case.dtype)
    y = routing_map.sum_rows(rows)
    assert torch.equal(y, routing_map.sum_rows(rows)) and torch.equal(
        y, made_map(case, rank, partial_sums, device).sum_rows(rows)
    )

    by_pair = routing_map.send_back(rows)
    terms = by_pair[routing_map.row_of_slot]
    owner = case.indices(rank).to(device) // (case.experts // ranks)
    stated = in_the_stated_order(terms, owner, sent_dtype(partial_sums, case.dtype))
    assert_same_bits({"y": y}, {"y": stated})
    if partial_sums == "float32":
        on_one_rank = (owner == owner[:, :1]).all(1)
        assert_same_bits({"y": y[on_one_rank]}, {"y": combine(by_pair, routing_map)[on_one_rank]})

    wide = torch.promote_types(case.dtype, torch.float32)
    d = EPS[case.dtype] if wide != case.dtype else 0.0
    exact, magnitudes = terms.double().sum(1), terms.double().abs().sum(1)
    plain = (case.topk - 1) * EPS[wide] / 2 * magnitudes + d / 2 * y.double().abs()
    stated_bound = plain + (d / 2 * magnitudes if partial_sums == "rounded" else 0)
    error, first_order = (y.double() - exact).abs(), 1 + 64 * EPS[case.dtype]
    if case.dtype == torch.float64:  # in which the reference is computed as well
        first_order *= 2
    assert (error <= stated_bound * first_order).all()
    return bool((error > plain * first_order).any())


def sum_all(rank: int, ranks: int, device: str = "cpu") -> None:
    further = dict.fromkeys(PARTIAL_SUMS, False)
    for case in cases(ranks):
        for name in PARTIAL_SUMS:
            further[name] |= sum_as_stated(rank, case, name, device)
    if rank == 0:
        assert further == {"float32": False, "rounded": True}, "the bounds tell the two apart"


def send_fewer_bytes(rank: int) -> None:
    """Top-4 of 8 experts on 2 ranks: two rows of each token come back, or one as wide, or one twice as wide."""
    case = Case((40, 40), 8, 4, torch.bfloat16)
    rows_sent = {}
    for name in (None, *PARTIAL_SUMS):
        routing_map = made_map(case, rank, name)
        rows = torch.randn(routing_map.num_rows, H).to(case.dtype)
        transfers = Transfers.of(lambda routing_map=routing_map, rows=rows: routing_map.sum_rows(rows))
        rows_sent[name] = transfers.bytes_sent / (H * 2)
    other = case.indices(1 - rank) // 4 == rank
    assert rows_sent == {None: other.sum(), "float32": 2 * other.any(1).sum(), "rounded": other.any(1).sum()}


# ---------------------------------------------------------------------------------------------------------- in layers


def modules(case: Case, partial_sums: str | None) -> list[nn.Module]:
    torch.manual_seed(case.seed)
    group, own = dist.group.WORLD, case.experts // dist.get_world_size()
    settings: dict[str, Any] = {"group": group, "partial_sums": partial_sums}
    return [
        ops.Dispatch(case.experts, **settings),
        ops.GroupedLinear(own, H, 2 * F, bias=False, dtype=case.dtype),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(own, F, H, dtype=case.dtype),
        ops.Combine(**settings),
    ]


class Given(NamedTuple):
    x: Tensor
    probs: Tensor
    indices: Tensor

    @classmethod
    def of(cls, case: Case, rank: int) -> Given:
        indices = case.indices(rank)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(len(indices), H, generator=generator).to(case.dtype)
        return cls(x, torch.rand(indices.shape, generator=generator), indices)


def step(layer: Callable[..., Tensor], given: Given, frozen: tuple[str, ...] = ()) -> dict[str, Any]:
    x = given.x.clone().requires_grad_("x" not in frozen)
    probs = given.probs.clone().requires_grad_("probs" not in frozen)
    y = layer(x, probs=probs, indices=given.indices)
    y.backward(torch.sin(given.x))
    return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}


def gradients(layer: nn.Module) -> dict[str, Any]:
    return {key: parameter.grad for key, parameter in layer.named_parameters()}


def compare_layers(rank: int, ranks: int) -> None:
    """y and dx are sums; all else has the bits that it has without partial sums."""
    frozen_by = ((), ("x",), ("probs",), ("x", "probs"), ("x",) if rank else ())
    for case in (cases(ranks)[4], *[c for c in cases(ranks) if c.dtype != torch.float16][::3]):
        given = Given.of(case, rank)
        for name in PARTIAL_SUMS:
            for frozen in frozen_by:
                plain, summed = (Sequential(*modules(case, each)) for each in (None, name))
                if "probs" in frozen:
                    summed[1].weight.requires_grad_(False)
                    plain[1].weight.requires_grad_(False)
                wanted, found = step(plain, given, frozen), step(summed, given, frozen)
                sums = ("y", "dx")
                assert_close({s: found[s] for s in sums}, {s: wanted[s] for s in sums}, SUMMED)
                assert_same_bits(
                    {"dprobs": found["dprobs"], **gradients(summed)}, {"dprobs": wanted["dprobs"], **gradients(plain)}
                )


def run_in_other_ways(rank: int) -> None:
    """No gradients, recomputation, microbatches, other tokens: the bits of the whole layer in one forward."""
    case = Case((11, 6), 8, 4, torch.bfloat16)
    given = Given.of(case, rank)
    for name in PARTIAL_SUMS:
        layer = Sequential(*modules(case, name))
        wanted = step(layer, given)
        again = Sequential(*modules(case, name))
        assert_same_bits(step(lambda *a, layer=again, **k: checkpoint(layer, *a, **k), given), wanted)
        assert_same_bits(gradients(again), gradients(layer))
        with torch.no_grad():
            y = layer(given.x, probs=given.probs, indices=given.indices)
        assert_same_bits({"y": y}, {"y": wanted["y"]})
        overlapped = Overlapped(*modules(case, name), microbatches=2)
        assert_same_bits(step(overlapped, given), wanted)
        says = overlapped.explain()
        assert f"{PARTIAL_SUMS[name]}; all_to_all_single" in says
        with autocast("mxfp8"):
            found, plain = (step(Sequential(*modules(case, each)), given) for each in (name, None))
        assert_close(found, plain, SUMMED)
        with autocast(batch_invariant=True), torch.no_grad():
            whole = layer(given.x, probs=given.probs, indices=given.indices)
            part = layer(*(t[2:5] for t in given[:1]), probs=given.probs[2:5], indices=given.indices[2:5])
        assert_same_bits({"rows": part}, {"rows": whole[2:5]})


# ------------------------------------------------------------------------------------------------- sentences and help


def refuse_and_explain(rank: int) -> None:
    group = dist.group.WORLD
    x, probs, indices = torch.randn(3, 8), torch.rand(3, 2), torch.tensor([[0, 3], [1, 2], [3, 0]])
    summing, plain = (ops.Dispatch(4, group=group, partial_sums=name) for name in ("rounded", None))
    mine = summing if rank == 0 else plain
    said = sentence(lambda: mine(x, probs=probs, indices=indices), RuntimeError)
    assert "rank 0: partial_sums=rounded, num_experts=4, 8 features" in said and "rank 1: num_experts=4, 8" in said
    everywhere = ["", ""]
    dist.all_gather_object(everywhere, said)
    assert everywhere[0] == everywhere[1]

    for name in (None, "float32"):
        last = ops.Combine(group=group, partial_sums=name)
        said = sentence(lambda last=last: Sequential(summing, last)(x, probs=probs, indices=indices), ValueError)
        assert "a Dispatch with partial_sums='rounded', but this Combine has partial_sums=" in said
        assert said.endswith("Give both the same.")
    for operation in (lambda **k: ops.Dispatch(4, **k), ops.Combine):
        assert sentence(lambda make=operation: make(group=group, partial_sums="bf16"), ValueError) == (
            "partial_sums is 'bf16', but must be None or one of 'float32', 'rounded'."
        )
    layer = Sequential(summing, ops.Combine(group=group, partial_sums="rounded"))
    assert torch.equal(layer(x, probs=probs, indices=indices), 2 * x), "the ranks can go on"
    assert repr(layer).count("group=<ranks 0, 1>, partial_sums='rounded')") == 2
    lines = layer.explain(device="cuda").splitlines()
    way = PARTIAL_SUMS["rounded"]
    assert any(f"once a forward; in backward gradients {way}; tokens sent" in line for line in lines)
    assert any(f"{way}; all_to_all_single over 2 ranks (gloo), with the row counts" in line for line in lines)


def all_on_a_rank(rank: int, ranks: int) -> None:
    with quietly():
        sum_all(rank, ranks)
        compare_layers(rank, ranks)
        if ranks == 2:
            send_fewer_bytes(rank)
            run_in_other_ways(rank)
            refuse_and_explain(rank)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=[pytest.mark.rest, pytest.mark.slow])])
def test_partial_sums_are_as_stated(ranks: int, tmp_path: Path) -> None:
    on_ranks(all_on_a_rank, ranks, folder=tmp_path, ranks=ranks)


@pytest.mark.gpu
@pytest.mark.gpu2
def test_partial_sums_on_two_gpus_are_as_stated(tmp_path: Path) -> None:
    on_ranks(sum_all, 2, "cuda", folder=tmp_path, backend="nccl")


def test_the_copies_of_a_token_are_in_the_order_of_the_ranks() -> None:
    assert _copies_of_tokens(torch.tensor([1, 2, 2, 3]), 2, 2, 2).tolist() == [[-1, 0], [1, 2]]
    indices = torch.randint(0, 13, (20, 3))  # 12 stands for no expert
    counts, ends, _ = _copies(indices, 2, 6)
    going = [[t for t, row in enumerate(indices.tolist()) if any(e // 2 == r for e in row)] for r in range(6)]
    copies = [(r, t) for r in range(6) for t in going[r]]
    assert len(copies) == counts.sum()
    for t, found in enumerate(_copies_of_tokens(ends, 20, 3, 6).tolist()):
        expected = [i for i, (_, token) in enumerate(copies) if token == t]
        assert found == [-1] * (3 - len(expected)) + expected
    assert _copies_of_tokens(torch.zeros(0, dtype=torch.int64), 0, 3, 2).shape == (0, 2)


@pytest.mark.parametrize(
    "make", [lambda: ops.Dispatch(4, partial_sums="float32"), lambda: ops.Combine(partial_sums="float32")]
)
def test_partial_sums_need_a_group(make: Callable[[], object]) -> None:
    assert sentence(make, ValueError).startswith("partial_sums is 'float32', but there is no group: all rows")
