"""Dispatch and Combine: where every row goes, and what comes back, forward and backward."""
# T tokens, H features

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fuser import Sequential, ops
from ops.kernels.routing import permute
from ops.kernels.routing.permute import (
    RoutingMap,
    combine,
    combine_and_return_scales,
    combine_present,
    combine_ref,
    dispatch,
    dispatch_ref,
    make_routing_map,
    make_routing_map_ref,
    map_config,
    move_config,
    route_scales,
)
from ops.runner.saved import flatten, unflatten
from tests.check_operation import DEVICES, DTYPES
from tests.grouped_cases import DEVICES as KERNEL_DEVICES
from tests.reference import assert_close, assert_same_bits, capture, no_host_sync

OUTPUTS = ("split_sizes", "scales", "routing_map")


class Case(NamedTuple):
    indices: list[list[int]]
    num_experts: int
    features: int = 5


CASES = [
    # ordinary
    pytest.param(Case([[1, 0], [2, 1], [0, 2], [1, 2]], 3), id="ordinary"),
    pytest.param(Case([[1, 0], [2, 1]], 3), id="as in the docstring"),
    # odd sizes
    pytest.param(Case([[4, 2, 0], [1, 2, 3], [3, 2, 4], [2, 0, 1], [4, 3, 2]], 5, 7), id="top 3"),
    # empty groups
    pytest.param(Case([[3, 1], [1, 3], [3, 1]], 6), id="empty experts"),
    pytest.param(Case([[2], [2], [2]], 4), id="one takes all"),
    # one group
    pytest.param(Case([[0], [0]], 1), id="one expert"),
    # extremes
    pytest.param(Case([[5, 4, 3, 2, 1, 0]], 6), id="one token, every expert"),
    pytest.param(Case([[1, 1], [0, 1]], 2), id="an expert twice"),
]
NO_TOKENS = torch.empty(0, 2, dtype=torch.int64)


def routing() -> st.SearchStrategy[tuple[Tensor, int]]:
    """indices [T, topk] and the number of experts."""
    sizes = st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 6))
    return sizes.flatmap(
        lambda s: st.lists(st.integers(0, s[2] - 1), min_size=s[0] * s[1], max_size=s[0] * s[1]).map(
            lambda flat: (torch.tensor(flat, dtype=torch.int64).reshape(s[0], s[1]), s[2])
        )
    )


