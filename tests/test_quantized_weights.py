"""Quantized copies of weights serve from a forward to its own backward, and no longer."""

import copy
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from fuser import Sequential, autocast, ops
from recipes import E4M3, CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling, Role
from recipes.mxfp8 import MXFP8Quantizer
from recipes.nvfp4 import NVFP4Quantizer
from tests.check_operation import DEVICES

casts: list[tuple[str, bool, bool]] = []


@dataclass(frozen=True)
class Counting(MXFP8Quantizer):
    """Notes every cast of a weight."""

    def quantize(self, x, *, rowwise=True, columnwise=False):
        casts.append(("single", rowwise, columnwise))
        return super().quantize(x, rowwise=rowwise, columnwise=columnwise)

    def quantize_stacked(self, w_GNK, *, rowwise=True, columnwise=False):
        casts.append(("stacked", rowwise, columnwise))
        return super().quantize_stacked(w_GNK, rowwise=rowwise, columnwise=columnwise)


RECIPE = CustomRecipe(lambda role: Counting(E4M3) if role is Role.WEIGHT else MXFP8Quantizer(E4M3))


@pytest.fixture(autouse=True)
def none_yet():
    casts.clear()


def step(op, x, **extras):
    with autocast(RECIPE):
        y = op(x, **extras)
    if y.requires_grad:
        y.sum().backward()
    return y.detach()


def test_a_forward_and_its_backward_cast_a_weight_once():
    op = ops.GroupedLinear(2, 32, 32)
    for _ in range(3):
        step(op, torch.randn(8, 32, requires_grad=True), split_sizes=[3, 5])
    assert casts == [("stacked", True, True)] * 3


def test_the_fused_mlp_casts_each_weight_once():
    mlp = Sequential(ops.GroupedLinear(2, 32, 64), ops.SwiGLU(), ops.GroupedLinear(2, 32, 32))
    step(mlp, torch.randn(8, 32, requires_grad=True), split_sizes=[3, 5])
    assert casts == [("stacked", True, True)] * 2


def test_only_the_copies_that_are_read_are_made():
    op = ops.Linear(32, 32)
    with torch.no_grad():
        step(op, torch.randn(4, 32, requires_grad=True))
    step(op, torch.randn(4, 32))
    assert casts == [("single", True, False)] * 2


@pytest.mark.parametrize("exchanged_by", ["a hook before forward", "who registers them, as FSDP2 does"])
def test_of_weights_that_are_gathered_anew_each_pass_casts_its_copy_alone(exchanged_by):
    op, x = ops.GroupedLinear(2, 32, 32), torch.randn(8, 32, requires_grad=True)
    step(op, x, split_sizes=[3, 5])
    before, x.grad = x.grad, None
    casts.clear()
    if exchanged_by.endswith("FSDP2 does"):
        op.exchanges_parameters = True
    else:
        op.register_forward_pre_hook(lambda op, arguments: None)
    step(op, x, split_sizes=[3, 5])
    assert casts == [("stacked", True, False), ("stacked", False, True)]
    assert torch.equal(x.grad, before)


def saved_tensors(op, x, **extras):
    """What a forward under the recipe saves."""
    saved = []
    with autocast(RECIPE), saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = op(x, **extras)
    return saved, y


@pytest.mark.parametrize("path", ["grouped", "split"])
def test_what_backward_reads_travels_with_what_forward_saves(path):
    """So offloading and checkpoints see it, and it is freed as the operation's backward has run."""
    op = ops.GroupedLinear(2, 32, 64, bias=False).requires_grad_(False)
    saved, y = saved_tensors(op, torch.randn(8, 32, requires_grad=True), split_sizes=[3, 5], path=path)
    codes = [t for t in saved if t.element_size() == 1 and t.numel() >= 32 * 64]
    assert sum(t.numel() for t in codes) == 2 * 32 * 64, "the columnwise copy alone"
    alive = [weakref.ref(t) for t in codes]
    del saved, codes
    y.sum().backward()
    assert all(ref() is None for ref in alive)


