"""Operations of torch that stand for pipelines: by name, in exports, checkpoints and counters, and without numbers."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import aot_module, nop
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import ops
from fuser import Sequential, autocast, constant_weights
from ops.runner.traced_operations import plan_of
from ops.runner.tracing import Seen, stage_of
from recipes import MXFP8BlockScaling
from recipes.registry import RECIPES
from tests.pairwise import rest

H, F, E, T = 64, 32, 4, 24  # hidden size, features of an expert, experts, tokens
NAMES = [kind.names[0] for kind in RECIPES]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*deprecated:FutureWarning"),  # torch.export's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # its own too
]


@pytest.fixture(autouse=True)
def fresh():
    """What was compiled for other tests counts against a limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def experts(bias: bool = False) -> list[Any]:
    return [ops.GroupedLinear(E, H, 2 * F, bias=bias), ops.ScaledSwiGLU(), ops.GroupedLinear(E, F, H, bias=bias)]


def moe_layer() -> Sequential:
    return Sequential(
        ops.MakeExtraOutput("residual"), ops.RMSNorm(H), ops.Router(H, E, topk=2), ops.Dispatch(E), *experts(),
        ops.Combine(), ops.AddExtraInput("residual"),
    )  # fmt: skip


def gradients(layer: Sequential, run: Callable[[Tensor], Tensor], recipe: str, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(1)  # of what is drawn
    with autocast(recipe):
        y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]


# ------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("strict", [False, rest(True)], ids=["", "strict"])
@pytest.mark.parametrize("recipe", [rest("high_precision"), "mxfp8"])
def test_an_exported_program_runs_under_its_recipe_with_other_token_counts(recipe, strict):
    layer = moe_layer().eval()
    tokens = torch.export.Dim("tokens", min=2, max=512)
    with torch.no_grad(), autocast(recipe):
        program = torch.export.export(layer, (torch.randn(T, H),), dynamic_shapes=({0: tokens},), strict=strict)
        x = torch.randn(2 * T + 1, H)
        expected = layer(x)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names[0] == "fuser.rms_norm_router_grouped_mlp.default"
    del layer  # the program has its weights
    assert torch.equal(program.module()(x), expected)


@pytest.mark.parametrize("change", ["recipe", "weight"])
def test_a_program_whose_model_is_changed_says_to_export_it_again(change):
    layer = Sequential(ops.Linear(H, H))
    with torch.no_grad():
        program = torch.export.export(layer, (torch.randn(T, H),)).module()
    if change == "recipe":
        layer[0].set_recipe("mxfp8")
    else:
        layer[0].weight = nn.Parameter(torch.zeros(H, H))
    with pytest.raises(RuntimeError, match="Linear was changed after .* exported.*export a program again"):
        program(torch.randn(T, H))


def test_a_plan_of_another_process_is_unknown():
    layer = Sequential(ops.Linear(H, H))
    with torch.no_grad():
        program = torch.export.export(layer, (torch.randn(T, H),))
    (call,) = (node for node in program.graph.nodes if "fuser" in str(node.target))
    call.args = (*call.args[:2], "a plan of another process")
    with pytest.raises(RuntimeError, match="was compiled or exported in another process"):
        program.module()(torch.randn(T, H))


