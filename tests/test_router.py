"""Router: probabilities, choices and the load-balancing loss against torch's autograd in float64."""
# T tokens, H hidden size, E experts

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fuser import Sequential, autocast, ops
from ops.kernels.routing import routing
from ops.kernels.routing.routing import droute, route, route_ref
from tests.check_operation import DEVICES, DTYPES
from tests.grouped_cases import DEVICES as KERNEL_DEVICES
from tests.reference import ROUNDED_ONCE, assert_close, assert_same_bits

OUTPUTS = ("probs", "indices", "load_balancing_loss")
MODES = [
    pytest.param({}, id="softmax before"),
    pytest.param({"normalize_probs": True}, id="softmax before, normalized"),
    pytest.param({"use_pre_softmax": False}, id="softmax after"),
    pytest.param({"use_pre_softmax": False, "normalize_probs": True}, id="softmax after, normalized"),
]
HEADS = [("y",), ("probs",), ("load_balancing_loss",), ("y", "probs"), ("y", "probs", "load_balancing_loss")]
# The gradient of a softmax is a difference.
TOLERANCES = {**ROUNDED_ONCE, torch.float32: 2e-5, torch.int64: 0}


class Shape(NamedTuple):
    tokens: int
    hidden: int
    experts: int
    topk: int


SHAPES = [
    # ordinary
    pytest.param(Shape(24, 16, 8, 2), id="ordinary"),
    # odd sizes
    pytest.param(Shape(13, 5, 7, 3), id="odd sizes"),
    # extremes
    pytest.param(Shape(9, 8, 6, 1), id="top 1"),
    pytest.param(Shape(9, 8, 5, 5), id="every expert"),
    pytest.param(Shape(9, 8, 1, 1), id="one expert"),
    pytest.param(Shape(1, 1, 4, 2), id="one token, one feature"),
    pytest.param(Shape(0, 8, 4, 2), id="no tokens"),
]


def formula(x: Tensor, weight: Tensor, topk: int, use_pre_softmax: bool = True, normalize_probs: bool = False) -> Any:
    logits = x @ weight.T
    scores = logits.softmax(-1)
    values, indices = logits.topk(topk)  # no ties in random numbers
    probs = scores.gather(1, indices) if use_pre_softmax else values.softmax(-1)
    if normalize_probs:
        probs = probs / probs.sum(-1, keepdim=True)
    experts = weight.shape[0]
    share = torch.stack([(indices == e).double().mean() if len(x) else torch.zeros(()) for e in range(experts)]).to(x)
    mean = scores.mean(0) if len(x) else scores.sum(0)
    return x, {"probs": probs, "indices": indices, "load_balancing_loss": experts * (share * mean).sum()}