SQUARE = {
    "nvfp4": (NVFP4BlockScaling(disable_stochastic_rounding=True), NVFP4Quantizer(two_d=True)),
    "mxfp8": (MXFP8BlockScaling(enable_2d_quantization=True), MXFP8Quantizer(E4M3, square=True)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SQUARE)
def test_both_copies_of_square_blocks_hold_the_same_values(kind, device):
    w = torch.randn(3, 50, 70, device=device).to(torch.bfloat16)
    w[0, 3, 40], w[1, 49, 69], w[2] = torch.nan, torch.inf, 0
    copies = SQUARE[kind][1].quantize_stacked(w, rowwise=True, columnwise=True)
    for dtype in (torch.bfloat16, torch.float32):
        rowwise, columnwise = copies.rowwise.operand(dtype), copies.columnwise.operand(dtype)
        assert torch.equal(rowwise.values.nan_to_num(1234), columnwise.values.nan_to_num(1234))
        assert rowwise.alpha is columnwise.alpha is None or torch.equal(rowwise.alpha, columnwise.alpha)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", ["grouped", "split"])
@pytest.mark.parametrize("kind", SQUARE)
def test_of_square_blocks_one_copy_serves_both_passes(kind, path, device, monkeypatch):
    recipe, quantizer = SQUARE[kind]
    model = Sequential(ops.GroupedLinear(2, 64, 48, dtype=torch.bfloat16, device=device), path=path)
    x = torch.randn(8, 64, dtype=torch.bfloat16, device=device).requires_grad_()

    def run():
        with autocast(recipe):
            y = model(x, split_sizes=[3, 5])
        return y.detach(), *torch.autograd.grad(y.sum(), [x, *model.parameters()])

    made = []
    name = "quantize" if path == "split" else "quantize_stacked"
    cast = getattr(type(quantizer), name)

    def noting(self, x, *, rowwise=True, columnwise=False):
        if getattr(self, "two_d", False) or getattr(self, "square", False):
            made.append((rowwise, columnwise))
        return cast(self, x, rowwise=rowwise, columnwise=columnwise)

    monkeypatch.setattr(type(quantizer), name, noting)
    found = run()
    groups = 2 if path == "split" else 1
    assert made == [(True, False)] * groups
    made.clear()
    monkeypatch.setattr(type(quantizer), "copies_agree", False)
    assert all(map(torch.equal, found, run()))
    assert made == [(True, True)] * groups


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("path", ["grouped", "split"])
def test_an_optimizer_step_is_seen(stacked, path):
    op = ops.GroupedLinear(2, 32, 32, stacked=stacked)
    optimizer = torch.optim.SGD(op.parameters(), lr=0.1)
    x = torch.randn(8, 32)
    for _ in range(3):
        with autocast(RECIPE):
            y = op(x, split_sizes=[3, 5], path=path)
            assert torch.equal(copy.deepcopy(op)(x, split_sizes=[3, 5], path=path), y)
        y.sum().backward()
        optimizer.step()


CHANGES = {
    "in-place": lambda op: torch.nn.init.normal_(op.weight),
    "new-parameter": lambda op: setattr(op, "weight", torch.nn.Parameter(torch.randn(32, 32))),
    "new-data": lambda op: setattr(op.weight, "data", torch.randn(32, 32)),
    "loading": lambda op: op.load_state_dict({"weight": torch.randn(32, 32), "bias": torch.randn(32)}),
    "through-data": lambda op: op.weight.data.mul_(2),
    "behind-autograd": lambda op: torch._foreach_mul_([op.weight.detach().data], 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    op, x = ops.Linear(32, 32), torch.randn(4, 32)
    step(op, x)
    CHANGES[change](op)
    y = step(op, x)
    assert len(casts) == 2
    fresh = ops.Linear(32, 32)
    fresh.load_state_dict(op.state_dict())
    assert torch.equal(step(fresh, x), y)


def test_other_tensors_in_place_of_the_parameters_are_seen():
    op, x = ops.Linear(32, 32, bias=False), torch.randn(4, 32)
    seen = []
    for seed in range(6):
        torch.manual_seed(seed)
        with autocast(RECIPE):
            seen.append(functional_call(op, {"weight": torch.randn(32, 32)}, (x,)))
    assert len(casts) == 6
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_another_recipe_casts_anew():
    op, x = ops.Linear(32, 32), torch.randn(4, 32)
    first = step(op, x)
    with autocast("fp8_current"):
        op(x)
    assert torch.equal(step(op, x), first) and len(casts) == 2


def test_a_change_of_inference_tensors_is_seen():
    with torch.inference_mode():
        op = ops.Linear(32, 32, bias=False)
        x = torch.randn(4, 32)
        first = step(op, x)
        op.weight.mul_(2)
        assert torch.equal(step(op, x), 2 * first)


def test_a_change_between_forward_and_backward_is_refused():
    op = ops.Linear(32, 32)
    with autocast(RECIPE):
        y = op(torch.randn(4, 32, requires_grad=True))
    with torch.no_grad():
        op.weight.mul_(2)
    with pytest.raises(RuntimeError, match="'weight' was changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_data_assigned_between_forward_and_backward_is_refused_each_time(recipe):
    """The old storage is kept alive: memory that was freed could be given out again at the same address."""
    op = ops.Linear(32, 32, bias=False)
    for _ in range(20):
        with autocast(recipe):
            y = op(torch.randn(4, 32, requires_grad=True))
        op.weight.data = torch.randn(32, 32)
        op.weight.data = torch.randn(32, 32)
        with pytest.raises(RuntimeError, match="'weight' got other data"):
            y.sum().backward()


def mlp(**factory):
    layers = ops.GroupedLinear(2, 64, 128, bias=False, **factory), ops.SwiGLU()
    return Sequential(*layers, ops.GroupedLinear(2, 64, 64, bias=False, **factory))


# no random numbers, and no scales that move
STATELESS = ("fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", SQUARE["mxfp8"][0], SQUARE["nvfp4"][0])


@pytest.mark.parametrize("needs_dw", [True, False])
@pytest.mark.parametrize("recipe", STATELESS)
def test_a_flag_keeps_the_weights_that_a_capture_shares(recipe, needs_dw, monkeypatch):
    """What a capture records, run at once: a replay would give the same."""
    model, x = mlp().requires_grad_(needs_dw), torch.randn(40, 64).requires_grad_()

    def run(keep):
        with autocast(recipe, keep_weights=torch.tensor(keep)):
            y = model(x, split_sizes=[13, 20])
        return y, *torch.autograd.grad(y.square().sum(), [x])

    first = run(0)
    monkeypatch.setattr("ops.products.weights.is_capturing", lambda device: True)
    old = run(0)
    assert all(map(torch.equal, old, first))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(-2)  # as a replay sees it: the same versions
    kept, new, again = run(1), run(0), run(1)
    for name in range(2):
        assert torch.equal(kept[name], old[name]) and torch.equal(again[name], new[name])
        assert not torch.equal(new[name], old[name])


def test_a_capture_without_a_run_before_it_is_refused(monkeypatch):
    monkeypatch.setattr("ops.products.weights.is_capturing", lambda device: True)
    refused = pytest.raises(RuntimeError, match=r"Run the same passes once under the same `autocast\(recipe")
    with autocast("mxfp8", keep_weights=torch.tensor(0)), refused:
        mlp()(torch.randn(40, 64), split_sizes=[13, 20])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [*STATELESS, "nvfp4", "fp8_delayed"])
def test_a_flag_on_the_device_keeps_the_weights_of_the_replay_before(recipe):
    factory = {"device": "cuda", "dtype": torch.bfloat16}
    model, x = mlp(**factory), torch.randn(40, 64, **factory).requires_grad_()
    sizes = torch.tensor([13, 20], device="cuda")
    flag = torch.zeros((), device="cuda")
    static = {}

    def run():
        with autocast(recipe, keep_weights=flag):
            y = model(x, split_sizes=sizes)
        static["y"], (static["dx"],) = y, torch.autograd.grad(y.float().square().sum(), [x])

    torch.use_deterministic_algorithms(False)  # poisoning memory is not allowed in a capture
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()

    def replayed(keep):
        flag.fill_(keep)
        graph.replay()
        return {name: tensor.clone() for name, tensor in static.items()}

    replayed(0)
    old = replayed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)
    kept, new = replayed(1), replayed(0)
    if recipe in STATELESS:
        assert all(torch.equal(kept[name], old[name]) for name in old)
    assert not torch.equal(kept["dx"], new["dx"])
    again = replayed(1)
    if recipe in STATELESS:
        assert all(torch.equal(again[name], new[name]) for name in new)