class Experts(nn.Module):
    """Takes its extra inputs by position, as recorders give them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Sequential(*experts())

    def forward(self, x: Tensor, sizes: Tensor, scales: Tensor) -> Tensor:
        return self.layer(x, split_sizes=sizes, scales=scales)


def record_by_aot(module: nn.Module, *given: Tensor) -> Callable[..., Tensor]:
    recorded = aot_module(module, nop)
    recorded(*given)
    return recorded


RECORDERS: dict[str, Callable[..., Callable[..., Tensor]]] = {
    "make_fx": lambda module, *given: make_fx(module)(*given),
    "pre_dispatch": lambda module, *given: make_fx(module, pre_dispatch=True)(*given),
    "aot_module": record_by_aot,
    "jit.trace": lambda module, *given: torch.jit.trace(module, given),
}


@pytest.mark.parametrize("how", RECORDERS)
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
def test_a_recorded_call_takes_other_sizes_under_its_recipe(recipe, how):
    module = Experts()
    with torch.no_grad(), autocast(recipe):
        recorded = RECORDERS[how](module, torch.randn(T, H), torch.tensor([6, 6, 6, 6]), torch.rand(T))
        given = torch.randn(T, H), torch.tensor([1, 0, 20, 3]), torch.rand(T)
        expected = module(*given)
    with torch.no_grad():
        assert torch.equal(recorded(*given), expected)


def test_what_cannot_be_recorded_is_refused():
    layer = Sequential(ops.Linear(H, H, accumulate_into_main_grad=True))
    with pytest.raises(NotImplementedError, match="which autograd does not see"):
        make_fx(layer)(torch.randn(T, H))


# --------------------------------------------------------------------------------------------------- by their names


POLICIES = {"saved": CheckpointPolicy.MUST_SAVE, "recomputed": CheckpointPolicy.PREFER_RECOMPUTE}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recipe", ["mxfp8", rest("nvfp4")])
def test_selective_checkpointing_sees_operations_by_name(recipe, policy):
    layer = moe_layer()
    seen: set[str] = set()

    def choose(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(str(function))
        return POLICIES[policy] if "grouped_mlp" in str(function) else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(x: Tensor) -> Tensor:
        return layer(2 * x) + 1

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    checkpointed = functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
    run = torch.compile(checkpointed, backend="aot_eager_decomp_partition", fullgraph=True)
    x = torch.randn(T, H)
    expected = gradients(layer, forward, recipe, x)
    assert all(map(torch.equal, gradients(layer, run, recipe, x), expected))
    assert "fuser.rms_norm_router_grouped_mlp.default" in seen


@pytest.mark.parametrize("setting", [{"activation_memory_budget": 0.5}, {"aggressive_recomputation": True}])
def test_delayed_scaling_that_the_partitioner_computes_again_is_refused_by_its_setting(setting):
    layer = Sequential(ops.Linear(H, H), ops.GELU(), ops.Linear(H, H))
    run = torch.compile(lambda x: (2 * layer(x.sin())).sin(), backend="aot_eager_decomp_partition", fullgraph=True)
    with functorch_config.patch(**setting), autocast("fp8_delayed"):
        y = run(torch.randn(T, H, requires_grad=True))
    with pytest.raises(RuntimeError, match="activation_memory_budget and aggressive_recomputation of torch._functorch"):
        y.sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_flop_counter_counts_products_by_name(frozen):
    layer = Sequential(*experts()).requires_grad_(not frozen)
    x = torch.randn(T, H, requires_grad=True)
    sizes, scales = torch.tensor([5, 0, 12, 7]), torch.rand(T)
    with FlopCounterMode(display=False) as counter:
        layer(x, split_sizes=sizes, scales=scales).sum().backward()
    once = 2 * T * H * 3 * F
    found = {str(operation): flops for operation, flops in counter.get_flop_counts()["Global"].items()}
    assert found == {"fuser.grouped_mlp": once, "fuser.grouped_mlp_backward": once if frozen else 2 * once}


def test_counting_within_constant_weights_is_refused_by_its_name():
    layer, x = Sequential(ops.Linear(H, H)), torch.randn(T, H)
    message = "one that FlopCounterMode or torch.func sees.*run the model without torch.compile, FlopCounterMode and"
    with FlopCounterMode(display=False), constant_weights(layer), pytest.raises(RuntimeError, match=message):
        layer(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_counted_by_its_kernels_under_its_recipe(use_reentrant):
    layer = moe_layer()
    x = torch.randn(T, H)

    def run(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    expected = gradients(layer, layer, "mxfp8", x)
    with FlopCounterMode(display=False) as counter:
        assert all(map(torch.equal, gradients(layer, run, "mxfp8", x), expected))
    assert counter.get_total_flops() > 0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
def test_a_checkpoint_around_a_compiled_layer_never_computes_it_again_under_another_recipe(recipe):
    layer = moe_layer()
    compiled = torch.compile(lambda x: layer(x) + 1, backend="aot_eager", fullgraph=True)

    def run(x: Tensor) -> Tensor:
        return checkpoint(compiled, x, use_reentrant=False)

    def with_recipe(x: Tensor) -> Tensor:
        with autocast(recipe):
            return compiled(x)

    x = torch.randn(T, H)
    expected = gradients(layer, lambda x: layer(x) + 1, recipe, x)
    if recipe == "high_precision":
        assert all(map(torch.equal, gradients(layer, run, recipe, x), expected))
        return
    again = "again in a backward under HighPrecision.* has run under MXFP8BlockScaling.*Open autocast within what"
    with pytest.raises(RuntimeError, match=again):
        gradients(layer, run, recipe, x)
    within = gradients(layer, lambda x: checkpoint(with_recipe, x, use_reentrant=False), recipe, x)
    assert all(map(torch.equal, within, expected))


@pytest.mark.slow
def test_a_checkpoint_around_a_compiled_layer_is_refused_where_backward_has_another_recipe():
    """Saved tensors of the two have the same shapes and dtypes, so that torch sees no difference."""
    layer, x = moe_layer(), torch.randn(T, H)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with autocast("mxfp8"):
        y = checkpoint(compiled, x, use_reentrant=False)
        y.sum().backward()
        with autocast(MXFP8BlockScaling(scaling="floor")):
            y = checkpoint(compiled, x, use_reentrant=False)
        with pytest.raises(RuntimeError, match="under MXFP8.*'round_up'.* has run under MXFP8.*'floor'.*Open autocast"):
            y.sum().backward()


@pytest.mark.slow
def test_a_checkpoint_around_a_compiled_layer_goes_by_its_own_forward_not_by_others():
    layer, x = moe_layer(), torch.randn(T, H)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), autocast("mxfp8"):
        compiled(x)

    def run(x: Tensor) -> Tensor:
        return checkpoint(compiled, x, use_reentrant=False)

    expected = gradients(layer, layer, "high_precision", x)
    assert all(map(torch.equal, gradients(layer, run, "high_precision", x), expected))


# ---------------------------------------------------------------------------------------------------- without numbers


@pytest.mark.parametrize("device", ["fake", "meta"])
@pytest.mark.parametrize("recipe", [name if name in ("fp8_delayed", "mxfp8") else rest(name) for name in NAMES])
def test_tensors_without_numbers_run_through_forward_and_backward(recipe, device):
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        layer = Sequential(ops.LayerNorm(H), ops.Linear(H, H), *moe_layer())
        x = torch.randn(T, H, requires_grad=True)
        with autocast(recipe):
            y, made = layer(x, outputs=("probs",))
        (y.sum() + made["probs"].sum()).backward()
    assert (y.shape, made["probs"].shape) == ((T, H), (T, 2))
    assert all(p.grad.shape == p.shape for p in (x, *layer.parameters()))


LAYERS: dict[str, Callable[[], Sequential]] = {
    "moe": moe_layer,
    "dense": lambda: Sequential(
        ops.LayerNorm(H), ops.Linear(H, H), ops.SiLU(), ops.Dropout(0.1), ops.Linear(H, H), ops.L2Normalization()
    ),
    "unfused": lambda: Sequential(*moe_layer(), fusions=()),
    "biases": lambda: Sequential(ops.Router(H, E, topk=2), ops.Dispatch(E), *experts(bias=True), ops.Combine()),
    "wide": lambda: Sequential(  # for the kernels of FC1 and its activation
        ops.Linear(H, 768),
        ops.Router(768, E, topk=2),
        ops.Dispatch(E),
        ops.GroupedLinear(E, 768, 512, bias=False),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(E, 256, 768, bias=False),
        ops.Combine(),
        ops.Linear(768, H),
    ),
}


@pytest.mark.parametrize("layer", ["moe", *(rest(name) for name in list(LAYERS)[1:])])
@pytest.mark.parametrize("recipe", NAMES)
def test_what_runs_on_a_gpu_is_traced_for_any_number_of_tokens(layer, recipe, monkeypatch):
    """By tensors that say they are on one: nothing is launched, and no number of tokens is singled out."""
    pretend_there_is_a_gpu(monkeypatch)
    sequential = LAYERS[layer]().bfloat16()
    pipeline = sequential.layout().stages[0].runner
    call = Seen("", False, ((True, 0),), "cuda", "torch.bfloat16", (), (), False, None, ())
    with autocast(recipe):
        _, key, *_ = stage_of(pipeline, [()] * len(sequential), (), call, 0)
    plan = plan_of(key)
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    rows = mode.from_tensor(torch.empty(33, H), symbolic_context=dynamic).shape[0]
    with mode:
        x = torch.empty(rows, H, dtype=torch.bfloat16, device="cuda")
        parameters = [torch.empty(p.shape, dtype=p.dtype, device="cuda") for p in pipeline.parameters().present]
        y, *kept = plan.forward([x, *parameters], "g1" + "1" * len(parameters))
    assert y.shape == (rows, H) and kept
    # Above 2**24 tokens float32 no longer counts them exactly.
    assert {str(guard.expr).replace(str(rows), "tokens") for guard in shapes.guards} <= {"tokens <= 16777216"}


def pretend_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    about = types.SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: about)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def take(tensor: Tensor, index: Any) -> Tensor:
        """tensor[index] by operations of torch: indexing itself needs a build of torch for the device."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            at, given = index.index(Ellipsis), sum(each is not None for each in index) - 1
            index = (*index[:at], *[slice(None)] * (tensor.dim() - given), *index[at + 1 :])
        axis = 0
        for each in index:
            if isinstance(each, int):
                tensor = torch.ops.aten.select(tensor, axis, each)
                continue
            if each is None:
                tensor = tensor.unsqueeze(axis)
            elif each != slice(None):
                end = 2**63 - 1 if each.stop is None else each.stop
                tensor = torch.ops.aten.slice(tensor, axis, each.start, end, each.step or 1)
            axis += 1
        return tensor

    monkeypatch.setattr(FakeTensor, "__getitem__", take, raising=False)