def exact(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Small integers: sums of a few are exact in every dtype."""
    return torch.randint(-8, 9, shape, device=device).to(dtype)


def experts_of_rows(indices: Tensor) -> list[tuple[int, int, int]]:
    """(expert, token, slot) of each row, in order."""
    return sorted((e, t, k) for t, chosen in enumerate(indices.tolist()) for k, e in enumerate(chosen))


# The map


def test_the_example_of_the_docstring() -> None:
    routing_map, slot_of_row, sizes = make_routing_map(torch.tensor([[1, 0], [2, 1]]), 3)
    assert routing_map.row_of_slot.tolist() == [[1, 0], [3, 2]]
    assert routing_map.token_of_row.tolist() == [0, 0, 1, 1]
    assert slot_of_row.tolist() == [1, 0, 3, 2]
    assert sizes.tolist() == [1, 2, 1]


@given(routing())
def test_the_map_orders_rows_by_expert_token_and_slot(drawn: tuple[Tensor, int]) -> None:
    indices, num_experts = drawn
    routing_map, slot_of_row, sizes = make_routing_map(indices, num_experts)
    rows = experts_of_rows(indices)
    assert routing_map.token_of_row.tolist() == [token for _, token, _ in rows]
    assert slot_of_row.tolist() == [token * indices.shape[1] + slot for _, token, slot in rows]
    assert sizes.tolist() == [sum(e == expert for e, _, _ in rows) for expert in range(num_experts)]
    assert routing_map.row_of_slot.shape == indices.shape
    for row, (_, token, slot) in enumerate(rows):
        assert routing_map.row_of_slot[token, slot] == row


@pytest.mark.parametrize("device", DEVICES)
def test_indices_out_of_range_spoil_nothing_but_themselves(device: str) -> None:
    indices = torch.tensor([[1, 7], [-3, 0]], device=device)
    routing_map, slot_of_row, sizes = make_routing_map(indices, 2)
    assert slot_of_row.tolist() == [2, 3, 0, 1]
    assert routing_map.row_of_slot.tolist() == [[2, 3], [0, 1]]
    assert sizes.tolist() == [2, 1], "-3 counts for expert 0, 7 for none"


def test_the_map_travels_through_saved_tensors() -> None:
    class Saved(NamedTuple):
        routing_map: RoutingMap

    routing_map, _, _ = make_routing_map(torch.tensor([[1, 0], [2, 1]]), 3)
    flat: list[Tensor | None] = []
    spec = flatten(Saved(routing_map), flat)
    assert [id(t) for t in flat] == [id(t) for t in routing_map.tensors()]
    assert unflatten(spec, flat).routing_map.tensors() == routing_map.tensors()


# Values


@given(drawn=routing(), features=st.integers(0, 3))
def test_dispatch_and_combine_agree_with_their_references(drawn: tuple[Tensor, int], features: int) -> None:
    indices, num_experts = drawn
    routing_map, _, _ = make_routing_map(indices, num_experts)
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(indices.shape[0], features).to(dtype)
        rows = torch.randn(indices.numel(), features).to(dtype)
        actual = {"dispatch": dispatch(x, routing_map), "combine": combine(rows, routing_map)}
        expected = {"dispatch": dispatch_ref(x, indices), "combine": combine_ref(rows, indices)}
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dispatch_moves_every_value_and_gradient_to_its_place(dtype: torch.dtype, case: Case, device: str) -> None:
    indices = torch.tensor(case.indices, device=device)
    x = exact(*indices.shape[:1], case.features, dtype=dtype, device=device).requires_grad_()
    probs = torch.rand(indices.shape, device=device, requires_grad=True)
    y, made = ops.Dispatch(case.num_experts)(x, probs=probs, indices=indices, outputs=OUTPUTS)
    rows = experts_of_rows(indices)
    tokens, slots = [token for _, token, _ in rows], [slot for _, _, slot in rows]
    counts = [sum(e == expert for e, _, _ in rows) for expert in range(case.num_experts)]
    assert made["split_sizes"].tolist() == counts and made["split_sizes"].device == x.device
    assert_same_bits({"y": y, "scales": made["scales"]}, {"y": x[tokens], "scales": probs[tokens, slots]})

    dy, dscales = exact(*y.shape, dtype=dtype, device=device), torch.rand(len(rows), device=device)
    torch.autograd.backward([y, made["scales"]], [dy, dscales])
    dx, dprobs = torch.zeros_like(x), torch.zeros_like(probs)
    for row, (_, token, slot) in enumerate(rows):
        dx[token] += dy[row]
        dprobs[token, slot] = dscales[row]
    assert_same_bits({"dx": x.grad, "dprobs": probs.grad}, {"dx": dx.detach(), "dprobs": dprobs.detach()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_sums_every_value_and_hands_back_every_gradient(dtype: torch.dtype, case: Case, device: str) -> None:
    indices = torch.tensor(case.indices, device=device)
    routing_map, _, _ = make_routing_map(indices, case.num_experts)
    x = exact(indices.numel(), case.features, dtype=dtype, device=device).requires_grad_()
    y = ops.Combine()(x, routing_map=routing_map)
    dy = exact(*y.shape, dtype=dtype, device=device)
    y.backward(dy)
    expected, dx = torch.zeros_like(y), torch.zeros_like(x)
    for row, (_, token, _) in enumerate(experts_of_rows(indices)):
        expected[token] += x[row]
        dx[row] = dy[token]
    assert_same_bits({"y": y, "dx": x.grad}, {"y": expected.detach(), "dx": dx.detach()})


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case: Case) -> None:
    indices = torch.tensor(case.indices)
    sequential = Sequential(ops.Dispatch(case.num_experts), ops.Combine())

    def call(x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        y, made = sequential(x, probs=probs, indices=indices, outputs=("scales",))
        return y, made["scales"]

    x = torch.randn(indices.shape[0], case.features, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(indices.shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, probs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_gives_topk_times_x(case: Case, dtype: torch.dtype) -> None:
    indices = torch.tensor(case.indices)
    x = exact(indices.shape[0], case.features, dtype=dtype)
    pair = Sequential(ops.Dispatch(case.num_experts), ops.Combine())
    assert torch.equal(pair(x, probs=torch.ones(indices.shape), indices=indices), indices.shape[1] * x)


def test_the_sum_is_in_float32_in_the_order_of_the_slots_and_rounded_once() -> None:
    # One by one in bf16 nothing would be added to 256; and 2^24 + 1 - 2^24 depends on the order, even in float32.
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    routing_map, _, _ = make_routing_map(torch.tensor([[0, 1, 2]]), 3)
    assert combine(rows, routing_map).item() == 258
    rows = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    assert combine(rows, routing_map).item() == 0
    other, _, _ = make_routing_map(torch.tensor([[0, 2, 1]]), 3)
    assert combine(rows[[0, 1, 2]], other).item() == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_present_add_nothing(dtype: torch.dtype, device: str) -> None:
    x = exact(6, 5, dtype=dtype, device=device)
    rows = torch.tensor([[0, 5, -1], [-1, 3, 3], [-1, -1, -1], [2, -1, -1]], device=device)
    zero = torch.zeros_like(x[0])
    expected = torch.stack((x[0] + x[5], x[3] + x[3], zero, x[2]))
    for made_in in (dtype, torch.promote_types(dtype, torch.float32)):
        assert_same_bits({"y": combine_present(x, rows, made_in)}, {"y": expected.to(made_in)})
    nothing = combine_present(x[:0], rows[2:3], dtype)
    assert_same_bits({"y": nothing}, {"y": zero[None]})
    assert combine_present(x[:0], rows[:0], dtype).shape == (0, 5)


def test_permuting_the_experts_permutes_the_groups() -> None:
    indices, x = torch.randint(0, 5, (20, 2)), torch.randn(20, 3)
    probs, new_name = torch.rand(20, 2), torch.randperm(5)
    operation = ops.Dispatch(5)
    y, made = operation(x, probs=probs, indices=indices, outputs=OUTPUTS)
    z, other = operation(x, probs=probs, indices=new_name[indices], outputs=OUTPUTS)
    assert torch.equal(other["split_sizes"][new_name], made["split_sizes"])
    groups = y.split(made["split_sizes"].tolist())
    others = z.split(other["split_sizes"].tolist())
    for expert, group in enumerate(groups):
        assert torch.equal(others[new_name[expert]], group)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16], ids=str)
def test_indices_may_be_any_integers(dtype: torch.dtype) -> None:
    indices, x = torch.tensor([[1, 0], [2, 1]]), torch.randn(2, 3)
    operation, probs = ops.Dispatch(3), torch.rand(2, 2)
    y, made = operation(x, probs=probs, indices=indices.to(dtype), outputs=OUTPUTS)
    z, expected = operation(x, probs=probs, indices=indices, outputs=OUTPUTS)
    assert_same_bits({"y": y, "scales": made["scales"]}, {"y": z, "scales": expected["scales"]})


def test_probabilities_keep_their_dtype_and_strides_do_not_matter() -> None:
    indices = torch.tensor([[1, 2], [0, 1]]).t()
    probs, x = torch.rand(2, 2, dtype=torch.bfloat16).t(), torch.randn(3, 2).t()
    _, made = ops.Dispatch(3)(x, probs=probs, indices=indices, outputs=OUTPUTS)
    assert made["scales"].dtype == torch.bfloat16
    assert made["scales"].tolist() == [probs[0, 1], probs[0, 0], probs[1, 1], probs[1, 0]]


@pytest.mark.parametrize("frozen", [("x",), ("probs",), ("x", "probs")], ids=str)
@pytest.mark.parametrize("heads", [("y",), ("scales",), ("y", "scales")], ids=str)
def test_any_heads_and_any_frozen_tensors(heads: tuple[str, ...], frozen: tuple[str, ...]) -> None:
    indices = torch.tensor([[1, 0], [2, 1]])
    given = {"x": torch.randn(2, 3), "probs": torch.rand(2, 2)}
    given = {name: tensor.requires_grad_(name not in frozen) for name, tensor in given.items()}
    y, made = ops.Dispatch(3)(**given, indices=indices, outputs=OUTPUTS)
    total = sum({"y": y, **made}[name].sum() for name in heads)
    expected = {
        "x": torch.full((2, 3), 2.0) if "x" not in frozen and "y" in heads else None,
        "probs": torch.ones(2, 2) if "probs" not in frozen and "scales" in heads else None,
    }
    if total.requires_grad:
        total.backward()
    # A gradient of zeros is as good as none.
    found = {name: None if t.grad is None or not t.grad.any() else t.grad for name, t in given.items()}
    assert_close(found, expected)


def test_no_tokens() -> None:
    x = torch.empty(0, 3, requires_grad=True)
    probs = torch.empty(0, 2, requires_grad=True)
    y, made = Sequential(ops.Dispatch(4), ops.Combine())(x, probs=probs, indices=NO_TOKENS, outputs=OUTPUTS[:2])
    assert y.shape == (0, 3) and made["scales"].shape == (0,) and made["split_sizes"].tolist() == [0] * 4
    (y.sum() + made["scales"].sum()).backward()
    assert x.grad is not None and x.grad.shape == (0, 3) and probs.grad is not None and probs.grad.shape == (0, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_repeating_gives_the_same_bits(device: str) -> None:
    indices = torch.rand(256, 16, device=device).argsort(1)[:, :4]
    x = torch.randn(256, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    probs = torch.rand(256, 4, device=device, requires_grad=True)
    pair = Sequential(ops.Dispatch(16), ops.Combine())
    results = []
    for _ in range(3):
        y, made = pair(x, probs=probs, indices=indices, outputs=("scales",))
        dx, dprobs = torch.autograd.grad((y.float().square().sum(), made["scales"].square().sum()), (x, probs))
        results.append({"y": y, "scales": made["scales"], "dx": dx, "dprobs": dprobs})
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    indices = torch.rand(64, 8, device="cuda").argsort(1)[:, :2]
    x, probs = torch.randn(64, 16, device="cuda", requires_grad=True), torch.rand(64, 2, device="cuda")
    layer = Sequential(ops.Router(16, 8, 2, device="cuda"), ops.Dispatch(8), ops.Combine())
    pair = Sequential(ops.Dispatch(8), ops.Combine())
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            layer(x).sum().backward()
            pair(x, probs=probs, indices=indices).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# The kernels

# Triton 3.6's interpreter turns arrays of one element into loop bounds, which numpy >= 2.4 will refuse.
on_kernels = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
NARROW = DTYPES[1:]
PROBS_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BLOCK = 32


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors too, which the interpreter takes; it takes seconds to sort blocks as large as those shipped."""
    monkeypatch.setattr(permute, "runs_in_triton", lambda device, dtype: True)
    monkeypatch.setattr(permute, "map_config", lambda num_experts: map_config(num_experts)._replace(block=BLOCK))


def check_map(indices: Tensor, num_experts: int) -> None:
    made, reference = make_routing_map(indices, num_experts), make_routing_map_ref(indices, num_experts)
    names = ("row_of_slot", "token_of_row", "slot_of_row", "sizes")
    found, wanted = ((*m[0].tensors(), *m[1:]) for m in (made, reference))
    assert_same_bits(dict(zip(names, found, strict=True)), dict(zip(names, wanted, strict=True)))
    for dtype in PROBS_DTYPES:
        probs = torch.randn(indices.shape[::-1], device=indices.device).to(dtype).t()  # of rows that lie apart
        routing_map, sizes, scales = route_scales(probs, indices, num_experts)
        found = (*routing_map.tensors(), scales, sizes)
        expected = (*wanted[:2], probs.flatten()[wanted[2]], wanted[3])
        assert_same_bits(dict(zip(names, found, strict=True)), dict(zip(names, expected, strict=True)))


def check_returned_scales(rows: Tensor, routing_map: RoutingMap) -> None:
    slots = routing_map.row_of_slot
    for dtype in PROBS_DTYPES:
        scales = torch.randn(2 * slots.numel(), device=rows.device).to(dtype)[::2]
        y, probs = combine_and_return_scales(rows, scales, routing_map)
        assert_same_bits({"y": y, "probs": probs}, {"y": combine(rows, routing_map), "probs": scales[slots]})


@pytest.mark.launches("count_kernel", "place_kernel", "dispatch_kernel", "combine_kernel")
@on_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", NARROW)
def test_kernels_move_rows_as_the_references_do(dtype: torch.dtype, case: Case, device: str) -> None:
    indices = torch.tensor(case.indices, device=device)
    routing_map, _, _ = make_routing_map(indices, case.num_experts)
    x = torch.randn(len(indices), case.features, device=device).to(dtype)
    rows = torch.randn(indices.numel(), case.features, device=device).to(dtype)
    x[0, 0] = rows[-1, -1] = float("nan")
    assert_same_bits(
        {"dispatch": dispatch(x, routing_map), "combine": combine(rows, routing_map)},
        {"dispatch": dispatch_ref(x, indices), "combine": combine_ref(rows, indices)},
    )
    check_returned_scales(rows, routing_map)


@on_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("features", [0, 5, 1032])
@pytest.mark.parametrize("dtype", NARROW)
def test_the_kernel_sums_the_rows_that_are_present(dtype: torch.dtype, features: int, device: str) -> None:
    """Narrow rows to float32 sums, and float32 sums to narrow rows: what partial sums over ranks need."""
    rows = torch.tensor([[0, 5, -1, 2], [-1, 3, 3, 4], [-1, -1, -1, -1], [2, -1, -1, -1]], device=device)
    x = torch.randn(6, features, device=device).to(dtype)
    wide = torch.randn(6, features, device=device)
    cases = {"to itself": (x, dtype), "to float32": (x, torch.float32), "from float32": (wide, dtype)}
    found = {name: combine_present(source, rows, made_in).cpu() for name, (source, made_in) in cases.items()}
    expected = {}
    for name, (source, made_in) in cases.items():
        y = torch.zeros(len(rows), features)
        for k in range(rows.shape[1]):
            y += torch.where(rows[:, k, None] >= 0, source[rows[:, k]].float(), 0).cpu()
        expected[name] = y.to(made_in)
    assert_same_bits(found, expected)


@on_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("features", [0, 1, 8, 24, 513, 1024, 1032, 2880])
@pytest.mark.parametrize("dtype", NARROW)
def test_kernels_move_rows_of_any_width(dtype: torch.dtype, features: int, device: str) -> None:
    indices = torch.rand(5, 7, device=device).argsort(1)[:, :3]
    routing_map, _, _ = make_routing_map(indices, 7)
    x, rows = (torch.randn(n, features, device=device).to(dtype).t().contiguous().t() for n in (5, 15))
    assert_same_bits(
        {"dispatch": dispatch(x, routing_map), "combine": combine(rows, routing_map)},
        {"dispatch": dispatch_ref(x, indices), "combine": combine_ref(rows, indices)},
    )
    check_returned_scales(rows, routing_map)


@on_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_the_counting_sort_makes_the_map_of_a_stable_sort(case: Case, device: str) -> None:
    check_map(torch.tensor(case.indices, device=device), case.num_experts)


@pytest.mark.pairwise
@on_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("topk", [1, 3, 4])
@pytest.mark.parametrize("num_pairs", [12, BLOCK - 8, BLOCK + 4, 3 * BLOCK, 3 * BLOCK + 12])
@pytest.mark.parametrize("num_experts", [1, 31, 32, 100])
def test_the_counting_sort_is_stable_over_blocks(num_experts: int, num_pairs: int, topk: int, device: str) -> None:
    # One expert is much liked, others by nobody; some choices are no expert at all.
    indices = (torch.randn(num_pairs // topk, topk, device=device) * num_experts / 4).long()
    check_map(indices, num_experts)


@pytest.mark.slow
@on_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_the_counting_sort_takes_any_integers_and_strides(dtype: torch.dtype, device: str) -> None:
    check_map(torch.randint(-2, 9, (4, 50), device=device).to(dtype).t(), 7)


@on_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_kernels_take_no_tokens(device: str) -> None:
    indices = NO_TOKENS.to(device)
    check_map(indices, 4)
    routing_map, _, _ = make_routing_map(indices, 4)
    x = torch.empty(0, 8, device=device)
    assert dispatch(x, routing_map).shape == combine(x, routing_map).shape == (0, 8)
    check_returned_scales(x, routing_map)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_program_has_16_bytes_a_thread(itemsize: int) -> None:
    for H in range(1, 9000, 7):
        config = move_config(H, itemsize)
        assert config.block_h == 16 or config.block_h // 2 < H
        assert config.num_warps == 1 or config.block_h * itemsize == 16 * 32 * config.num_warps
        assert config.num_warps <= 4


@pytest.mark.parametrize(
    ("device", "dtype", "experts", "in_triton"),
    [
        ("cuda", torch.bfloat16, 8, (True, True, True)),
        ("cuda", torch.float32, 600, (False, True, True)),
        ("cuda", torch.float64, 8, (False, False, False)),
        ("cpu", torch.bfloat16, 8, (False, False, False)),
    ],
)
def test_explain_says_where_kernels_run(
    device: str, dtype: torch.dtype, experts: int, in_triton: tuple[bool, ...]
) -> None:
    layer = Sequential(ops.Router(16, experts, 2), ops.Dispatch(experts), ops.Combine())
    lines = layer.explain(device=device, dtype=dtype).splitlines()
    shown = [line for line in lines if "[" in line and any(name in line for name in ("Router", "Dispatch", "Combine"))]
    assert tuple("(Triton)" in line for line in shown) == in_triton


@pytest.mark.gpu
@pytest.mark.parametrize("skewed", [False, True])
def test_kernels_agree_with_torch_for_many_tokens(skewed: bool) -> None:
    scores = torch.rand(8192, 128, device="cuda")
    if skewed:
        scores *= torch.arange(1, 129, device="cuda") ** -0.5
    indices = scores.argsort(1, descending=True)[:, :8]
    check_map(indices, 128)
    routing_map, _, _ = make_routing_map(indices, 128)
    on_host = RoutingMap(*(t.cpu() for t in routing_map.tensors()))
    x, rows = (torch.randn(n, 2880, device="cuda").bfloat16() for n in (8192, 65536))
    assert_same_bits(
        {"dispatch": dispatch(x, routing_map).cpu(), "combine": combine(rows, routing_map).cpu()},
        {"dispatch": dispatch(x.cpu(), on_host), "combine": combine(rows.cpu(), on_host)},
    )
    check_returned_scales(rows, routing_map)


@pytest.mark.gpu
def test_rows_beyond_two_billion_elements_are_moved() -> None:
    indices = torch.rand(40_000, 8, device="cuda").argsort(1)
    routing_map, _, _ = make_routing_map(indices, 8)
    x = torch.randint(-8, 9, (40_000, 7168), device="cuda").bfloat16()
    rows = dispatch(x, routing_map)
    assert rows.numel() > 2**31
    assert torch.equal(rows[-1], x[routing_map.token_of_row[-1]])
    assert torch.equal(combine(rows, routing_map), 8 * x)


@pytest.mark.gpu
def test_a_captured_graph_follows_other_choices() -> None:
    indices, x = torch.zeros(512, 4, dtype=torch.int64, device="cuda"), torch.randn(512, 96, device="cuda")

    def step() -> dict[str, Tensor]:
        routing_map, slot_of_row, sizes = make_routing_map(indices, 16)
        rows = dispatch(x, routing_map)
        return {"slots": slot_of_row, "sizes": sizes, "rows": rows, "y": combine(rows, routing_map)}

    with no_host_sync():
        step()
    graph, replayed = capture(step)
    for _ in range(3):
        indices.copy_(torch.rand(512, 16, device="cuda").argsort(1)[:, :4])
        x.normal_()
        graph.replay()
        assert_same_bits(replayed, step())


# A whole layer


def moe_layer(hidden: int, experts: int, topk: int, features: int, **where: Any) -> Sequential:
    return Sequential(
        ops.MakeExtraOutput("residual"),
        ops.RMSNorm(hidden, **where),
        ops.Router(hidden, experts, topk, **where),
        ops.Dispatch(experts),
        ops.GroupedLinear(experts, hidden, 2 * features, bias=False, **where),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(experts, features, hidden, bias=False, **where),
        ops.Combine(),
        ops.AddExtraInput("residual"),
    )


def moe_layer_by_hand(layer: Sequential, x: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The layer and its load-balancing loss, expert by expert."""
    norm, router, fc1, fc2 = (layer[index].weight for index in (1, 2, 4, 6))
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm
    scores = (normed @ router.t()).softmax(-1)
    values, indices = scores.topk(topk)
    y = x
    for expert in range(len(router)):
        a, b = (normed @ fc1[expert].t()).chunk(2, -1)
        weight = (values * (indices == expert)).sum(-1, keepdim=True)
        y = y + torch.nn.functional.silu(a) * b * weight @ fc2[expert].t()
    share = torch.stack([(indices == e).to(x.dtype).mean() for e in range(len(router))])
    return y, len(router) * (share * scores.mean(0)).sum()


def test_a_whole_layer_agrees_with_one_written_by_hand() -> None:
    layer = moe_layer(6, 5, 2, 4, dtype=torch.float64)
    x = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    tensors = {"x": x, **dict(layer.named_parameters())}
    y, made = layer(x, outputs=("load_balancing_loss",))
    z, loss = moe_layer_by_hand(layer, x, 2)
    weight = torch.randn_like(y)
    ours = torch.autograd.grad((y * weight).sum() + made["load_balancing_loss"], tuple(tensors.values()))
    theirs = torch.autograd.grad((z * weight).sum() + loss, tuple(tensors.values()))
    assert_close({"y": y, "loss": made["load_balancing_loss"]}, {"y": z, "loss": loss})
    assert_close(dict(zip(tensors, ours, strict=True)), dict(zip(tensors, theirs, strict=True)))


def test_gradcheck_of_a_whole_layer() -> None:
    layer = moe_layer(3, 4, 2, 2, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        y, made = layer(x, outputs=("load_balancing_loss",))
        return y, made["load_balancing_loss"]

    assert torch.autograd.gradcheck(call, (x, *layer.parameters()))


# What is refused


@pytest.mark.parametrize("num_experts", [0, -1])
def test_a_number_of_experts_that_is_not_positive_is_refused(num_experts: int) -> None:
    with pytest.raises(ValueError, match=f"Dispatch got num_experts={num_experts}. It must be positive"):
        ops.Dispatch(num_experts)


@pytest.mark.parametrize(
    ("x", "probs", "indices"),
    [((4, 3), (4, 2), (5, 2)), ((4, 3), (4, 1), (4, 2)), ((2, 2, 3), (4, 2), (4, 2)), ((4, 3), (4,), (4,))],
    ids=["other tokens", "other slots", "x of three dimensions", "no slots dimension"],
)
def test_shapes_that_do_not_fit_are_refused(x: Any, probs: Any, indices: Any) -> None:
    message = (
        r"In operation 0 \(Dispatch\): x has shape .*, probs .*, indices .*, but \[tokens, features\], .* are needed"
    )
    with pytest.raises(ValueError, match=message):
        ops.Dispatch(3)(torch.ones(x), probs=torch.ones(probs), indices=torch.zeros(indices, dtype=torch.int64))


def test_indices_without_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="indices has no slots. Choose at least one expert"):
        ops.Dispatch(3)(torch.ones(4, 2), probs=torch.ones(4, 0), indices=torch.zeros(4, 0, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e5m2], ids=str)
def test_probs_in_which_nothing_is_computed_are_refused(dtype: torch.dtype) -> None:
    indices = torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=rf"probs is {dtype}, but must be bfloat16, .*Give probs.float\(\)"):
        ops.Dispatch(3)(torch.ones(4, 2), probs=torch.ones(4, 2).to(dtype), indices=indices)


def test_indices_that_are_no_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="indices is torch.float32, but must be integers with a sign, or bytes"):
        ops.Dispatch(3)(torch.ones(4, 2), probs=torch.ones(4, 2), indices=torch.zeros(4, 2))


@pytest.mark.parametrize("wrong", [-1, 3])
def test_indices_out_of_range_are_refused_on_the_host(wrong: int) -> None:
    indices = torch.tensor([[0, 1], [2, wrong]])
    message = f"indices reach from {min(0, wrong)} to {max(2, wrong)}, but num_experts is 3"
    with pytest.raises(ValueError, match=message):
        ops.Dispatch(3)(torch.ones(2, 2), probs=torch.ones(2, 2), indices=indices)


def test_a_map_of_other_rows_is_refused() -> None:
    routing_map, _, _ = make_routing_map(torch.tensor([[1, 0], [2, 1]]), 3)
    with pytest.raises(ValueError, match=r"In operation 0 \(Combine\): x has 5 rows, but routing_map was made for 4"):
        ops.Combine()(torch.ones(5, 2), routing_map=routing_map)
    with pytest.raises(
        TypeError, match=r"In operation 0 \(Combine\): routing_map is a Tensor, but must be the extra output"
    ):
        ops.Combine()(torch.ones(4, 2), routing_map=torch.ones(2, 3))


def test_settings_are_shown() -> None:
    assert repr(ops.Dispatch(8)) == "Dispatch(num_experts=8)"
    assert repr(ops.Combine()) == "Combine()"


# --------------------------------------------------------------------------------------------------------- empty slots


def experts_with_empty_slots(device: str) -> Sequential:
    return Sequential(
        ops.Dispatch(3, empty_slots=True),
        ops.GroupedLinear(3, 4, 12, device=device),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(3, 6, 4, device=device, scale_bias=True),
        ops.Combine(),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", ["grouped", "split"])
def test_a_slot_without_an_expert_adds_nothing_and_gets_no_gradient(device, path):
    layer = experts_with_empty_slots(device)
    layer.path = path
    x = torch.randn(4, 4, device=device, requires_grad=True)
    probs = torch.rand(4, 2, device=device)
    probs[1, 0] = torch.nan
    probs.requires_grad_()
    indices = torch.tensor([[0, 2], [3, 1], [3, 3], [1, 0]], device=device)
    y = layer(x, indices=indices, probs=probs)
    y.square().sum().backward()
    first = {"y": y.detach(), "x": x.grad, "probs": probs.grad}
    assert not y[2].any() and not x.grad[2].any() and not probs.grad[indices == 3].any()
    with torch.no_grad():
        alone = layer(x[[1]], indices=indices[[1]].flip(1), probs=probs[[1]].flip(1))
    assert_close({"y": y[[1]]}, {"y": alone})
    x.grad = probs.grad = None
    layer(x, indices=indices.to(torch.int32), probs=probs).square().sum().backward()
    assert_same_bits({"y": first["y"], "x": x.grad, "probs": probs.grad}, first)


def test_what_is_neither_an_expert_nor_nobody_is_refused():
    x, probs = torch.randn(1, 4), torch.rand(1, 2)
    layer = experts_with_empty_slots("cpu")
    for index in (-1, 4):
        with pytest.raises(ValueError, match="but num_experts is 3"):
            layer(x, indices=torch.tensor([[0, index]]), probs=probs)


def test_empty_slots_are_shown_and_refused_with_a_group():
    assert "empty_slots=True" in repr(ops.Dispatch(3, empty_slots=True)) and "empty" not in repr(ops.Dispatch(3))
    with pytest.raises(NotImplementedError, match="empty_slots=True with a group.*Leave out one"):
        ops.Dispatch(3, group=object(), empty_slots=True)
    with pytest.raises(TypeError, match="empty_slots"):
        ops.Dispatch(3, empty_slots="yes")
