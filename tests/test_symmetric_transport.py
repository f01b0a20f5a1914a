"""transport="symmetric" over ranks that share memory, its kernels interpreted: the bits of the unsharded layer."""
# T tokens, H features, E experts, L experts of a rank, n ranks, C rows of a rank

from __future__ import annotations

import copy
import gc
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fuser
from fuser import Sequential, autocast, ops
from ops.kernels.routing import symmetric_buffers as buffers_module
from ops.kernels.routing.permute import make_routing_map
from ops.kernels.routing.symmetric import (
    SymmetricRoutingMap,
    expand,
    layout,
    layout_ref,
    locate,
    pull,
    pull_sums,
    push,
    put_counts,
    sum_members,
)
from ops.kernels.routing.symmetric_buffers import Extent, SymmetricBuffers
from ops.kernels.routing.symmetric_memory import SymmetricMemory, allocate
from ops.kernels.routing.symmetric_triton import DIFFERENT, NUMBERS, OVERFLOWN
from ops.kernels.routing.transports import PARTIAL_SUMS
from tests.pairwise import exhaustive
from tests.ranks import on_ranks, quietly
from tests.reference import assert_close, assert_same_bits
from tests.shared_memory import symmetric_on_cpu
from tests.test_expert_parallel import (
    Batch,
    Case,
    batch,
    check_shares,
    experts_between,
    random_case,
    same_everywhere,
    sentence,
    step,
    weight_gradients,
    whole,
)

# Rows of other numbers are multiplied in other tiles.
CLOSE = {torch.bfloat16: 2**-5, torch.float32: 2**-5}

pytestmark = pytest.mark.interpreter


def share_of(
    layer: Sequential,
    case: Case,
    capacity: int,
    group: Any = None,
    sums: str | None = None,
    overlap: bool = False,
    **settings: Any,
) -> Sequential:
    """The same layer on this rank, with its own experts of that layer. sums: `partial_sums`"""
    group = dist.group.WORLD if group is None else group
    own, rank = case.experts // len(case.tokens), dist.get_rank(group)
    symmetric = {"group": group, "transport": "symmetric", "partial_sums": sums}
    first = ops.Dispatch(case.experts, capacity=capacity, overlap=overlap, **symmetric)
    mine = experts_between(first, ops.Combine(**symmetric), own, case, **settings)
    with torch.no_grad():
        for parameter, of_all in zip(mine.parameters(), layer.parameters(), strict=True):
            parameter.copy_(of_all[rank * own : (rank + 1) * own])
    return mine


def rows_received(case: Case, given: Batch) -> list[int]:
    """By each rank."""
    owner = given.indices.flatten() // (case.experts // len(case.tokens))
    return owner.bincount(minlength=len(case.tokens)).tolist()