# ------------------------------------------------------------------------------------------- what torch relies on


@pytest.mark.parametrize("dtype", [torch.float32, rest(torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layer", [rest("moe"), rest("dense"), rest("unfused"), "biases"])
@pytest.mark.parametrize("recipe", ["high_precision", *(rest(name) for name in NAMES[1:-1]), NAMES[-1]])
def test_operations_write_to_no_argument_and_their_fakes_lie_as_what_runs(layer, recipe, dtype):
    sequential = LAYERS[layer]().to(dtype)
    pipeline = sequential.layout().stages[0].runner
    call = Seen("", False, ((True, 0),), "cpu", str(dtype), (), (), False, None, ())
    with autocast(recipe):
        name, key, *_ = stage_of(pipeline, [()] * len(sequential), (), call, 0)
        forward, backward = (getattr(torch.ops.fuser, of).default for of in (name, f"{name}_backward"))
        x = torch.randn(T, H, dtype=dtype)
        parameters = [parameter.detach() for parameter in pipeline.parameters().present]
        needs = "g1" + "1" * len(parameters)
        everything = [x, *parameters, *checked(forward, x, parameters, key, needs)]
    plan = plan_of(key)
    saved = [everything[at] for at in plan.run(needs).saved]
    dy = torch.randn(T, H, dtype=dtype)
    checked(backward, saved, [dy], key, needs, plan.sizes([x, *parameters]))


def checked(operation: Any, *args: Any) -> list[Tensor]:
    """What it returns: each in memory of its own, as its fakes lie, and its arguments as they were."""
    given = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
    before = [as_bytes(tensor).clone() for tensor in given]
    found = operation(*args)
    assert all(map(torch.equal, map(as_bytes, given), before))
    addresses = [tensor.untyped_storage().data_ptr() for tensor in (*given, *found)]
    assert len(set(addresses)) == len({id(tensor) for tensor in given}) + len(found)
    with FakeTensorMode() as mode:
        fakes = operation(*tree_map_only(Tensor, mode.from_tensor, args))
    assert [(t.dtype, t.shape, t.stride()) for t in fakes] == [(t.dtype, t.shape, t.stride()) for t in found]
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


# ------------------------------------------------------------------------------------------- operations of a user's


class Own(ops.Identity):
    """y = x; `on_context` gives a number that backward finds on its context."""

    def __init__(self, on_context: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.on_context = on_context

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Any) -> Any:
        ctx.number = self.on_context(x)
        return x * 1, {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Any) -> Any:
        return dy * ctx.number, {}, {}


def test_an_operation_of_a_users_own_is_compiled():
    layer = Sequential(ops.Linear(H, H), Own(lambda x: 2.0))
    run = torch.compile(lambda x: layer(x) + 1, backend="aot_eager", fullgraph=True)
    x = torch.randn(T, H)
    expected = gradients(layer, lambda x: layer(x) + 1, "mxfp8", x)
    assert all(map(torch.equal, gradients(layer, run, "mxfp8", x), expected))


def test_numbers_that_differ_between_forwards_of_one_shape_are_refused():
    numbers = iter(range(1, 9))
    layer = Sequential(ops.Linear(H, H), Own(lambda x: float(next(numbers))))
    run = torch.compile(lambda x: layer(x) + 1, backend="aot_eager", fullgraph=True)
    gradients(layer, run, "mxfp8", torch.randn(T, H))
    with pytest.raises(NotImplementedError, match="Own sets numbers on its context that differ"):
        gradients(layer, run, "mxfp8", torch.randn(T, H))


def test_a_tensor_on_the_context_is_refused():
    layer = Sequential(ops.Linear(H, H), Own(lambda x: x.mean()))
    run = torch.compile(lambda x: layer(x) + 1, backend="aot_eager", fullgraph=True)
    with pytest.raises(NotImplementedError, match="Own sets a tensor on its context, 'number'"):
        gradients(layer, run, "mxfp8", torch.randn(T, H))


class Scaled(ops.Identity):
    """y = x * factor, by attributes of which none is a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = 1.0
        self.set_scale(1.0)
        self._forwards = 0

    def set_scale(self, scale: float) -> None:
        self._scale = scale

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Any) -> Any:
        self._forwards += 1
        return x * self.factor(), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Any) -> Any:
        return dy * self.factor(), {}, {}

    def factor(self) -> float:
        return (self._scale + vars(self).get("_offset", 0.0)) * self.inner.scale * self._forwards


CHANGES: dict[str, Callable[[Sequential], None]] = {
    "nothing": lambda layer: None,
    "private": lambda layer: layer[0].set_scale(2.0),
    "of a module": lambda layer: setattr(layer[0].inner, "scale", 3.0),
    "noted by forward": lambda layer: setattr(layer[0], "_forwards", 10),
    "new": lambda layer: setattr(layer[0], "_offset", 2.0),
}


def test_what_is_assigned_that_is_no_setting_runs_compiled():
    layer, eager = Sequential(Scaled()), Sequential(Scaled())
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(T, H)
    for change in CHANGES.values():
        change(layer)
        change(eager)
        expected = gradients(eager, eager, "bf16", x)
        assert all(map(torch.equal, gradients(layer, run, "bf16", x), expected))


def test_another_module_in_an_operation_is_compiled_anew():
    layer = Sequential(Scaled())
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(T, H)
    assert torch.equal(run(x), x)
    layer[0].inner = nn.Module()
    layer[0].inner.scale = 5.0
    assert torch.equal(run(x), x * 5)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Reads(Own):
    """Its forward reads a number of x."""

    def __init__(self) -> None:
        super().__init__(lambda x: float(x.isfinite().all()) + 1)


class SaysSo(Reads):
    def why_not_traced(self, path: str) -> str | None:
        return "it reads a number of x on the host."


@pytest.mark.parametrize("kind", [Reads, SaysSo])
def test_an_operation_that_reads_numbers_is_an_error_or_says_so_and_runs_as_it_is(kind):
    layer = Sequential(ops.Linear(H, H), kind())

    def forward(x: Tensor) -> Tensor:
        return layer(x) + 1

    x = torch.randn(T, H)
    expected = gradients(layer, forward, "mxfp8", x)
    whole = torch.compile(forward, backend="aot_eager", fullgraph=True)
    error, why = {
        Reads: (torch._dynamo.exc.UserError, "data-dependent"),
        SaysSo: (torch._dynamo.exc.Unsupported, "SaysSo: it reads a number of x on the host"),
    }[kind]
    with pytest.raises(error, match=why):
        gradients(layer, whole, "mxfp8", x)
    if kind is SaysSo:
        torch.compiler.reset()
        partly = torch.compile(forward, backend="aot_eager")
        assert all(map(torch.equal, gradients(layer, partly, "mxfp8", x), expected))


OVER_RANKS: dict[str, Callable[[Any], ops.BasicOperation]] = {
    "Linear": lambda group: ops.Linear(H, H, tensor_parallel="column", group=group),
    "GroupedLinear": lambda group: ops.GroupedLinear(2, H, H, tensor_parallel="row", group=group),
    "ScaledSReLU": lambda group: ops.ScaledSReLU(group=group),
    "AllReduce": ops.AllReduce,
    "Scatter": ops.Scatter,
}
EXTRAS = {"GroupedLinear": {"split_sizes": [T - 1, 1]}, "ScaledSReLU": {"scales": torch.ones(T)}}


@pytest.mark.parametrize("name", OVER_RANKS)
def test_what_exchanges_tensors_with_other_ranks_says_so_and_runs_as_it_is(name, one_rank):
    layer = Sequential(OVER_RANKS[name](one_rank))

    def forward(x: Tensor) -> Tensor:
        return layer(x, **EXTRAS.get(name, {})) + 1

    x = torch.randn(T, H)
    expected = gradients(layer, forward, "mxfp8", x)
    whole = torch.compile(forward, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{name}: its collectives are issued by a process group"):
        gradients(layer, whole, "mxfp8", x)
    torch.compiler.reset()
    assert all(map(torch.equal, gradients(layer, torch.compile(forward, backend="aot_eager"), "mxfp8", x), expected))


@pytest.mark.slow
def test_a_compiled_model_is_freed_with_its_plans():
    layers = [Sequential(ops.Linear(H, H), ops.SiLU())]
    run = torch.compile(lambda x: layers[0](x) + 1, backend="aot_eager", fullgraph=True)
    gradients(layers[0], run, "mxfp8", torch.randn(T, H))
    plans = [weakref.ref(plan) for plan in layers[0].layout().stages[0].runner.traced.values()]
    assert len(plans) == 1
    torch.compiler.reset()
    layers.clear()
    gc.collect()
    assert plans[0]() is None


def names_in_profile(run) -> dict[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("fuser::")}


def test_a_profiler_shows_eager_and_compiled_runs_by_the_same_names():
    model = Sequential(
        ops.RMSNorm(16), ops.Router(16, 4, topk=2), ops.Dispatch(4), ops.GroupedLinear(4, 16, 32), ops.ScaledSwiGLU(),
        ops.GroupedLinear(4, 16, 16), ops.Combine(),
    )  # fmt: skip
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, name = torch.randn(8, 16), "fuser::rms_norm_router_grouped_mlp"
    compiled(x).sum().backward()
    expected = {name: 1, f"{name}_backward": 1}
    assert names_in_profile(lambda: compiled(x).sum().backward()) == expected
    with autocast("fp8_delayed"):
        assert names_in_profile(lambda: model(x).sum().backward()) == expected
    with torch.no_grad():
        assert names_in_profile(lambda: (model(x), model(x))) == {name: 2}
        assert names_in_profile(lambda: Sequential(ops.SwiGLU(), ops.GELU())(x)) == {"fuser::swi_glu_gelu": 1}
