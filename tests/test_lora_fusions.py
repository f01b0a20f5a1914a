"""Fusions over operations with adapters, and their repetition: bits, what is kept, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuser
import ops.runner.backward
import ops.runner.run
from fuser import Sequential, autocast, lora, ops
from recipes.registry import RECIPES
from tests.lora_cases import with_values
from tests.pairwise import rest
from tests.reference import assert_same_bits
from tests.test_repeat import num_repeated, repeating  # noqa: F401

# G groups, K features of the layer

GPU = pytest.mark.gpu
NAMES = [kind.names[0] for kind in RECIPES]
FEW = [name if name in ("bf16", "fp8_delayed", "mxfp8", "nvfp4") else rest(name) for name in NAMES]
TARGETS = {"FC1": ["0"], "FC2": ["2"], "both": ["0", "2"]}
G, K, INNER, ROWS, RANK = 4, 64, 96, 40, 8


def experts(
    targets: Sequence[str],
    activation: type = ops.ScaledSwiGLU,
    *,
    hidden: int = K,
    inner: int = INNER,
    dropout: float = 0.0,
    **about: Any,
) -> list[nn.Module]:
    torch.manual_seed(0)
    wide = inner * (1 if activation is ops.ScaledSReLU else 2)
    scaled = {"scale_bias": "scales" in activation.extra_inputs}
    model = Sequential(
        ops.GroupedLinear(G, hidden, wide, **about),
        activation(),
        ops.GroupedLinear(G, inner, hidden, **about, **scaled),
    )
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    lora.add(model, RANK, targets, alpha=4 * RANK, dropout=dropout)
    return list(with_values(model))


def pair(operations: Sequence[nn.Module], **settings: str) -> tuple[Sequential, Sequential]:
    """A fused and an unfused model of copies of the operations."""
    fused = Sequential(*copy.deepcopy(operations), **settings)
    assert "GroupedMLP = " in fused.explain(device=next(fused.parameters()).device)
    return fused, Sequential(*copy.deepcopy(operations), fusions=(), **settings)


def run(
    model: Sequential, recipe: str = "bf16", sizes: Sequence[int] = (9, 0, 14, 10), *, x_grad: bool = True
) -> dict[str, Tensor]:
    """y and every gradient of a step; there are seven rows more than the sizes say."""
    parameter = next(model.parameters())
    rows, generator = sum(sizes) + 7, torch.Generator().manual_seed(5)
    x, dy = (torch.randn(rows, model[0].in_features, generator=generator).to(parameter) for _ in range(2))
    leaves = {"x": x.requires_grad_(x_grad)}
    extras = {"split_sizes": torch.tensor(sizes, device=parameter.device)}
    if "scales" in model.layout().consumed:
        leaves["scales"] = extras["scales"] = torch.rand(rows, generator=generator).to(x.device).requires_grad_(x_grad)
    leaves |= dict(model.named_parameters())
    for leaf in leaves.values():
        leaf.grad = None
    torch.manual_seed(6)  # of dropout and stochastic rounding
    with autocast(recipe):
        y = model(x, **extras)
    if y.requires_grad:
        y.backward(dy)
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


# The grouped MLP


@pytest.mark.parametrize("path", ["grouped", "split"])
@pytest.mark.parametrize("recipe", FEW)
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_fused_is_unfused(targets: list[str], recipe: str, path: str) -> None:
    for weights, dropout in (("frozen", 0.0), ("trained", 0.4)):
        fused, unfused = pair(experts(targets, dropout=dropout), path=path)
        for model in (fused, unfused):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(weights == "trained" or "lora_" in name)
        for sizes in ((9, 0, 14, 10), (0, 40, 0, 0), (0, 0, 0, 0)):
            found = run(fused, recipe, sizes)
            assert sum("lora_" in name for name in found) == 2 * len(targets)
            assert_same_bits(found, run(unfused, recipe, sizes))
        with torch.no_grad():
            assert_same_bits(run(fused, recipe), run(unfused, recipe))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "activation", [ops.SwiGLU, ops.ScaledSiTUGLU, ops.ClampedSwiGLU, ops.ScaledClampedQGeGLU, ops.ScaledSReLU]
)
def test_fused_is_unfused_with_any_activation(activation: type, dtype: torch.dtype) -> None:
    fused, unfused = pair(experts(["0", "2"], activation, dtype=dtype, stacked=dtype == torch.float64))
    assert_same_bits(run(fused), run(unfused))


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("recipe", ["fp8_current", rest("bf16"), rest("nvfp4")])
def test_any_subset_may_be_frozen(recipe: str, targets: list[str]) -> None:
    operations = experts(targets, dropout=0.3)
    fused, unfused = pair(operations)
    names = [name for name, _ in fused.named_parameters()]
    for wanted in ([], *([name] for name in names), [n for n in names if n.endswith("B.weight")]):
        for x_grad in (True, False):
            for model in (fused, unfused):
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(name in wanted)
            found = run(fused, recipe, x_grad=x_grad)
            assert found.keys() == {"y", *wanted} | ({"x", "scales"} if x_grad else set())
            assert_same_bits(found, run(unfused, recipe, x_grad=x_grad))


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "mxfp8"])
def test_weights_may_be_held_quantized(recipe: str) -> None:
    fused, unfused = pair(experts(["0", "2"]))
    for model in (fused, unfused):
        fuser.to_quantized(model, recipe)
    found = run(fused, recipe)
    assert sum("lora_" in name for name in found) == 4
    assert_same_bits(found, run(unfused, recipe))


def test_the_callers_buffers_are_written_into() -> None:
    fused, unfused = pair(experts(["0", "2"], ops.SwiGLU))
    sizes, x = torch.tensor([9, 0, 14, 10]), torch.randn(ROWS, K, requires_grad=True)
    output, grad_input = torch.empty(ROWS, K), torch.empty(ROWS, K)
    y = fused(x, split_sizes=sizes, buffers={0: {"grad_input": grad_input}, 2: {"output": output}})
    y.square().sum().backward()
    expected = x.detach().requires_grad_()
    unfused(expected, split_sizes=sizes).square().sum().backward()
    assert y.data_ptr() == output.data_ptr() and torch.equal(y, unfused(x, split_sizes=sizes))
    assert torch.equal(grad_input, expected.grad)


def kept_bytes(model: Sequential, recipe: str = "bf16") -> int:
    """Of numbers that forward keeps for backward."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(model, recipe)
    return sum(tensor.nbytes for tensor in kept.values() if tensor.is_floating_point())