def make(shape: Shape, mode: dict[str, bool], dtype: torch.dtype = torch.float32, device: str = "cpu") -> ops.Router:
    return ops.Router(shape.hidden, shape.experts, shape.topk, dtype=dtype, device=device, **mode)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode: dict[str, bool], shape: Shape) -> None:
    operation = make(shape, mode, torch.float64)
    sequential = Sequential(operation)
    x = torch.randn(shape.tokens, shape.hidden, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        y, made = sequential(x, outputs=OUTPUTS)
        return y, made["probs"], made["load_balancing_loss"]

    assert torch.autograd.gradcheck(call, (x, operation.weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_agree_with_float64(
    dtype: torch.dtype, mode: dict[str, bool], shape: Shape, device: str
) -> None:
    operation = make(shape, mode, dtype, device)
    x = torch.randn(shape.tokens, shape.hidden, dtype=dtype, device=device, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (x, operation.weight)]
    y, made = operation(x, outputs=OUTPUTS)
    z, expected = formula(*exact, shape.topk, **mode)
    assert y.dtype == dtype
    assert made["probs"].dtype == made["load_balancing_loss"].dtype == torch.promote_types(dtype, torch.float32)
    assert made["indices"].dtype == torch.int64 and not made["indices"].requires_grad
    assert torch.equal(made["indices"], expected["indices"])
    weights = [torch.randn_like(z), torch.randn_like(expected["probs"]), torch.tensor(3.0, device=device).double()]
    heads = [y, made["probs"], made["load_balancing_loss"]]
    torch.autograd.backward(heads, [w.to(head.dtype) for w, head in zip(weights, heads, strict=True)])
    torch.autograd.backward(
        [z, expected["probs"], expected["load_balancing_loss"]],
        [weights[0].to(dtype).double(), weights[1].to(heads[1].dtype).double(), weights[2]],
    )
    assert_close(
        {"y": y, **made, "dx": x.grad, "dweight": operation.weight.grad},
        {"y": z, **expected, "dx": exact[0].grad, "dweight": exact[1].grad},
        TOLERANCES,
    )


@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("x", "weight")], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mode", MODES[:3])
def test_any_heads_and_any_frozen_tensors(
    mode: dict[str, bool], heads: tuple[str, ...], frozen: tuple[str, ...]
) -> None:
    operation = make(Shape(13, 5, 7, 3), mode, torch.float64)
    operation.weight.requires_grad_("weight" not in frozen)
    x = torch.randn(13, 5, dtype=torch.float64).requires_grad_("x" not in frozen)
    exact = [t.detach().clone().requires_grad_(t.requires_grad) for t in (x, operation.weight)]
    results = []
    for y, made in (operation(x, outputs=OUTPUTS), formula(*exact, 3, **mode)):
        total = sum(head.square().sum() for head in ({"y": y, **made}[name] for name in heads))
        if total.requires_grad:
            total.backward()
        results.append(total)
    assert_close(
        {"heads": results[0], "dx": x.grad, "dweight": operation.weight.grad},
        {"heads": results[1], "dx": exact[0].grad, "dweight": exact[1].grad},
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_of_equal_logits_the_lower_expert_is_taken(mode: dict[str, bool], device: str) -> None:
    operation = ops.Router(4, 300, 3, device=device, **mode)
    nn.init.zeros_(operation.weight)
    _, made = operation(torch.randn(50, 4, device=device), outputs=OUTPUTS)
    assert made["indices"].tolist() == [[0, 1, 2]] * 50
    with torch.no_grad():
        operation.weight[[7, 200, 299]] = 1
    _, made = operation(torch.ones(50, 4, device=device), outputs=OUTPUTS)
    assert made["indices"].tolist() == [[7, 200, 299]] * 50


def test_experts_whose_probabilities_underflow_are_still_ordered_by_their_logits() -> None:
    logits = torch.tensor([[-900.0, 0.0, -700.0, -800.0]])
    assert route(logits, 3, normalized=False).indices.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("mode", MODES)
def test_y_is_x_and_probabilities_are_sorted(mode: dict[str, bool]) -> None:
    x = torch.randn(20, 16)
    operation = make(Shape(20, 16, 8, 4), mode)
    y, made = operation(x, outputs=OUTPUTS)
    assert torch.equal(y, x)
    probs = made["probs"]
    assert (probs[:, :-1] >= probs[:, 1:]).all() and (probs >= 0).all()
    if operation.normalized:
        torch.testing.assert_close(probs.sum(-1), torch.ones(20))
    else:
        assert (probs.sum(-1) < 1).all()


def test_softmax_after_the_choice_is_the_normalized_softmax_before_it() -> None:
    before = ops.Router(16, 8, 3, normalize_probs=True)
    after = ops.Router(16, 8, 3, use_pre_softmax=False)
    after.load_state_dict(before.state_dict())
    x = torch.randn(20, 16)
    assert_same_bits(after(x, outputs=OUTPUTS)[1], before(x, outputs=OUTPUTS)[1])


def test_permuting_tokens_permutes_the_results() -> None:
    operation = ops.Router(16, 8, 2, dtype=torch.float64)
    x, order = torch.randn(20, 16, dtype=torch.float64), torch.randperm(20)
    made, permuted = operation(x, outputs=OUTPUTS)[1], operation(x[order], outputs=OUTPUTS)[1]
    assert torch.equal(permuted["indices"], made["indices"][order])
    torch.testing.assert_close(permuted["probs"], made["probs"][order])
    torch.testing.assert_close(permuted["load_balancing_loss"], made["load_balancing_loss"])


def test_even_routing_has_a_loss_of_one_and_one_expert_for_all_the_highest() -> None:
    even = torch.eye(4).repeat(3, 1) * 50
    torch.testing.assert_close(route(even, 1, normalized=False).loss, torch.tensor(1.0))
    torch.testing.assert_close(route(even[:1].expand(12, 4), 1, normalized=False).loss, torch.tensor(4.0))


def test_without_tokens_the_loss_and_the_gradient_are_zero() -> None:
    operation = ops.Router(16, 8, 2)
    _, made = operation(torch.empty(0, 16), outputs=OUTPUTS)
    made["load_balancing_loss"].backward()
    assert made["load_balancing_loss"].item() == 0
    assert torch.equal(operation.weight.grad, torch.zeros(8, 16))


@given(
    tokens=st.integers(0, 6), experts=st.integers(1, 6), ties=st.booleans(), normalized=st.booleans(), data=st.data()
)
def test_route_agrees_with_its_reference(
    tokens: int, experts: int, ties: bool, normalized: bool, data: st.DataObject
) -> None:
    topk = data.draw(st.integers(1, experts))
    logits = torch.randn(tokens, experts, dtype=torch.float64)
    logits = (logits.round() if ties else logits).requires_grad_()
    probs, indices, loss = route_ref(logits, topk, normalized=normalized)
    dprobs, dloss = torch.randn_like(probs), torch.randn_like(loss)
    wanted = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    heads = [head for head, flag in zip((probs, loss), wanted, strict=True) if flag]
    given = [d if flag else None for d, flag in zip((dprobs, dloss), wanted, strict=True)]
    (expected,) = torch.autograd.grad(heads, logits, [d for d in given if d is not None])
    with torch.no_grad():
        found = route(logits, topk, normalized=normalized)
        dlogits = droute(*given, found.probs, found.indices, found.scores, found.fractions, normalized=normalized)
    assert torch.equal(found.indices, indices)
    torch.testing.assert_close((found.probs, found.loss, dlogits), (probs, loss, expected), rtol=1e-10, atol=1e-12)


def test_no_gradient_asks_for_none() -> None:
    routing = route(torch.randn(3, 4), 2, normalized=True)
    arguments = (routing.probs, routing.indices, routing.scores, routing.fractions)
    assert droute(None, None, *arguments, normalized=True) is None


# Triton 3.6's interpreter turns arrays of one element into loop bounds, which numpy >= 2.4 will refuse.
on_kernels = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors too, which the interpreter takes."""
    monkeypatch.setattr(routing, "runs_in_triton", lambda device, dtype: True)


@pytest.mark.launches("route_kernel", "balance_kernel", "droute_kernel")
@on_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=["both", "probs", "loss"])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "topk"),
    [(70, 8, 2), (13, 7, 3), (9, 6, 1), (9, 5, 5), (9, 1, 1), (1, 128, 8), (33, 100, 6), (17, 512, 10), (0, 4, 2)],
)
def test_kernels_agree_with_the_reference(
    tokens: int, experts: int, topk: int, normalized: bool, wanted: tuple[bool, bool], device: str
) -> None:
    logits = (3 * torch.randn(tokens, experts, device=device)).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    probs, indices, loss = route_ref(exact, topk, normalized=normalized)
    dprobs, dloss = torch.randn_like(probs), torch.randn_like(loss)
    heads = [head for head, flag in zip((probs, loss), wanted, strict=True) if flag]
    given = [d if flag else None for d, flag in zip((dprobs, dloss), wanted, strict=True)]
    (expected,) = torch.autograd.grad(heads, exact, [d for d in given if d is not None])
    with torch.no_grad():
        found = route(logits, topk, normalized=normalized)
        narrow = [None if d is None else d.float() for d in given]
        dlogits = droute(*narrow, found.probs, found.indices, found.scores, found.fractions, normalized=normalized)
    counts = F.one_hot(indices, experts).sum((0, 1))
    fractions = counts.double() / max(tokens * topk, 1)
    assert_close(
        {**found._asdict(), "dlogits": dlogits},
        {"probs": probs, "indices": indices, "loss": loss, "scores": exact.softmax(-1), "fractions": fractions}
        | {"counts": counts, "dlogits": expected},
        TOLERANCES,
        floor=1e-3,  # of one normalized probability there is no gradient
    )


@on_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("normalized", [False, True])
def test_kernels_order_any_logits_as_torch_does(normalized: bool, device: str) -> None:
    values = [0.0, -0.0, 1.0, 1.0, -1.0, -1.0, float("-inf"), 1e-45, -1e-45, 3e38, -3e38, -900.0]
    logits = torch.tensor(values, device=device)[torch.rand(40, len(values), device=device).argsort(1)]
    _, order = logits.sort(dim=1, descending=True, stable=True)
    with np.errstate(over="ignore", invalid="ignore"):  # numpy, the interpreter, warns of them
        made = route(logits, len(values), normalized=normalized)
        assert torch.equal(made.indices, order)
        assert torch.equal(made.scores.gather(1, order), made.probs) or normalized
        logits[:, 3], logits[:, 5] = float("nan"), float("inf")
        made = route(logits, 3, normalized=normalized)
    assert torch.equal(made.indices, logits.sort(dim=1, descending=True, stable=True).indices[:, :3])
    assert made.probs.isnan().all() and made.scores.isnan().all()


@on_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("normalized", [False, True])
def test_a_token_is_routed_alike_whatever_the_others_are(normalized: bool, device: str) -> None:
    logits = torch.randn(150, 64, device=device)
    whole, part = (route(x, 4, normalized=normalized) for x in (logits, logits[67:70]))
    for name in ("probs", "indices", "scores"):
        assert torch.equal(getattr(whole, name)[67:70], getattr(part, name)), name


@pytest.mark.gpu
def test_more_experts_than_a_program_has_are_routed_by_torch() -> None:
    logits = torch.randn(20, routing.MOST_EXPERTS + 1, device="cuda")
    made, expected = route(logits, 3, normalized=True), route_ref(logits, 3, normalized=True)
    assert_close(
        {"probs": made.probs, "indices": made.indices, "loss": made.loss},
        dict(zip(("probs", "indices", "loss"), expected, strict=True)),
        TOLERANCES,
    )


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_a_recipe_changes_nothing(recipe: str) -> None:
    operation, x = ops.Router(32, 8, 2), torch.randn(64, 32)
    plain = operation(x, outputs=OUTPUTS)[1]
    with autocast(recipe=recipe):
        assert_same_bits(operation(x, outputs=OUTPUTS)[1], plain)


def test_logits_are_float32_under_torch_autocast() -> None:
    operation, x = ops.Router(64, 8, 2).bfloat16().float(), torch.randn(32, 64).bfloat16().float()
    plain = operation(x, outputs=OUTPUTS)[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(operation(x, outputs=OUTPUTS)[1], plain)


@pytest.mark.gpu
def test_tf32_is_not_used_and_its_setting_stays() -> None:
    operation, x = ops.Router(256, 8, 2, device="cuda"), torch.randn(64, 256, device="cuda")
    plain = operation(x, outputs=OUTPUTS)[1]
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        assert_same_bits(operation(x, outputs=OUTPUTS)[1], plain)
        assert setting.fp32_precision == "tf32"
    finally:
        setting.fp32_precision = before


@pytest.mark.parametrize("device", DEVICES)
def test_repeating_gives_the_same_bits(device: str) -> None:
    operation = ops.Router(64, 16, 4, device=device)
    x = torch.randn(512, 64, device=device, requires_grad=True)
    results = []
    for _ in range(3):
        operation.zero_grad()
        x.grad = None
        _, made = operation(x, outputs=OUTPUTS)
        (made["probs"].square().sum() + made["load_balancing_loss"]).backward()
        results.append({**made, "dx": x.grad, "dweight": operation.weight.grad})
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_the_weight_starts_as_that_of_a_linear_layer() -> None:
    operation = ops.Router(64, 400, 2, device="meta")
    assert operation.weight.is_meta
    operation = operation.to_empty(device="cpu")
    operation.reset_parameters()
    assert operation.weight.shape == nn.Linear(64, 400).weight.shape
    assert 0.99 * 64**-0.5 < operation.weight.abs().max() <= 64**-0.5


def test_settings_are_shown() -> None:
    assert repr(ops.Router(64, 8, 2)) == (
        "Router(hidden_size=64, num_experts=8, topk=2, use_pre_softmax=True, normalize_probs=False)"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 2), "Router got hidden_size=0, num_experts=8. Both must be positive"),
        ((64, 0, 2), "Router got hidden_size=64, num_experts=0. Both must be positive"),
        ((64, 8, 0), "topk is 0, but must be between 1 and num_experts=8"),
        ((64, 8, 9), "topk is 9, but must be between 1 and num_experts=8"),
    ],
)
def test_bad_sizes_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.Router(*arguments)


@pytest.mark.parametrize("shape", [(4, 63), (64,), (2, 4, 64), ()], ids=str)
def test_an_x_of_another_shape_is_refused_and_what_to_do_is_said(shape: tuple[int, ...]) -> None:
    reshape = r"give x.reshape\(-1, 64\), or put ops.Reshape\(\(-1, 64\)\) in front"
    mend = reshape if 64 in shape else "Check the operation before"
    with pytest.raises(ValueError, match=rf"\(Router\): x has shape \[.*\], but \[tokens, 64\] is needed.* {mend}"):
        ops.Router(64, 8, 2)(torch.ones(shape))
    if 64 in shape:
        assert Sequential(ops.Reshape((-1, 64)), ops.Router(64, 8, 2))(torch.ones(shape)).shape[1] == 64


@pytest.mark.parametrize(
    "name, shape, needed",
    [("weight", (3, 8), [4, 8]), ("weight", (5, 8), [4, 8]), ("bias", (1,), [4]), ("expert_bias", (1,), [4])],
)
def test_parameters_for_another_number_of_experts_are_refused(name: str, shape: Any, needed: list[int]) -> None:
    router = ops.Router(8, 4, topk=2, bias=True, score_function="sigmoid", expert_bias=True)
    router(torch.rand(6, 8))
    kind = nn.Buffer if name == "expert_bias" else nn.Parameter
    setattr(router, name, kind(torch.zeros(shape)))
    with pytest.raises(ValueError, match=rf"{name} has shape .*, but {re.escape(str(needed))} is needed"):
        router(torch.rand(6, 8))