def compare(case: Case, recipe: Any = "bf16", spare: int = 3, group: Any = None, **settings: Any) -> None:
    """spare: rows of the capacity that no rank receives"""
    rank = dist.get_rank(group)
    layer, given = whole(case, **settings), batch(case)
    capacity = max(max(rows_received(case, given)) + spare, case.experts // len(case.tokens))
    mine = share_of(layer, case, capacity, group, **settings)
    with autocast(recipe):
        of_all = step(layer, given)
        of_rank = step(mine, given.of_rank(case, rank))
    check_shares(case, rank, of_all, weight_gradients(layer), of_rank | weight_gradients(mine))
    fuser.check_overflow()


def all_nan(tensors: dict[str, Tensor | None]) -> None:
    finite = [name for name, tensor in tensors.items() if tensor is None or not tensor.isnan().all()]
    assert not finite, f"{finite} are not NaN in all elements"


def overflow(rank: int, device: str, recipe: str = "bf16") -> None:
    """Rank 1 would receive 2 rows more than its capacity in one step, and none fewer in the next."""
    case = Case((9, 6), 4, 2, torch.bfloat16, features=(128, 64))
    fits = batch(case)
    fits.indices[:] = torch.tensor([0, 2])  # 15 rows for expert 0 and 15 for expert 2
    too_many = fits._replace(indices=fits.indices.clone())
    too_many.indices[:2] = 2
    layer = whole(case)
    mine = share_of(layer, case, 15).to(device)
    layer = copy.deepcopy(layer).to(device)
    fits, too_many = (Batch(*(tensor.to(device) for tensor in given)) for given in (fits, too_many))
    own = slice(2 * rank, 2 * rank + 2)
    needs = (
        "would have received 17 rows, but capacity is 15, so the outputs and gradients of that step are NaN on every"
    )
    with autocast(recipe):
        for raising in (fuser.check_overflow, lambda: step(mine, fits.of_rank(case, rank))):
            mine.zero_grad()
            all_nan(step(mine, too_many.of_rank(case, rank)) | weight_gradients(mine))
            if device == "cuda":
                torch.cuda.synchronize()
            said = same_everywhere(sentence(raising))
            assert needs in said and said.endswith("Give Dispatch a capacity of 17 or more."), said
            fuser.check_overflow()
        # nothing was written past the capacity, and nothing is left of it
        mine.zero_grad()
        layer.zero_grad()
        expected = {name: t.split(case.tokens)[rank] for name, t in step(layer, fits).items()}
        expected |= {name: t[own] for name, t in weight_gradients(layer).items()}
        assert_close(step(mine, fits.of_rank(case, rank)) | weight_gradients(mine), expected, CLOSE)
        fuser.check_overflow()


def compare_cases(rank: int, ranks: int, seeds: int, folder: Path) -> None:
    with quietly(), symmetric_on_cpu(folder):
        compare(Case((7, 0, 12, 1)[:ranks], 2 * ranks, 2))
        compare(Case((7, 3, 12, 1)[:ranks], 2 * ranks, 2, torch.bfloat16), spare=0)
        compare(Case((0,) * ranks, 2 * ranks, 2))
        for seed in range(seeds):
            compare(random_case(seed, ranks))
        if ranks == 4:
            compare(Case((3, 5, 0, 9), 8, 3, torch.float64))
            compare(Case((3, 5, 0, 9), 8, 3), path="split")
            compare(Case((3, 5, 0, 9), 8, 3), fusions=())
            for recipe in ("fp8_current", "fp8_block", "mxfp8"):
                compare(Case((20, 13, 0, 4), 8, 2), recipe)
            pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            compare(Case((4, 7), 6, 2, seed=rank % 2), group=pairs[rank % 2])


@pytest.mark.parametrize(("ranks", "seeds"), [(2, 4), pytest.param(4, 12, marks=[pytest.mark.rest, pytest.mark.slow])])
@pytest.mark.slow
def test_a_sharded_layer_has_the_bits_of_the_whole_one(ranks: int, seeds: int, tmp_path: Path) -> None:
    on_ranks(compare_cases, ranks, seeds, tmp_path, folder=tmp_path, ranks=ranks)


def memory_is_lent(rank: int, folder: Path) -> None:
    """FC2 and FC1's dgrad write where the other ranks read, and where they may not, their rows are copied there."""
    case, copied = Case((7, 3), 4, 2, torch.bfloat16), []
    given = batch(case).of_rank(case, rank)
    give = SymmetricRoutingMap._give

    def noted(self: Any, rows: Tensor) -> None:
        copied.append(rows.data_ptr() != self.buffers.rows(rows.dtype, rows.shape[1]).data_ptr())
        give(self, rows)

    with quietly(), symmetric_on_cpu(folder), patch.object(SymmetricRoutingMap, "_give", noted):
        expected = None
        for settings in ({}, {"fusions": ()}, {"path": "split"}, {"overlap": True}, {"overlap": True, "fusions": ()}):
            layer = share_of(whole(case), case, 40, **settings)
            found = step(layer, given) | weight_gradients(layer)
            assert copied == [False, False], (settings, copied)
            copied.clear()
            assert_close(found, expected or found, CLOSE)
            expected = expected or found
        symmetric = {"group": dist.group.WORLD, "transport": "symmetric"}

        def between(*operations: Any) -> Sequential:
            """Those in front of Combine, with the weights of `layer`."""
            return Sequential(
                ops.Dispatch(4, capacity=40, **symmetric), *layer[1:4], *operations, ops.Combine(**symmetric)
            )

        step(between(torch.nn.Identity()), given)
        assert copied == [True, False], "a module of the caller's gives rows of its own"
        copied.clear()

        # Another transfer in the same buffers stands between the tokens' way and that of the rows back.
        inner = Sequential(ops.Dispatch(4, capacity=40, **symmetric), ops.Combine(**symmetric))

        class Nested(torch.nn.Module):
            def forward(self, rows: Tensor) -> Tensor:
                return rows + 0 * inner(given.x, probs=given.probs, indices=given.indices).sum()

        outer = Sequential(ops.Dispatch(4, capacity=40, **symmetric), Nested(), *layer[1:4], ops.Combine(**symmetric))
        with torch.no_grad():
            y = outer(given.x, probs=given.probs, indices=given.indices)
        assert copied == [True, True]
        assert_close({"y": y}, {"y": expected["y"]}, CLOSE)


@pytest.mark.slow
def test_experts_write_where_other_ranks_read(tmp_path: Path) -> None:
    on_ranks(memory_is_lent, tmp_path, folder=tmp_path)


def accumulate_and_delay(rank: int, folder: Path) -> None:
    """Weight gradients are added to main_grad, at once or by `backward_dw`, as those of the unsharded layer are."""
    with quietly(), symmetric_on_cpu(folder):
        case = Case((7, 3), 4, 2, torch.bfloat16)
        given = batch(case)
        for overlap, delayed, recipe in ((False, False, "bf16"), (True, True, "bf16"), (True, False, "fp8_current")):
            settings = {"main_grad": True, "delayed": delayed}
            layer = whole(case, **settings)
            mine = share_of(layer, case, 40, overlap=overlap, **settings)
            untouched = weight_gradients(mine, "main_grad")
            untouched = {name: t.clone() for name, t in untouched.items()}
            for _ in range(2):
                with autocast(recipe):
                    of_all, of_rank = step(layer, given), step(mine, given.of_rank(case, rank))
                if delayed:
                    assert_same_bits(weight_gradients(mine, "main_grad"), untouched)
                    layer.backward_dw()
                    mine.backward_dw()
                    untouched = {name: t.clone() for name, t in weight_gradients(mine, "main_grad").items()}
                of_weights = weight_gradients(layer, "main_grad")
                check_shares(case, rank, of_all, of_weights, of_rank | weight_gradients(mine, "main_grad"))
        # computed again in backward, with the transfers of forward
        layer = whole(case)
        mine = share_of(layer, case, 40)
        of_all = step(layer, given)
        of_rank = step(lambda *a, **k: fuser.checkpoint(mine, *a, use_reentrant=False, **k), given.of_rank(case, rank))
        check_shares(case, rank, of_all, weight_gradients(layer), of_rank | weight_gradients(mine))


def need_some_gradients(rank: int, folder: Path) -> None:
    """Every rank takes part in backward, whichever gradients it needs; none is an error where others need some."""
    everything = ("x", "probs")
    with quietly(), symmetric_on_cpu(folder):
        case = Case((7, 3), 4, 2)
        given = batch(case)
        mine, none = share_of(whole(case), case, 40), everything if rank else ()
        said = same_everywhere(sentence(lambda: step(mine, given.of_rank(case, rank), frozen=none)))
        assert "gradients computed" in said and "gradients not computed" in said
        for frozen in ((("x",), ("probs",)), (everything, everything), ((), ("experts",))):
            layer = whole(case)
            mine = share_of(layer, case, 40)
            of_all = step(layer, given)
            mine.requires_grad_("experts" not in frozen[rank])
            of_rank = step(mine, given.of_rank(case, rank), frozen=frozen[rank])
            of_all |= {name: None for name, t in of_rank.items() if t is None}
            of_weights = weight_gradients(layer)
            if "experts" in frozen[rank]:
                of_weights = dict.fromkeys(of_weights)
            check_shares(case, rank, of_all, of_weights, of_rank | weight_gradients(mine))


@pytest.mark.slow
def test_ranks_may_need_other_gradients(tmp_path: Path) -> None:
    on_ranks(need_some_gradients, tmp_path, folder=tmp_path)


@pytest.mark.slow
def test_weight_gradients_go_to_main_grad_at_once_or_later(tmp_path: Path) -> None:
    on_ranks(accumulate_and_delay, tmp_path, folder=tmp_path)


def sum_as_alltoall(rank: int, ranks: int, folder: Path) -> None:
    """The bits of the other transport, whose sums are held to the formula; without products, whose tiles differ."""
    with quietly(), symmetric_on_cpu(folder):
        for name, dtype, topk in product(PARTIAL_SUMS, (torch.bfloat16, torch.float32, torch.float64), (1, 3)):
            case = Case((9, 0, 14, 1)[:ranks], 4 * ranks, topk, dtype)
            given = batch(case).of_rank(case, rank)
            group = {"group": dist.group.WORLD, "partial_sums": name}
            symmetric = {**group, "transport": "symmetric"}
            found = [
                step(Sequential(first, ops.ScaledSReLU(), last), given)
                for first, last in (
                    (ops.Dispatch(case.experts, capacity=80, **symmetric), ops.Combine(**symmetric)),
                    (ops.Dispatch(case.experts, **group), ops.Combine(**group)),
                )
            ]
            assert_same_bits(*found)
        layer = share_of(whole(case), case, 80, sums="rounded")
        assert "partial sums by the rank of their experts, rounded before they are sent" in layer.explain()


@pytest.mark.parametrize("ranks", [2, exhaustive(4)])
@pytest.mark.slow
def test_partial_sums_have_the_bits_of_the_other_transport(ranks: int, tmp_path: Path) -> None:
    on_ranks(sum_as_alltoall, ranks, tmp_path, folder=tmp_path, ranks=ranks)


def send_codes(rank: int, recipes: tuple[str, ...], folder: Path) -> None:
    """Codes have the bits of values, where no weight needs a gradient; with "always" all but FC1's weight gradient."""
    sent = []

    def noted(x: Tensor, *rest: Any) -> None:
        sent.append(x.dtype)
        push(x, *rest)

    with quietly(), symmetric_on_cpu(folder), patch("ops.kernels.routing.symmetric.push", noted):
        case = Case((20, 13), 4, 2, torch.bfloat16, features=(160, 64))
        given = batch(case).of_rank(case, rank)
        for recipe in recipes:
            found = []
            for choice in ("exact", "always", "never"):
                layer = share_of(whole(case), case, 90)
                vars(layer[0])["send_codes"] = choice  # before the first plan
                with autocast(recipe):
                    found.append(step(layer, given) | weight_gradients(layer))
                    assert sent == [torch.uint8 if choice == "always" else torch.bfloat16, torch.bfloat16]
                    sent.clear()
                    with torch.no_grad():
                        y = layer(given.x, probs=given.probs, indices=given.indices)
                    assert sent == [torch.bfloat16 if choice == "never" else torch.uint8]
                    sent.clear()
                assert_same_bits({"y": y}, {"y": found[0]["y"]})
            assert_same_bits(found[0], found[2])
            fc1 = next(name for name, t in found[0].items() if t is not None and t.dim() == 3)
            first, always = dict(found[0]), dict(found[1])
            made, expected = always.pop(fc1).double(), first.pop(fc1).double()
            assert (made - expected).norm() < expected.norm() / 16, "each number is rounded once more"
            assert_same_bits(always, first)
            words = layer.explain(recipe=recipe)
            assert "tokens sent in the dtype of x: send_codes='never'" in words
            layer = share_of(whole(case), case, 91)  # a capacity that no layer had before, so the ranks compare
            if rank:  # what makes one rank send values is said on all
                layer[1].register_forward_hook(lambda *_: None)
            with autocast(recipe), torch.no_grad():
                run = partial(layer, given.x, probs=given.probs, indices=given.indices)
                said = same_everywhere(sentence(run))
                assert "rank 0: tokens sent as codes of" in said and "rank 1: capacity=91, num_experts=4" in said
            # a step that overflows is NaN whatever is sent
            narrow = share_of(whole(case), case, 8)
            with autocast(recipe), torch.no_grad():
                all_nan({"y": narrow(given.x, probs=given.probs, indices=given.indices)})
            sent.clear()
            assert "would have received" in sentence(fuser.check_overflow)


@pytest.mark.parametrize(
    "recipes", [("fp8_block",), pytest.param(("mxfp8", "fp8_rowwise"), marks=pytest.mark.rest)], ids=["block", "others"]
)
@pytest.mark.slow
def test_codes_that_are_sent_have_the_bits_of_values(recipes: tuple[str, ...], tmp_path: Path) -> None:
    on_ranks(send_codes, recipes, tmp_path, folder=tmp_path)


def overflow_on_cpu(rank: int, recipes: tuple[str, ...], folder: Path) -> None:
    with quietly(), symmetric_on_cpu(folder):
        for recipe in recipes:
            overflow(rank, "cpu", recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipes",
    [("bf16",), pytest.param(("fp8_current", "fp8_block", "mxfp8"), marks=pytest.mark.rest)],
    ids=["bf16", "quantized"],
)
def test_an_overflow_is_nan_on_every_rank_and_an_error_once_it_is_known(
    recipes: tuple[str, ...], tmp_path: Path
) -> None:
    on_ranks(overflow_on_cpu, recipes, tmp_path, folder=tmp_path)


def differ_later(rank: int, device: str) -> None:
    """Both recipes are known to the ranks, which then run one each."""
    recipes = "bf16", "fp8_block"
    with torch.no_grad():
        case = Case((3, 2), 4, 1, torch.bfloat16, features=(160, 64))
        layer = share_of(whole(case), case, 8).to(device)
        given = Batch(*(tensor.to(device) for tensor in batch(case))).of_rank(case, rank)

        def run(recipe: str) -> dict[str, Tensor]:
            with autocast(recipe):
                return {"y": layer(given.x, probs=given.probs, indices=given.indices)}

        before = [run(recipe) for recipe in recipes]
        all_nan(run(recipes[rank]))
        if device == "cuda":
            torch.cuda.synchronize()
        said = same_everywhere(sentence(fuser.check_overflow))
        assert "<ranks 0, 1> differed in what they exchanged. Some: capacity=8, num_experts=4, 160 features" in said
        assert (
            "recipe high_precision; others: tokens sent as codes of" in said and "recipe fp8_block. The outputs" in said
        ), said
        for recipe, expected in zip(recipes, before, strict=True):
            assert_same_bits(run(recipe), expected)
        fuser.check_overflow()


def differ_on_cpu(rank: int, folder: Path) -> None:
    with quietly(), symmetric_on_cpu(folder):
        differ_later(rank, "cpu")


@pytest.mark.slow
def test_ranks_that_differ_in_a_later_step_learn_of_it(tmp_path: Path) -> None:
    on_ranks(differ_on_cpu, tmp_path, folder=tmp_path)


@pytest.mark.launches("layout_kernel")
def test_no_number_of_rows_suffices_where_ranks_differ() -> None:
    counts, numbers, most = torch.randint(0, 4, (3, 6)), torch.tensor([7, 2, 5]), torch.zeros(1, dtype=torch.int64)
    found = layout(counts, numbers, 1, 40, most)
    for made, reference in zip(found, layout_ref(counts, numbers, 1, 40), strict=True):
        assert torch.equal(made, reference)
    assert most.item() == found[2][1].item() and divmod(most.item() - DIFFERENT.value, NUMBERS.value) == (2, 7)
    assert found[1].tolist() == [20, 20], "the capacity is divided, so that every weight gets NaN"


# ------------------------------------------------------------------------------------------------------- the kernels


class OneProcess:
    """The buffers of n ranks that take turns in one process."""

    def __init__(
        self, ranks: int, capacity: int, experts: int, row_bytes: int, topk: int, monkeypatch: pytest.MonkeyPatch
    ):
        memories: list[Tensor] = []

        def allocate(num_bytes: int, group: Any, device: torch.device) -> SymmetricMemory:
            memories.extend(torch.full((num_bytes,), 255, dtype=torch.uint8) for _ in range(ranks - len(memories)))
            addresses = torch.tensor([memory.data_ptr() for memory in memories])
            return SymmetricMemory(memories[group.rank], addresses, lambda: None)

        monkeypatch.setattr("ops.kernels.routing.symmetric_memory.allocate", allocate)
        groups: list[Any] = [SimpleNamespace(rank=rank, size=ranks) for rank in range(ranks)]
        extent = Extent(capacity, experts, topk, row_bytes, torch.device("cpu"))
        self.of_rank = [SymmetricBuffers(each, extent, {}) for each in groups]


@pytest.mark.launches(
    "put_counts_kernel", "layout_kernel", "locate_kernel", "push_kernel", "expand_kernel", "pull_kernel",
    "sum_members_kernel", "pull_sums_kernel",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize("capacity", [42, 5], ids=["fits", "overflows"])
def test_a_token_is_written_once_to_each_rank_and_nothing_where_it_does_not_fit(
    capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, E, topk, H, tokens = 3, 6, 4, 5, (4, 0, 7)
    buffers = OneProcess(ranks, capacity, E, H * 4, topk, monkeypatch).of_rank
    indices = [torch.randint(0, E + 1, (T, topk)) for T in tokens]  # E stands for no expert
    x, probs = [torch.randn(T, H) for T in tokens], [torch.rand(T, topk) for T in tokens]
    rows_of = [
        sorted(
            (expert, source, token, slot)
            for source, given in enumerate(indices)
            for token, experts in enumerate(given.tolist())
            for slot, expert in enumerate(experts)
            if expert // 2 == rank
        )
        for rank in range(ranks)
    ]
    maps = [make_routing_map(given, E) for given in indices]
    for rank, (_, _, counts) in enumerate(maps):
        put_counts(counts, 3, ranks, rank, buffers[rank].memory.addresses, buffers[rank].counts_at)
    located, totals = [], []
    for rank, of_rank in enumerate(buffers):
        given = of_rank.counts, of_rank.numbers, rank, capacity
        shift, sizes, total = layout(*given, of_rank.needed)
        for made, reference in zip((shift, sizes, total), layout_ref(*given), strict=True):
            assert torch.equal(made, reference)
        assert total.tolist() == [len(rows_of[rank]), max(map(len, rows_of))]
        assert sizes.sum().item() == (capacity if capacity == 5 else len(rows_of[rank]))
        assert of_rank.needed.item() == (total[1].item() if capacity == 5 else 0)
        located.append(locate(indices[rank], maps[rank][0].row_of_slot, shift, total, capacity))
        totals.append(total)
        push(x[rank], probs[rank], *located[rank], of_rank)
    collected = []
    for of_rank, total in zip(buffers, totals, strict=True):
        rows, scales = of_rank.rows(torch.float32, H), of_rank.scales(torch.float32)
        y, found = torch.empty_like(rows), (torch.empty_like(of_rank.origins), torch.empty_like(scales))
        expand(rows, of_rank.members, of_rank.origins, y, (total, scales, *found))
        collected.append((y, *found))
    if capacity == 5:
        for rank, of_rank in enumerate(buffers):
            assert (of_rank.memory.local[of_rank.origins_at :] == 255).all()
            assert (located[rank][0] == OVERFLOWN.value).all()
            y, scales = torch.empty_like(x[rank]), torch.empty_like(probs[rank])
            pull(y, scales, located[rank][0], of_rank)
            assert y.isnan().all() and scales.isnan().all()
            pull_sums(y.zero_(), torch.float32, located[rank][1], of_rank)
            assert y.isnan().all()
            rows, origins, scales = collected[rank]
            assert rows.isnan().all() and (origins == OVERFLOWN.value).all() and scales.isnan().all()
            again = torch.zeros_like(rows)
            expand(of_rank.rows(torch.float32, H), of_rank.members, origins, again)
            assert again.isnan().all()
        return
    for rows, of_rank, (y, found_origins, found_scales) in zip(rows_of, buffers, collected, strict=True):
        count, leads = len(rows), {}
        for row, (_, source, token, _) in enumerate(rows):
            leads.setdefault((source, token), []).append(row)
        origins = found_origins[:count].tolist()
        assert all(len({origins[row] for row in same}) == 1 and origins[same[0]] in same for same in leads.values())
        written = torch.zeros(capacity, dtype=torch.bool)
        written[list(set(origins))] = True
        assert written.sum() == len(leads) < count, "a token is written once"
        assert (of_rank.rows(torch.int32, H)[~written] == -1).all()
        assert (of_rank.scales(torch.int32)[count:] == -1).all() and (found_origins[count:] == -1).all()
        slots = {(source, token, slot): row for row, (_, source, token, slot) in enumerate(rows)}
        for (source, token), same in leads.items():
            members = [slots.get((source, token, slot), -1) for slot in range(topk)]
            assert of_rank.members[origins[same[0]]].tolist() == members, "in the order of the slots"
        assert torch.equal(y[:count], torch.stack([x[source][token] for _, source, token, _ in rows]))
        assert not y[count:].any() and not found_scales[count:].any()
        scales = found_scales[:count].tolist()
        assert scales == [probs[source][token, slot].item() for _, source, token, slot in rows]
        of_rank.rows(torch.float32, H).copy_(y)
    expected = []
    for rank, of_rank in enumerate(buffers):
        y, scales = torch.empty_like(x[rank]), torch.empty_like(probs[rank])
        pull(y, scales, located[rank][0], of_rank)
        sent = indices[rank] < E
        assert torch.equal(scales, probs[rank] * sent)
        expected.append(torch.zeros_like(y))
        for slot in range(topk):
            expected[rank] += x[rank] * sent[:, slot, None]
        assert torch.equal(y, expected[rank])
    for of_rank, (y, origins, _) in zip(buffers, collected, strict=True):
        sum_members(y, of_rank.members, origins, of_rank.rows(torch.float32, H))
    for rank, of_rank in enumerate(buffers):
        y = torch.empty_like(x[rank])
        pull_sums(y, torch.float32, located[rank][1], of_rank)
        torch.testing.assert_close(y, expected[rank])


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_bytes_that_overflow_are_nan_as_float8_codes() -> None:
    rows = torch.zeros(3, 4, dtype=torch.uint8)
    y = torch.empty_like(rows)
    expand(rows, torch.zeros(3, 2, dtype=torch.int32), torch.full((3,), OVERFLOWN.value, dtype=torch.int32), y)
    assert y.view(torch.float8_e4m3fn).float().isnan().all() and y.view(torch.float8_e5m2).float().isnan().all()


def test_rows_have_their_place_by_expert_and_then_rank() -> None:
    counts = torch.tensor([[0, 0, 0, 0], [1, 0, 2, 1]])
    same = torch.tensor([5, 5])
    assert [t.tolist() for t in layout_ref(counts, same, 1, 4)] == [[0, 0, 3, 3], [2, 1], [3, 3]]
    assert [t.tolist() for t in layout_ref(counts, same, 1, 2)[1:]] == [[1, 1], [3, 3]], "an overflow divides it"


# -------------------------------------------------------------------------------------------- what is refused and said


def name_and_refuse(rank: int, folder: Path) -> None:
    with quietly():
        group = dist.group.WORLD
        for settings, said in (
            ({"transport": "nvshmem", "group": group}, "transport is 'nvshmem', but must be one of 'alltoall', 'symm"),
            ({"transport": "symmetric", "capacity": 8}, "transport is 'symmetric', but there is no group"),
            ({"transport": "symmetric", "group": group}, "transport='symmetric' needs a capacity: the rows that a"),
            ({"transport": "symmetric", "group": group, "capacity": 0}, "Dispatch got capacity=0. It must be positive"),
            ({"transport": "symmetric", "group": group, "capacity": 1}, "capacity is 1, but must be at least 2, a row"),
            ({"group": group, "capacity": 8}, "capacity is 8, but only transport='symmetric' has one"),
            ({"capacity": 8}, "capacity is 8, but only transport='symmetric' has one"),
            ({"group": group, "overlap": True}, "overlap=True is for transport='symmetric' without partial_sums"),
        ):
            assert said in sentence(lambda settings=settings: ops.Dispatch(4, **settings), ValueError)
        assert "there is no group" in sentence(lambda: ops.Combine(transport="symmetric"), ValueError)

        symmetric = {"group": group, "transport": "symmetric"}
        first, last = ops.Dispatch(4, capacity=12, **symmetric), ops.Combine(**symmetric)
        layer = Sequential(first, last)
        x, probs, indices = torch.randn(3, 8), torch.rand(3, 2), torch.tensor([[0, 3], [1, 2], [3, 0]])

        def run(*operations: Any, x: Tensor = x) -> Any:
            return Sequential(*operations)(x, probs=probs, indices=indices)

        assert "x is on cpu, but transport='symmetric' writes to GPUs. Move x to one" in sentence(
            lambda: run(first, last), ValueError
        )
        with symmetric_on_cpu(folder):
            differs = ops.Dispatch(4, capacity=12 + rank, **symmetric)
            said = same_everywhere(sentence(lambda: run(differs, last)))
            assert "rank 0: capacity=12, num_experts=4, 8 features" in said and "; rank 1: capacity=13, " in said
            for other in (ops.Combine(), ops.Combine(group=group)):
                said = sentence(lambda other=other: run(first, other), ValueError)
                assert said.endswith(f"Give both the same {'group' if other.group is None else 'transport'}."), said
            alltoall = ops.Dispatch(4, group=group)
            said = sentence(lambda: run(alltoall, last), ValueError)
            assert "a Dispatch with transport='alltoall', but this Combine has transport='symmetric'" in said
            assert "x has no features" in sentence(lambda: run(first, last, x=x[:, :0]), ValueError)
            assert torch.equal(run(first, last), 2 * x), "after a refusal the ranks go on"

            other = {"group": dist.new_group([0, 1]), "transport": "symmetric"}
            held = len(buffers_module._of_groups)
            run(ops.Dispatch(4, capacity=12, **other), ops.Combine(**other))
            assert len(buffers_module._of_groups) == held + 1
            dist.destroy_process_group(other["group"])
            other.clear()
            gc.collect()
            assert len(buffers_module._of_groups) == held, "buffers end with their group"
        with patch("socket.gethostname", lambda: f"host{rank}"):
            said = same_everywhere(sentence(lambda: allocate(8, first.group, torch.device("cpu"))))
        assert "rank 0: host host0; rank 1: host host1. Symmetric memory is within one NVLink domain" in said

        lines = layer.explain(device="cuda").splitlines()
        dispatching, combining = (next(line for line in lines if f"{n}  [" in line) for n in ("Dispatch", "Combine"))
        num_bytes = 128 + 2 * 4 * 8 + 64 + 128 + 128 + 128 + 12 * 8 * 4
        assert dispatching.endswith(
            "symmetric memory over 2 ranks (gloo), a token written once to each rank; no host read; capacity 12 rows a "
            f"rank, of 4 H + 12 + 4 topk bytes, {num_bytes} bytes held; "
            "tokens sent in the dtype of x: no GroupedLinear that takes codes follows in the pipeline]"
        ), (dispatching, num_bytes)
        assert combining.endswith("from the memory of their ranks; symmetric memory over 2 ranks (gloo)]")
        assert "Dispatch(num_experts=4, group=<ranks 0, 1>, transport='symmetric', capacity=12)" in repr(layer)
        assert "Combine(group=<ranks 0, 1>, transport='symmetric')" in repr(layer)
        assert sum("not repeated: The barriers of symmetric memory" in line for line in lines) == 2


@pytest.mark.slow
def test_what_cannot_be_transferred_is_refused_in_a_sentence(tmp_path: Path) -> None:
    on_ranks(name_and_refuse, tmp_path, folder=tmp_path)