def test_what_is_kept_is_x_the_pre_activation_and_what_has_the_rank() -> None:
    fused, unfused = pair(experts(["0", "2"]))
    numbers = ROWS * (K + 2 * INNER + 1 + 2 * RANK)
    assert kept_bytes(fused) == 4 * numbers
    assert kept_bytes(unfused) == 4 * (numbers + ROWS * INNER)
    only_second, _ = pair(experts(["2"]))
    assert kept_bytes(only_second) == 4 * ROWS * (2 * INNER + 1 + RANK)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_merged_adapters_are_fused_and_add_nothing(recipe: str) -> None:
    fused, unfused = pair(experts(["0", "2"]))
    before = run(fused, recipe)
    for model in (fused, unfused):
        lora.merge(model)
    found = run(fused, recipe)
    assert not torch.equal(found["y"], before["y"])
    assert_same_bits(found, run(unfused, recipe))
    plain = copy.deepcopy(fused)
    lora.unload(plain)
    assert_same_bits(found, run(plain, recipe))
    lora.unmerge(fused)
    assert_same_bits(run(fused, recipe), before)


def test_explain_shows_adapters_and_why_no_grad_mode_stores_the_pre_activation() -> None:
    for targets in TARGETS.values():
        model = Sequential(*experts(targets, ops.SwiGLU))
        text = model.explain(recipe="mxfp8")
        assert "GroupedMLP = " in text and f"adapter: rank {RANK}, in high precision" in text
        on_gpu = model.explain(device="cuda", dtype=torch.bfloat16)
        assert "not repeated" not in on_gpu
        assert ("apart from FC1: The adapter's product is added" in on_gpu) == ("0" in targets)
        lora.merge(model)
        assert "apart from FC1: The adapter" not in model.explain(device="cuda", dtype=torch.bfloat16)


