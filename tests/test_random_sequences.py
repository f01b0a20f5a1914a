"""Random legal sequences of operations: fused, unfused, one operation at a time, and in plain torch, all the same."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fused import FUSIONS, ElementwiseChain
from fuser import Sequential, autocast, ops
from ops import BasicOperation
from tests import reference
from tests.reference import assert_close, assert_same_bits
from tests.test_elementwise_chain import ChainAnywhere

GROUPS = 3
WIDTHS = [8, 24, 32, 64]
RECIPES = [None, "fp8_current", "fp8_rowwise", "mxfp8", "fp8_block"]
# What squares its input is left out: a few in a row leave the range of every dtype.
UNGATED = [ops.GELU, ops.QGELU, ops.ReLU, ops.SiLU]
HALVES = [ops.GLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU]
# A chain of up to a dozen operations, each of which may enlarge what those before it were off. Relative to 1 at least:
# a norm takes out what a scale before it did, so gradients may cancel.
CHAIN = {torch.float64: 1e-10, torch.float32: 1e-4}


class Drawn(NamedTuple):
    """A sequence as it was drawn. `modules` are classes with their arguments; they are made by `build`."""

    modules: tuple[tuple[Callable[..., nn.Module], tuple[Any, ...], dict[str, Any]], ...]
    first_width: int
    sizes: tuple[int, ...]
    tail: int
    seed: int
    outputs: tuple[str, ...]


@st.composite
def sequences(draw: Callable[..., Any], most: int = 8) -> Drawn:
    """Any operation whose width fits may come next; residual branches that are open may be closed where it fits."""
    modules: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    first_width = width = draw(st.sampled_from(WIDTHS))
    branches: list[tuple[str, int]] = []
    named = 0

    def add(kind: Any, *args: Any, **kwargs: Any) -> None:
        modules.append((kind, args, kwargs))

    for _ in range(draw(st.integers(1, most))):
        choices = ["linear", "bias", "norm", "identity", "quantize", "branch", "grouped", "mlp", "module", "relu mlp"]
        choices += ["dense"] * 3 + ["linear", "bias", "ungated", "scale", "dropout", "other norm", "reshape"]
        choices += ["residual norm", "residual norm", "scaled branch"]
        if width % 16 == 0:
            choices += ["gated"] * 2
        if any(w == width for _, w in branches):
            choices += ["join"] * 3
        choice = draw(st.sampled_from(choices))
        if choice == "linear":
            add(ops.Linear, width, width := draw(st.sampled_from(WIDTHS)), bias=draw(st.booleans()))
        elif choice == "bias":
            add(ops.Bias, width)
        elif choice == "norm":
            add(ops.RMSNorm, width, zero_centered_gamma=draw(st.booleans()))
        elif choice == "identity":
            add(ops.Identity)
        elif choice == "quantize":
            add(ops.Quantize, forward=draw(st.booleans()), backward=draw(st.booleans()))
        elif choice == "gated":
            width //= 2
            kind = draw(st.sampled_from([ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU, *HALVES]))
            add(kind, **({} if kind in HALVES else {"glu_interleave_size": draw(st.sampled_from([None, 4]))}))
        elif choice == "ungated":
            add(draw(st.sampled_from(UNGATED)))
        elif choice == "scale":
            add(ops.ConstantScale, draw(st.sampled_from([0.5, -1.0, 0.3])))
        elif choice == "dropout":
            add(ops.Dropout, draw(st.sampled_from([0.0, 0.25])))
        elif choice == "other norm":
            add(*draw(st.sampled_from([(ops.LayerNorm, width), (ops.L2Normalization,)])))
        elif choice == "residual norm":
            named += 1
            branches.append((f"branch{named}", width))
            add(ops.MakeExtraOutput, f"branch{named}")
            add(*draw(st.sampled_from([(ops.RMSNorm, width), (ops.Linear, width, width)])))
        elif choice == "dense":
            outputs = draw(st.sampled_from(WIDTHS + [w for _, w in branches] * 4))
            add(ops.Linear, width, outputs, bias=draw(st.booleans()))
            width = outputs
            if draw(st.booleans()):
                add(ops.Bias, width)
            fitting = [name for name, w in branches if w == width]
            if not fitting or draw(st.booleans()):
                add(draw(st.sampled_from(UNGATED)))
            else:
                if draw(st.booleans()):
                    add(ops.ConstantScale, draw(st.sampled_from([0.5, 0.3])))
                add(ops.AddExtraInput, draw(st.sampled_from(fitting)))
        elif choice == "scaled branch":
            named += 1
            branches.append((f"branch{named}", width))
            add(ops.MakeExtraOutput, f"branch{named}")
            add(ops.Linear, width, width, bias=draw(st.booleans()))
            add(ops.ConstantScale, draw(st.sampled_from([0.5, 0.3])))
            add(ops.AddExtraInput, f"branch{named}")
        elif choice == "reshape":
            add(ops.Reshape, (-1, width))
        elif choice == "branch":
            named += 1
            branches.append((f"branch{named}", width))
            add(ops.MakeExtraOutput, f"branch{named}")
        elif choice == "join":
            name = draw(st.sampled_from([name for name, w in branches if w == width]))
            add(ops.AddExtraInput, name)
        elif choice == "grouped":
            bias, scaled = draw(st.sampled_from([(False, False), (True, False), (True, True)]))
            outputs = draw(st.sampled_from(WIDTHS))
            stacked = draw(st.booleans())
            forms = {"stacked": stacked, "stacked_bias": stacked != (outputs == width)}
            add(ops.GroupedLinear, GROUPS, width, outputs, bias=bias, scale_bias=scaled, **forms)
            width = outputs
        elif choice in ("mlp", "relu mlp"):
            inner, interleave = draw(st.sampled_from([8, 32])), draw(st.sampled_from([None, 4]))
            glu = choice == "mlp"
            kinds = [ops.SwiGLU, ops.ScaledSwiGLU, ops.ClampedSwiGLU, ops.ScaledClampedQGeGLU, ops.ScaledSiTUGLU]
            kind = draw(st.sampled_from(kinds)) if glu else ops.ScaledSReLU
            scaled = "scales" in kind.extra_inputs and draw(st.booleans())
            add(ops.GroupedLinear, GROUPS, width, inner * (1 + glu), bias=draw(st.booleans()))
            add(kind, **({"glu_interleave_size": interleave} if glu else {}))
            width = draw(st.sampled_from(WIDTHS))
            add(ops.GroupedLinear, GROUPS, inner, width, bias=scaled or draw(st.booleans()), scale_bias=scaled)
        else:
            kind = draw(st.sampled_from([nn.Tanh, nn.Identity, nn.Linear, Sequential]))
            args = {nn.Linear: (width, width), Sequential: (ops.Bias(width), ops.Identity())}.get(kind, ())
            add(kind, *args)
    sizes = tuple(draw(st.lists(st.integers(0, 6), min_size=GROUPS, max_size=GROUPS)))
    outputs = tuple(name for name, _ in branches if draw(st.booleans()))
    return Drawn(tuple(modules), first_width, sizes, draw(st.integers(0, 3)), draw(st.integers(0, 99)), outputs)


def build(drawn: Drawn, dtype: torch.dtype, device: str = "cpu") -> tuple[list[nn.Module], Tensor, dict[str, Any]]:
    """The modules, x, and the extra inputs that they ask for. Some parameters are frozen."""
    torch.manual_seed(drawn.seed)
    modules = [copy.deepcopy(kind(*args, **kwargs)).to(device, dtype) for kind, args, kwargs in drawn.modules]
    for module in modules:
        for parameter in module.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape).to(parameter)
            parameter.requires_grad_(bool(torch.rand(()) < 0.8))
    rows = sum(drawn.sizes) + drawn.tail
    x = torch.randn(rows, drawn.first_width).to(device, dtype).requires_grad_(bool(torch.rand(()) < 0.8))
    asked = {name for module in modules if isinstance(module, BasicOperation) for name in module.extra_inputs}
    extras: dict[str, Any] = {}
    if "split_sizes" in asked:
        extras["split_sizes"] = torch.tensor(drawn.sizes, device=device)
    if "scales" in asked:
        extras["scales"] = torch.rand(rows).to(device, dtype).requires_grad_(bool(torch.rand(()) < 0.8))
    return modules, x, extras


def run(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    x: Tensor,
    extras: dict[str, Any],
    outputs: Sequence[str],
) -> dict[str, Tensor | None]:
    """y, the extra outputs and every gradient of function(modules, x, extras, outputs)."""
    torch.manual_seed(5)  # the same dropouts each time
    leaves = reference.leaves({"x": x, "scales": extras.get("scales")})
    given = extras | ({"scales": leaves["scales"]} if "scales" in extras else {})
    for module in modules:
        module.zero_grad()
    y, made = function(modules, leaves["x"], given, outputs)
    heads = {"y": y, **made}
    roots = {name: head for name, head in heads.items() if head.requires_grad}
    if roots and torch.is_grad_enabled():
        torch.autograd.backward(list(roots.values()), [slope(head) for head in roots.values()])
    parameters = {f"{i}.{n}": p for i, module in enumerate(modules) for n, p in module.named_parameters()}
    return {**{name: head.detach() for name, head in heads.items()}, **reference.gradients({**leaves, **parameters})}


def slope(head: Tensor) -> Tensor:
    """A gradient that depends on the place alone, exact in every dtype."""
    places = torch.arange(head.numel(), device=head.device)
    return ((places * 7 % 17 - 8) / 8).view(head.shape).to(head.dtype)


def in_sequence(**settings: Any) -> Callable[..., Any]:
    def function(modules: Any, x: Tensor, extras: dict[str, Any], outputs: Sequence[str]) -> Any:
        sequential = Sequential(*modules, **settings)
        return sequential(x, outputs=outputs, **extras) if outputs else (sequential(x, **extras), {})

    return function


def one_by_one(modules: Any, x: Tensor, extras: dict[str, Any], outputs: Sequence[str]) -> Any:
    """Each operation a pipeline of its own, put together by autograd."""
    environment = dict(extras)
    for module in modules:
        if isinstance(module, BasicOperation):
            made = tuple(module.extra_outputs)
            given = {name: environment[name] for name in module.extra_inputs}
            x = module(x, outputs=made, **given) if made else module(x, **given)
            if made:
                x, produced = x
                environment |= produced
        else:
            x = module(x)
    return x, {name: environment[name] for name in outputs}


def norm(m: ops.RMSNorm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + m.eps) * (m.weight + m.zero_centered_gamma)


def joined(m: ops.GroupedLinear, names: Sequence[str]) -> Tensor | None:
    parameters = [m.get_parameter(name) for name in names]
    return None if not names else parameters[0] if names[0] in ("weight", "bias") else torch.stack(parameters)


def grouped(m: ops.GroupedLinear, x: Tensor, env: dict[str, Any]) -> Tensor:
    w, b = joined(m, m.weight_names), joined(m, m.bias_names)
    return reference.grouped_linear(x, w, env["split_sizes"].tolist(), b, env["scales"] if m.scale_bias else None)


def activated(m: Any, x: Tensor, env: dict[str, Any]) -> Tensor:
    y = reference.gated(x, m.activation.kind, m.activation.glu_interleave_size)
    return y * env["scales"][:, None] if m.extra_inputs else y


def halves(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return function(a) * b


def plain_norm(m: ops.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, m.normalized_shape, m.weight, m.bias, m.eps)


PLAIN: dict[type, Callable[[Any, Tensor, dict[str, Any]], Tensor]] = {
    ops.Linear: lambda m, x, env: F.linear(x, m.weight, m.bias),
    ops.Bias: lambda m, x, env: x + m.bias,
    ops.RMSNorm: lambda m, x, env: norm(m, x),
    ops.LayerNorm: lambda m, x, env: plain_norm(m, x),
    ops.L2Normalization: lambda m, x, env: x / (x.square().sum(-1, keepdim=True) + m.eps).sqrt(),
    ops.ConstantScale: lambda m, x, env: m.scale * x,
    ops.Dropout: lambda m, x, env: x,  # in eval mode
    ops.Reshape: lambda m, x, env: x.reshape(m.shape),
    ops.GELU: lambda m, x, env: F.gelu(x, approximate="tanh"),
    ops.QGELU: lambda m, x, env: x * torch.sigmoid(1.702 * x),
    ops.ReLU: lambda m, x, env: x.relu(),
    ops.SiLU: lambda m, x, env: F.silu(x),
    ops.GLU: lambda m, x, env: halves(torch.sigmoid, x),
    ops.GEGLU: lambda m, x, env: halves(lambda a: F.gelu(a, approximate="tanh"), x),
    ops.QGEGLU: lambda m, x, env: halves(lambda a: a * torch.sigmoid(1.702 * a), x),
    ops.ReGLU: lambda m, x, env: halves(F.relu, x),
    ops.Identity: lambda m, x, env: x,
    ops.Quantize: lambda m, x, env: x,
    ops.MakeExtraOutput: lambda m, x, env: env.setdefault(m.name, x),
    ops.AddExtraInput: lambda m, x, env: x + env[m.name],
    ops.GroupedLinear: grouped,
    **dict.fromkeys([ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU], activated),
    **dict.fromkeys([ops.ScaledSwiGLU, ops.ScaledSiTUGLU, ops.ScaledClampedQGeGLU, ops.ScaledSReLU], activated),
    Sequential: lambda m, x, env: x + m[0].bias,
}


def plainly(modules: Any, x: Tensor, extras: dict[str, Any], outputs: Sequence[str]) -> Any:
    """Nothing of this project: torch's own functions and autograd. Without dropout."""
    environment = dict(extras)
    for module in modules:
        x = PLAIN[type(module)](module, x, environment) if type(module) in PLAIN else module(x)
    return x, {name: environment[name] for name in outputs}