# Dense fusions


def dense(kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Module]:
    torch.manual_seed(0)
    about = {"dtype": dtype, "device": device}
    linear = ops.Linear(K, K, **about)
    around = {
        "ForwardLinearBiasActivation": (linear, ops.Bias(K, **about), ops.GELU()),
        "ForwardLinearBiasAdd": (ops.MakeExtraOutput("residual"), ops.GELU(), linear, ops.AddExtraInput("residual")),
        "BackwardLinearAdd": (ops.MakeExtraOutput("residual"), linear, ops.AddExtraInput("residual")),
    }
    model = Sequential(*around[kind])
    lora.add(model, RANK, dropout=0.2)
    return list(with_values(model))


@pytest.mark.parametrize("kind", ["ForwardLinearBiasActivation", "ForwardLinearBiasAdd", "BackwardLinearAdd"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", rest("mxfp8"), rest("nvfp4")])
def test_dense_fusions_have_the_bits_of_the_unfused_run(recipe: str, kind: str) -> None:
    operations = dense(kind)
    fused, unfused = Sequential(*copy.deepcopy(operations)), Sequential(*copy.deepcopy(operations), fusions=())
    assert f"{kind} = " in fused.explain()
    assert_same_bits(run_dense(fused, recipe), run_dense(unfused, recipe))


def run_dense(model: Sequential, recipe: str) -> dict[str, Tensor]:
    parameter = next(model.parameters())
    x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(5)).to(parameter).requires_grad_()
    torch.manual_seed(6)
    with autocast(recipe):
        y = model(x)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_fusion_that_scales_the_products_itself_is_refused() -> None:
    model = Sequential(ops.Linear(K, K, bias=False), ops.ConstantScale(0.5))
    assert "BackwardLinearScale = " in model.explain()
    lora.add(model, RANK)
    refusal = "LoRALinear has an adapter, whose products it does not add: see handles_adapters."
    assert f"not fused: BackwardLinearScale on operations 0-1: {refusal}" in model.explain()
    run_dense(with_values(model), "bf16")


# Repeated steps


def dense_mlp(dropout: float = 0.0, **about: Any) -> Sequential:
    torch.manual_seed(1)
    model = Sequential(ops.Linear(K, 2 * K, **about), ops.SwiGLU(), ops.Linear(K, K, **about), fusions=())
    lora.add(model, RANK, dropout=dropout)
    return with_values(model)


def steps(model: Sequential, recipe: str, change: Callable[[Sequential, int], Any]) -> list[dict[str, Tensor]]:
    found = []
    for at in range(10):
        found.append(run_dense(model, recipe) | {name: state.clone() for name, state in model.named_buffers()})
        change(model, at)
    return found


def write(model: Sequential) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(1.1)


def train_weights(model: Sequential, train: bool) -> None:
    """By an optimizer whose writes torch does not count."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.requires_grad_(train)
            parameter.data.mul_(1.1 if train else 1.0)


CHANGES: dict[str, Callable[[Sequential, int], Any]] = {
    "nothing": lambda model, at: None,
    "the factor": lambda model, at: setattr(model[0], "alpha", 2.0) if at == 4 else None,
    "training or not": lambda model, at: model[2].train(at % 2 == 0),
    "a factor's parameter": lambda model, at: setattr(
        model[0].lora_A, "weight", nn.Parameter(model[0].lora_A.weight.detach() * 1.5)
    ),
    "merged": lambda model, at: (lora.unmerge if model[0].merged else lora.merge)(model) if at % 4 == 3 else None,
    "written": lambda model, at: write(model),
    "trained or frozen": lambda model, at: train_weights(model, at % 4 < 2),
}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "mxfp8"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_repeated_steps_are_steps_in_full(change, recipe, repeating, monkeypatch):  # noqa: F811
    model, before = dense_mlp(dropout=0.3), num_repeated()
    found = steps(model, recipe, change)
    assert num_repeated() - before >= 6  # both passes of each operation
    for module in (ops.runner.run, ops.runner.backward):
        monkeypatch.setattr(module, "may_repeat", lambda device, entries: False)
    for repeated, full in zip(found, steps(dense_mlp(dropout=0.3), recipe, change), strict=True):
        assert_same_bits(repeated, full)


# On a GPU


# Where the kernel of dh casts it too, its tiles may be others, and so the order in which the gradients of scales,
# sums over a row in float32, are summed.
CAST_AS_COMPUTED = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8")
ON_GPU = {"device": "cuda", "dtype": torch.bfloat16, "hidden": 256, "inner": 384}


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["grouped", "split"])
@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_fused_is_unfused_on_a_gpu(targets, recipe, path):
    for weights, dropout in (("frozen", 0.0), ("trained", 0.4)):
        fused, unfused = pair(experts(targets, dropout=dropout, **ON_GPU), path=path)
        for model in (fused, unfused):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(weights == "trained" or "lora_" in name)
        for sizes in ((300, 0, 129, 70), (0, 512, 0, 0), (0, 0, 0, 0)):
            found, expected = run(fused, recipe, sizes), run(unfused, recipe, sizes)
            if recipe in CAST_AS_COMPUTED and path == "grouped":
                largest = expected["scales"].abs().max().item()
                torch.testing.assert_close(found.pop("scales"), expected.pop("scales"), rtol=0, atol=1e-6 * largest)
            assert_same_bits(found, expected)
        with torch.no_grad():
            assert_same_bits(run(fused, recipe), run(unfused, recipe))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [ops.SwiGLU, ops.ScaledSiTUGLU, ops.ScaledClampedQGeGLU, ops.ScaledSReLU])
def test_fused_is_unfused_with_any_activation_on_a_gpu(activation):
    fused, unfused = pair(experts(["0", "2"], activation, stacked=False, **ON_GPU))
    assert_same_bits(run(fused, sizes=(300, 0, 129, 70)), run(unfused, sizes=(300, 0, 129, 70)))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("fusions", [None, ()], ids=["fused", "unfused"])
def test_repeated_steps_are_steps_in_full_on_a_gpu(fusions, recipe, monkeypatch):
    def make():
        model = Sequential(*experts(["0", "2"], dropout=0.3, **ON_GPU), fusions=fusions)
        return model.requires_grad_(True)

    def steps(model):
        sizes = [(300, 0, 129, 70), (70, 129, 0, 300), (0, 499, 0, 0)]
        found = []
        for at in range(7):
            step = run(model, recipe, sizes[at % 3]) | dict(model.named_buffers())
            found.append({name: tensor.clone() for name, tensor in step.items()})
        return found

    model, before = make(), num_repeated()
    torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel of torch's own
    found = steps(model)
    assert num_repeated() - before >= (2 if fusions is None else 6)
    for module in (ops.runner.run, ops.runner.backward):
        monkeypatch.setattr(module, "may_repeat", lambda device, entries: False)
    for repeated, full in zip(found, steps(make()), strict=True):
        assert_same_bits(repeated, full)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "mxfp8"])
def test_nothing_waits_for_the_device(recipe):
    model = Sequential(*experts(["0", "2"], dropout=0.3, **ON_GPU))
    sizes = torch.tensor([300, 0, 129, 70], device="cuda")
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scales = torch.rand(512, device="cuda", requires_grad=True)
    for waits in (True, False, False, False):  # the first compiles
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        try:
            with autocast(recipe):
                y = model(x, split_sizes=sizes, scales=scales)
            y.backward(torch.ones_like(y))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_merged_adapters_have_the_bits_of_training_in_no_grad_mode_on_a_gpu():
    model = Sequential(*experts(["0", "2"], ops.SwiGLU, **ON_GPU))
    lora.merge(model)
    trained = run(model)["y"]
    with torch.no_grad():
        assert_same_bits(run(model), {"y": trained})