def without(results: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in results.items() if name not in names}


def uses_each_branch_once(modules: Sequence[nn.Module], outputs: Sequence[str]) -> bool:
    """If not, its gradient has more than two shares, which autograd adds in another order."""
    uses = [module.name for module in modules if isinstance(module, ops.AddExtraInput)] + list(outputs)
    return len(uses) == len(set(uses))


OFTEN = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])


@OFTEN
@given(
    drawn=sequences(),
    recipe=st.sampled_from(RECIPES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
@pytest.mark.slow
def test_fused_unfused_and_one_by_one_are_the_same(drawn, recipe, dtype):
    """On the CPU bit for bit, but for the scales' gradient: a fused operation adds its two shares before the others."""
    modules, x, extras = build(drawn, dtype)
    with autocast(recipe=recipe):
        fused = run(in_sequence(fusions=EXACT), modules, x, extras, drawn.outputs)
        unfused = run(in_sequence(fusions=()), modules, x, extras, drawn.outputs)
        assert_same_bits(without(fused, "gradient of scales"), without(unfused, "gradient of scales"))
        assert_close(fused, unfused, {**CHAIN, torch.bfloat16: 0.05}, floor=1.0)
        if recipe is None or not any(isinstance(module, ops.Quantize) for module in modules):
            # A Quantize hands codes to its neighbour, and by itself their values, which are quantized once more.
            alone = run(one_by_one, modules, x, extras, drawn.outputs)
            if uses_each_branch_once(modules, drawn.outputs):
                assert_same_bits(without(unfused, "gradient of scales"), without(alone, "gradient of scales"))
            elif recipe is None:
                assert_close(unfused, alone, {**CHAIN, torch.bfloat16: 0.05}, floor=1.0)


EXACT = tuple(fusion for fusion in FUSIONS if not fusion.rounds_less)
EVERY_FUSION = tuple(ChainAnywhere if fusion is ElementwiseChain else fusion for fusion in FUSIONS)


@pytest.mark.rest
@OFTEN
@given(
    drawn=sequences(),
    recipe=st.sampled_from([None, None, "mxfp8"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_chains_of_random_sequences_are_their_operations(drawn, recipe, dtype):
    """To a few units of the last place, as the references and torch's own functions differ; codes may flip by that."""
    modules, x, extras = build(drawn, dtype)
    with autocast(recipe=recipe):
        fused = run(in_sequence(fusions=EVERY_FUSION), modules, x, extras, drawn.outputs)
        unfused = run(in_sequence(fusions=()), modules, x, extras, drawn.outputs)
    if recipe is None:
        assert_close(fused, unfused, {**CHAIN, torch.bfloat16: 0.1}, floor=1.0)
    else:
        assert all((fused[n] is None) == (t is None) for n, t in unfused.items())
        assert all(t is None or (fused[n].shape == t.shape and not t.isnan().any()) for n, t in unfused.items())


@pytest.mark.gpu
@OFTEN
@given(drawn=sequences(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_on_the_gpu_fused_and_unfused_are_the_same(drawn, dtype):
    """With one seed the same elements are dropped; sums over rows and grouped products have an order of their own."""
    modules, x, extras = build(drawn, dtype, "cuda")
    fused = run(in_sequence(), modules, x, extras, drawn.outputs)
    unfused = run(in_sequence(fusions=()), modules, x, extras, drawn.outputs)
    assert_close(fused, unfused, {**CHAIN, torch.bfloat16: 0.1, torch.float16: 0.02}, floor=1.0)


@pytest.mark.slow
@OFTEN
@given(drawn=sequences(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_without_a_recipe_a_sequence_is_what_plain_torch_makes_of_it(drawn, dtype):
    modules, x, extras = build(drawn, dtype)
    modules = [module.eval() for module in modules]
    got = run(in_sequence(), modules, x, extras, drawn.outputs)
    wide = [copy.deepcopy(module).double() for module in modules]
    if "scales" in extras:
        extras["scales"] = extras["scales"].detach().double().requires_grad_(extras["scales"].requires_grad)
    want = run(plainly, wide, x.detach().double().requires_grad_(x.requires_grad), extras, drawn.outputs)
    assert_close(got, want, CHAIN, floor=1.0)


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=sequences(), recipe=st.sampled_from(RECIPES))
def test_both_paths_give_the_same(drawn, recipe):
    modules, x, extras = build(drawn, torch.float64)
    if recipe is not None:
        modules = [module for module in modules if not isinstance(module, ops.Quantize)]
    with autocast(recipe=recipe), torch.no_grad():
        grouped, split = (run(in_sequence(path=path), modules, x, extras, ()) for path in ("grouped", "split"))
    # Under a recipe a difference in the last place of a double flips a code only if it lies on a tie.
    assert_close(grouped, split, CHAIN, floor=1.0)


@pytest.mark.gpu
@OFTEN
@given(drawn=sequences(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_on_the_gpu_a_sequence_is_what_plain_torch_makes_of_it(drawn, dtype):
    modules, x, extras = build(drawn, dtype, "cuda")
    modules = [module.eval() for module in modules]
    got = run(in_sequence(), modules, x, extras, drawn.outputs)
    wide = [copy.deepcopy(module).to("cpu", torch.float64) for module in modules]
    for name, value in extras.items():
        extras[name] = value.detach().cpu()
        if value.is_floating_point():
            extras[name] = extras[name].double().requires_grad_(value.requires_grad)
    x = x.detach().cpu().double().requires_grad_(x.requires_grad)
    assert_close(got, run(plainly, wide, x, extras, drawn.outputs), CHAIN, floor=1.0)


@pytest.mark.slow
def test_a_drawn_sequence_fuses_now_and_then():
    """The tests above would be empty if no draw held the patterns."""
    used: Counter[str] = Counter()

    @settings(max_examples=250, database=None, derandomize=True)
    @given(drawn=sequences())
    def count(drawn: Drawn) -> None:
        modules, _, _ = build(drawn, torch.float32)
        plans = [Sequential(*modules, fusions=fusions).explain() for fusions in ((fusion,) for fusion in EVERY_FUSION)]
        used.update(fusion.__name__ for fusion, plan in zip(EVERY_FUSION, plans, strict=True) if " = " in plan)

    count()
    assert all(used[fusion.__name__] >= 3 for fusion in EVERY_FUSION), used


WIDTH_OF = {ops.Linear: 0, ops.Bias: 0, ops.RMSNorm: 0, ops.LayerNorm: 0, ops.GroupedLinear: 1}


@pytest.mark.slow
@OFTEN
@given(drawn=sequences(), place=st.integers(0, 99))
def test_an_illegal_sequence_is_refused_at_construction(drawn, place):
    """A legal one with one width changed, or an extra tensor asked for too early."""
    askers = [i for i, (kind, _, _) in enumerate(drawn.modules) if kind is ops.AddExtraInput]
    # An operation of a width behind one that makes a known width.
    behind = [
        i for i in range(1, len(drawn.modules))
        if drawn.modules[i][0] in WIDTH_OF and drawn.modules[i - 1][0] in (ops.Linear, ops.Bias, ops.RMSNorm)
    ]  # fmt: skip
    ways = [("width", i) for i in behind] + [("early", i) for i in askers]
    assume(ways)
    way, at = ways[place % len(ways)]
    modules = list(drawn.modules)
    kind, args, kwargs = modules[at]
    if way == "width":
        position = WIDTH_OF[kind]
        modules[at] = (kind, (*args[:position], args[position] + 1, *args[position + 1 :]), kwargs)
    else:
        modules.insert(0, modules[at])
    with pytest.raises(ValueError, match=r".{20,}\."):
        Sequential(*[kind(*args, **kwargs) for kind, args, kwargs in modules])


@pytest.mark.slow
@OFTEN
@given(drawn=sequences(), place=st.integers(0, 99))
def test_an_extra_output_that_is_made_twice_is_refused_as_an_output(drawn, place):
    makers = [i for i, (kind, _, _) in enumerate(drawn.modules) if kind is ops.MakeExtraOutput]
    assume(makers)
    at = makers[place % len(makers)]
    modules = [*drawn.modules[:at], drawn.modules[at], *drawn.modules[at:]]
    layer = Sequential(*[kind(*args, **kwargs) for kind, args, kwargs in modules])
    name = layer[at].extra_name(next(iter(layer[at].extra_outputs)))
    others = dict.fromkeys(layer.layout().consumed, torch.zeros(1))
    with pytest.raises(ValueError, match=f"2 operations make the extra output {name!r}"):
        layer(torch.zeros(1, drawn.first_width), outputs=(name,), **others)
