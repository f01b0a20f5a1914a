"""autocast(batch_invariant=True): a row's output bits do not depend on the other rows, nor on gradients being enabled.

On a GPU: `python -m pytest tests/test_batch_invariant.py -m gpu -n 4`; a test takes up to 24 GB.
"""
# T rows or tokens, H hidden size, F expert size, E experts

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.schedule import recipe_named
from bench.usage import UsageError
from fuser import Sequential, autocast, checkpoint, ops
from fuser.graph import make_graphed_callables
from ops.kernels.grouped_gemm.high_precision import grouped_gemm_tn
from ops.kernels.grouped_gemm.measured_tiles import Gemm
from ops.kernels.grouped_gemm.tile_rules import m_grouped_config
from ops.kernels.grouped_gemm.tile_rules_float8 import m_grouped_float8_config
from ops.lora import LoRALinear
from recipes import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    HighPrecision,
    MixedScaling,
    MXFP4BlockScaling,
    NVFP4BlockScaling,
    Role,
)
from recipes.recipe import as_batch_invariant
from recipes.stack import current_recipe
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.splits import Splits
from tests.grouped_cases import tiles_of_groups
from tests.reference import assert_same_bits

RECIPES = {
    "bf16": HighPrecision(),
    "mxfp8": "mxfp8",
    "fp8_block": "fp8_block",
    "fp8_rowwise": "fp8_rowwise",
    "mxfp4": MXFP4BlockScaling(),
    "nvfp4 of rows": NVFP4BlockScaling(row_scaled_activation=True),
    "mxfp8 in forward": MixedScaling.forward_only("mxfp8"),
}
REFUSED = {
    "current": ("fp8_current", "x has one scale for all rows"),
    "delayed": ("fp8_delayed", "x has one scale for all rows"),
    "nvfp4": ("nvfp4", "x has one amax for all rows"),
    "square blocks of x": (
        Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
        "x has a scale for each 128x128 values",
    ),
    "mixed": (MixedScaling("fp8_current", "mxfp8", "mxfp8"), "x has one scale for all rows"),
}


class Size(NamedTuple):
    T: int
    H: int
    F: int
    E: int
    topk: int


def same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    assert_same_bits({what: actual}, {what: expected})


SMALL = Size(T=45, H=64, F=32, E=6, topk=2)
ODD = Size(T=37, H=77, F=13, E=5, topk=3)
QWEN = Size(T=4096, H=2048, F=768, E=128, topk=8)


def layer_of(kind: str, size: Size, dtype: torch.dtype, device: str) -> Sequential:
    _, H, F, E, topk = size
    about = {"dtype": dtype, "device": device}
    experts = (
        ops.GroupedLinear(E, H, 2 * F, bias=False, **about),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(E, F, H, bias=True, scale_bias=True, **about),
    )
    torch.manual_seed(1)
    made = {
        "linear": lambda: Sequential(ops.Linear(H, F, **about), ops.GELU()),
        "lora": lambda: Sequential(LoRALinear(ops.Linear(H, F, **about), 4, 8.0, 0.0)),
        "rms_norm": lambda: Sequential(ops.RMSNorm(H, **about), ops.Linear(H, F, bias=False, **about)),
        "layer_norm": lambda: Sequential(ops.LayerNorm(H, **about), ops.L2Normalization()),
        "grouped_mlp": lambda: Sequential(*experts),
        "unfused": lambda: Sequential(*experts, fusions=()),
        "split_path": lambda: Sequential(*experts, path="split"),
        "moe": lambda: Sequential(
            ops.MakeExtraOutput("residual"),
            ops.RMSNorm(H, **about),
            ops.Router(H, E, topk, normalize_probs=True, **about),
            ops.Dispatch(E),
            *experts,
            ops.Combine(),
            ops.AddExtraInput("residual"),
        ),
        "sigmoid": lambda: Sequential(
            ops.Router(
                H, E, topk, score_function="sigmoid", expert_bias=True, normalize_probs=True, bias=True, **about
            ),
            ops.Dispatch(E),
            ops.GroupedLinear(E, H, H, bias=False, **about),
            ops.ScaledSReLU(),
            ops.GroupedLinear(E, H, H, bias=False, **about),
            ops.Combine(),
        ),
    }
    layer = made[kind]()
    for parameter in layer.parameters():  # biases, and the adapter's second factor, are zero
        torch.nn.init.normal_(parameter, std=0.2)
    return layer


GROUPED = ("grouped_mlp", "unfused", "split_path")
KINDS = ("linear", "lora", "rms_norm", "layer_norm", *GROUPED, "moe", "sigmoid")


class Batch(NamedTuple):
    """Rows with the group of each, and a factor; sorted by group where the layer is grouped."""

    x: Tensor
    group: Tensor
    scales: Tensor

    def rows(self, chosen: Tensor, grouped: bool) -> tuple["Batch", Tensor]:
        """The chosen rows as a batch, and their order in it."""
        if grouped:
            chosen = chosen[self.group.cpu()[chosen].sort(stable=True)[1]]
        at = chosen.to(self.x.device)
        return Batch(*(tensor[at].contiguous() for tensor in self)), chosen


def batch_of(size: Size, dtype: torch.dtype, device: str) -> Batch:
    group = torch.randint(size.E, (size.T,)).sort()[0]
    group[group == 1] = 0  # a group without rows
    x = torch.randn(size.T, size.H) * torch.rand(size.T, 1).mul(6).sub(3).exp()  # of many orders of magnitude
    x = x / 20 if dtype == torch.float16 else x
    return Batch(x.to(device, dtype), group.to(device), torch.rand(size.T).to(device))


def choices(T: int) -> Iterator[Tensor]:
    """Some rows: all in another order, single ones, the parts of a batch that is split at random, and random ones."""
    yield torch.randperm(T)
    yield from (torch.tensor([row]) for row in random.sample(range(T), 3))
    yield from torch.arange(T).tensor_split(sorted(random.sample(range(1, T), 3)))
    yield torch.randperm(T)[: T // 3]


def runner(layer: Sequential, kind: str, size: Size) -> Callable[[Batch], Tensor]:
    def run(batch: Batch) -> Tensor:
        if kind not in GROUPED:
            return layer(batch.x)
        sizes = torch.bincount(batch.group, minlength=size.E)
        return layer(batch.x, split_sizes=sizes, scales=batch.scales)

    return run


def assert_rows_have_their_bits(kind: str, recipe: object, size: Size, dtype: torch.dtype, device: str) -> None:
    layer, batch = layer_of(kind, size, dtype, device), batch_of(size, dtype, device)
    run = runner(layer, kind, size)
    with autocast(RECIPES.get(recipe, recipe), batch_invariant=True):
        layer.train()
        whole = run(batch._replace(x=batch.x.clone().requires_grad_()))
        assert whole.requires_grad and whole.isfinite().all()
        layer.eval()
        with torch.no_grad():
            same_bits(run(batch), whole.detach(), "without gradients")
            for chosen in choices(size.T):
                part, order = batch.rows(chosen, kind in GROUPED)
                expected = whole.detach()[order.to(device)]
                same_bits(run(part), expected, f"{len(chosen)} rows from {int(chosen[0])}")
        layer.train()
        part, order = batch.rows(torch.randperm(size.T)[:7], kind in GROUPED)
        trained = run(part._replace(x=part.x.clone().requires_grad_())).detach()
        same_bits(trained, whole.detach()[order.to(device)], "7 rows with gradients")
    if dtype == torch.float16:
        return  # whose gradients may be too large
    whole.float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@pytest.fixture(autouse=True)
def memory_of_other_processes() -> Iterator[None]:
    """Give back what a test on a GPU took, up to 24 GB, since other processes test there too."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------- the promise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_its_bits_in_every_batch(kind, dtype):
    assert_rows_have_their_bits(kind, "bf16", SMALL, dtype, "cpu")


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
@pytest.mark.parametrize("kind", ["linear", "moe"])
def test_a_row_has_its_bits_under_every_recipe_of_rows(kind, recipe):
    assert_rows_have_their_bits(kind, recipe, SMALL, torch.float32, "cpu")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        *[pytest.param(recipe, torch.float32, id=recipe) for recipe in RECIPES],
        *[pytest.param("bf16", dtype, id=str(dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float64)],
    ],
)
@pytest.mark.parametrize("size", [ODD, SMALL._replace(H=1000, T=150)], ids=["odd", "wide"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_its_bits_of_all_sizes(kind, recipe, size, dtype):
    assert_rows_have_their_bits(kind, recipe, size, dtype, "cpu")


@pytest.mark.parametrize("size", [ODD, SMALL._replace(F=1), SMALL._replace(H=1)], ids=["odd", "F1", "H1"])
def test_a_row_has_its_bits_with_odd_features(size):
    assert_rows_have_their_bits("grouped_mlp", "bf16", size, torch.float64, "cpu")
    assert_rows_have_their_bits("linear", "bf16", size, torch.float32, "cpu")


@pytest.mark.parametrize(
    "make", [ops.GLU, ops.QGEGLU, ops.SwiGLU, ops.SiLU, ops.GELU, ops.QGELU, ops.SiTUGLU, ops.ClampedSwiGLU]
)
def test_a_row_of_an_activation_has_its_bits_wherever_it_lies(make):
    x = torch.randn(33, 46) * 4
    with autocast(batch_invariant=True):
        y = make()(x)
        for t in range(33):
            same_bits(make()(x[t : t + 1].clone()), y[t : t + 1], f"row {t}")


@pytest.mark.parametrize(
    "make", [lambda n: ops.RMSNorm(n), lambda n: ops.LayerNorm(n), lambda n: ops.L2Normalization()]
)
def test_one_wide_row_is_summed_as_many_are(make):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, norm = torch.randn(16, 40_000), make(40_000)
        with autocast(batch_invariant=True), torch.no_grad():
            same_bits(torch.cat([norm(row.clone()) for row in x.split(1)]), norm(x), "one by one")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("make", [partial(ops.LayerNorm, 64), partial(ops.RMSNorm, 64), ops.L2Normalization])
def test_a_row_of_a_norm_has_its_bits_whatever_its_strides(make):
    layer, of_convolution = Sequential(make()), torch.randn(2, 64, 10)  # [batch, features, time]
    with autocast(batch_invariant=True), torch.no_grad():
        together = layer(of_convolution.transpose(1, 2))
        each = [layer(of_convolution[:, :, t].contiguous()) for t in range(10)]
    same_bits(together, torch.stack(each, 1), "rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_grouped_linear_has_the_bits_of_linears(dtype):
    grouped = ops.GroupedLinear(3, 40, 24, dtype=dtype)
    torch.nn.init.normal_(grouped.bias)
    sizes, x = [5, 0, 9], torch.randn(14, 40, dtype=dtype)
    with autocast(batch_invariant=True), torch.no_grad():
        y = grouped(x, split_sizes=sizes)
        for group, rows in ((0, slice(0, 5)), (2, slice(5, 14))):
            linear = ops.Linear(40, 24, dtype=dtype)
            linear.weight.copy_(grouped.weight[group])
            linear.bias.copy_(grouped.bias[group])
            same_bits(linear(x[rows]), y[rows], f"group {group}")


def test_rows_past_the_sum_are_zero_and_change_nothing():
    layer = ops.GroupedLinear(2, 16, 8)
    x = torch.randn(10, 16)
    with autocast(batch_invariant=True):
        y = layer(x, split_sizes=[3, 4])
        same_bits(layer(x[:7], split_sizes=[3, 4]), y[:7], "without a tail")
    assert not y[7:].any()


def test_results_are_close_to_those_without():
    layer, batch = layer_of("moe", SMALL, torch.float32, "cpu"), batch_of(SMALL, torch.float32, "cpu")
    with autocast(batch_invariant=True):
        y = layer(batch.x)
    torch.testing.assert_close(y, layer(batch.x), rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("case", REFUSED)
def test_a_recipe_whose_scales_span_rows_is_refused(case):
    recipe, reason = REFUSED[case]
    with pytest.raises(ValueError, match=f"batch_invariant=True under .* cannot be promised: {reason}"):
        autocast(recipe, batch_invariant=True)


class OfUnknownFormat(Quantizer):
    def quantize(self, x, *, rowwise=True, columnwise=False):
        raise NotImplementedError


def unknown(role: Role) -> Quantizer:
    return OfUnknownFormat()


def test_a_quantizer_of_unknown_format_is_refused():
    with pytest.raises(ValueError, match="OfUnknownFormat has no copy_spec"):
        autocast(CustomRecipe(unknown), batch_invariant=True)


def test_a_recipe_is_refused_where_a_context_inside_has_it():
    inner = autocast("fp8_current")
    with autocast(batch_invariant=True), pytest.raises(ValueError, match="'fp8_current' cannot be promised"), inner:
        pass
    assert current_recipe() == HighPrecision()


def test_an_operation_of_such_a_recipe_is_refused_before_it_runs():
    layer = Sequential(ops.Linear(16, 16).set_recipe(Float8CurrentScaling()))
    with autocast(batch_invariant=True), pytest.raises(ValueError, match="'fp8_current' cannot be promised"):
        layer(torch.randn(3, 16))


def test_a_recipe_with_the_field_alone_is_refused_when_it_runs():
    layer = Sequential(ops.Linear(16, 16))
    with pytest.raises(ValueError, match="cannot be promised"), autocast(Float8CurrentScaling(batch_invariant=True)):
        layer(torch.randn(3, 16))
    layer[0].set_recipe(Float8CurrentScaling(batch_invariant=True))
    with pytest.raises(ValueError, match="cannot be promised"):
        layer(torch.randn(3, 16))


def test_dropout_is_refused_in_training_alone():
    layer, x = Sequential(ops.Linear(16, 16), ops.Dropout(0.5)), torch.randn(3, 16)
    with autocast(batch_invariant=True):
        with pytest.raises(ValueError, match=r"Dropout: in training it drops elements by their position.*Call eval"):
            layer(x)
        layer.eval()
        same_bits(layer(x[:1]), layer(x)[:1], "in evaluation")


def test_dropout_of_an_adapter_is_refused_in_training_alone():
    layer, x = Sequential(LoRALinear(ops.Linear(16, 16), 4, 8.0, 0.5)), torch.randn(3, 16)
    with autocast(batch_invariant=True):
        with pytest.raises(ValueError, match="LoRALinear: in training its dropout is by the position"):
            layer(x)
        layer.eval()(x)


@pytest.mark.parametrize("make", [lambda: ops.Dropout(0.5), lambda: LoRALinear(ops.Linear(16, 16), 4, 8.0, 0.5)])
def test_whether_dropout_is_refused_follows_the_mode_of_its_operation(make):
    layer, x = Sequential(make()), torch.randn(3, 16)
    for around, own in product((True, False), repeat=2):
        layer.train(around)[0].train(own)
        with autocast(batch_invariant=True):
            if own:
                with pytest.raises(ValueError, match="in training"):
                    layer(x)
            else:
                layer(x)


def test_sums_over_ranks_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        layers = [
            ops.Linear(16, 16, tensor_parallel="row", group=group),
            ops.AllReduce(group),
            ops.ReduceScatter(group),
        ]
        for layer in layers:
            with (
                autocast(batch_invariant=True),
                pytest.raises(ValueError, match="a sum over ranks is made in the order"),
            ):
                layer(torch.randn(3, 16))
        with autocast(batch_invariant=True):
            ops.Linear(16, 16, tensor_parallel="column", group=group)(torch.randn(3, 16))
    finally:
        dist.destroy_process_group()


def test_float64_on_a_gpu_is_refused():
    says = Sequential(ops.Linear(16, 16, dtype=torch.float64)).explain(
        recipe=as_batch_invariant(HighPrecision()), device="cuda"
    )
    assert "not batch invariant, so that a call raises ValueError: float64 has no grouped kernel on CUDA" in says


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_argument_is_a_bool(value):
    with pytest.raises(TypeError, match="batch_invariant is"):
        autocast(batch_invariant=value)


# ---------------------------------------------------------------------------------------------------- where it applies


def test_it_is_off_by_default_and_part_of_the_plan():
    layer = Sequential(ops.Linear(16, 16))
    with autocast("mxfp8") as off, autocast("mxfp8", batch_invariant=True) as on:
        assert not off.batch_invariant and on.batch_invariant and off != on
        layer(torch.randn(3, 16))
    with autocast("mxfp8"):
        layer(torch.randn(3, 16))
    (stage,) = layer.layout().stages
    assert [p.request.recipe.batch_invariant for p in stage.runner.programs.values()] == [True, False]


def test_contexts_inside_have_it_until_it_ends():
    with autocast(batch_invariant=True):
        with autocast("mxfp8") as inner, autocast(enabled=False) as innermost:
            assert inner.batch_invariant and innermost.batch_invariant
        assert current_recipe().batch_invariant
    assert not current_recipe().batch_invariant
    assert not autocast(HighPrecision())._recipe.batch_invariant


def test_a_decorated_function_has_it():
    @autocast("mxfp8", batch_invariant=True)
    def recipe():
        return current_recipe()

    assert recipe().batch_invariant and recipe().batch_invariant


def test_operations_with_a_recipe_of_their_own_have_it():
    layer = Sequential(ops.Linear(32, 8).set_recipe("mxfp8"))
    x = torch.randn(40, 32)
    with autocast(batch_invariant=True):
        says = layer.explain()
        y = layer(x)
        same_bits(layer(x[3:4]), y[3:4], "a row")
    assert "batch invariant: " in says and "batch invariant" not in layer.explain()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_is_recomputed_with_it(use_reentrant):
    seen = []

    class Watched(ops.Identity):
        def fuser_forward(self, ctx, x, extras):
            seen.append(ctx.recipe.batch_invariant)
            return super().fuser_forward(ctx, x, extras)

    layer = Sequential(ops.Linear(16, 16), Watched())
    x = torch.randn(3, 16, requires_grad=True)
    with autocast("mxfp8", batch_invariant=True):
        y = checkpoint(layer, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert seen == [True, True]


def test_a_copied_layer_has_its_bits():
    layer = layer_of("moe", SMALL, torch.float32, "cpu")
    batch = batch_of(SMALL, torch.float32, "cpu")
    with autocast(batch_invariant=True):
        same_bits(copy.deepcopy(layer)(batch.x[:5]), layer(batch.x)[:5], "of a copy")


@pytest.mark.rest
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_functions_have_it(inside):
    layer, batch = layer_of("moe", SMALL, torch.float32, "cpu"), batch_of(SMALL, torch.float32, "cpu")
    context = partial(autocast, "mxfp8", batch_invariant=True)

    def within(x):
        with context():
            return layer(x)

    def nested(x):
        with autocast("mxfp8"):
            return layer(x)

    compiled = torch.compile(within if inside else nested, fullgraph=True, backend="aot_eager")
    with context():
        whole = layer(batch.x)
        plain = compiled(batch.x)
        same_bits(plain.detach(), whole.detach(), "compiled")
        same_bits(compiled(batch.x[:9]).detach(), whole.detach()[:9], "nine rows, compiled")
    if not inside:
        with autocast("mxfp8"):
            eager = layer(batch.x)
        same_bits(compiled(batch.x).detach(), eager.detach(), "compiled, and not batch invariant")


# ----------------------------------------------------------------------------------------------------- tiles and words


def test_the_number_of_rows_chooses_no_tile():
    about = {
        "out_dtype": torch.bfloat16, "tf32": False, "aligned": True, "capability": (9, 0), "batch_invariant": True,
    }  # fmt: skip
    for (descriptors, dtype), gluon in product(
        ((True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float32)), (False, True)
    ):
        settings = about | {"descriptors": descriptors, "gluon": gluon}
        assert len({m_grouped_config(T, 8, dtype, **settings) for T in (1, 100, 767, 768, 10**5)}) == 1
    codes = {"out_dtype": torch.bfloat16, "descriptors": True, "capability": (9, 0), "batch_invariant": True}
    kinds = (("square", True), ("vector", False), ("vector", True), ("row", True))
    for (layout, promote), gluon in product(kinds, (False, True)):
        about = codes | {"layout": layout, "promote": promote, "gluon": gluon}
        assert len({m_grouped_float8_config(T, 8, **about) for T in (1, 767, 768, 10**5)}) == 1


def test_explain_says_what_it_excludes():
    layer = layer_of("moe", QWEN._replace(E=4, topk=2, H=64, F=64), torch.bfloat16, "cpu")
    on = layer.explain(recipe=as_batch_invariant(HighPrecision()), device="cuda")
    off = layer.explain(recipe="bf16", device="cuda")
    assert "excluded in forward: tiles chosen by the number of rows, measured tiles, split-K, library products" in on
    assert "logits by the grouped GEMM (Triton)" in on and "logits by" not in off
    assert "dgrad below 96 rows" in on and "fprop and dgrad below 96 rows" in off and "fprop" not in on
    no_grad = "in no-grad mode apart from FC1: A batch-invariant recipe multiplies with the kernel of training."
    assert no_grad in on and no_grad not in off
    linear = Sequential(ops.Linear(16, 16))
    assert "fprop by grouped GEMM of one group (Triton), else torch" in linear.explain(
        recipe=as_batch_invariant(HighPrecision()), device="cuda"
    )
    assert "fprop by products of one row, else torch" in linear.explain(recipe=as_batch_invariant(HighPrecision()))


def test_the_benchmark_of_recipes_takes_it_by_name():
    assert recipe_named("batch_invariant-mxfp8").batch_invariant
    with pytest.raises(UsageError, match="'fp8_current' cannot be promised"):
        recipe_named("batch_invariant-fp8_current")


# --------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_its_bits_on_a_gpu(kind, recipe):
    assert_rows_have_their_bits(kind, recipe, QWEN, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [SMALL._replace(T=700), ODD, ODD._replace(H=2880, F=72)], ids=["small", "odd", "wide"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_its_bits_on_a_gpu_of_other_sizes(kind, size, dtype):
    assert_rows_have_their_bits(kind, "bf16", size, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8_block", "fp8_rowwise"])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 96, 128, 129, 257, 1000, 4096])
def test_rows_of_an_expert_have_their_bits_for_every_number(recipe, T):
    layer = layer_of("grouped_mlp", QWEN._replace(E=4), torch.bfloat16, "cuda").eval()
    x, scales = torch.randn(3 * 4096, 2048, dtype=torch.bfloat16, device="cuda"), torch.rand(3 * 4096, device="cuda")
    with autocast(RECIPES[recipe], batch_invariant=True), torch.no_grad():
        whole = layer(x, split_sizes=torch.tensor([4096, 0, 4096, 4096], device="cuda"), scales=scales)
        rows = torch.cat([torch.randperm(4096, device="cuda")[:T] + first for first in (0, 4096, 2 * 4096)])
        part = layer(x[rows], split_sizes=torch.tensor([T, 0, T, T], device="cuda"), scales=scales[rows])
        same_bits(part, whole[rows], f"{T} rows an expert")
        alone = layer(x[rows[:T]], split_sizes=torch.tensor([T, 0, 0, 0], device="cuda"), scales=scales[rows[:T]])
        same_bits(alone, whole[rows[:T]], f"{T} rows of one expert")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["linear", "rms_norm", "layer_norm", "moe"])
def test_where_x_lies_changes_no_bit(kind, dtype):
    size = SMALL._replace(T=300, H=256, F=128)
    layer, batch = layer_of(kind, size, dtype, "cuda").eval(), batch_of(size, dtype, "cuda")
    memory = torch.empty(batch.x.numel() + 1, dtype=dtype, device="cuda")
    wide = torch.empty(size.T, size.H + 3, dtype=dtype, device="cuda")
    with autocast(batch_invariant=True), torch.no_grad():
        y = layer(batch.x)
        same_bits(layer(memory[1:].view(size.T, size.H).copy_(batch.x)), y, "an odd address")
        same_bits(layer(wide[:, 3:].copy_(batch.x)), y, "rows apart")
        same_bits(layer(wide[:, 3:].copy_(batch.x)[7:8]), y[7:8], "one of them")


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 50, 3000])
def test_a_measured_tile_is_not_used(T):
    weight = torch.randn(4, 512, 256, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(T, 256, dtype=torch.bfloat16, device="cuda")
    splits = Splits.make([T, 0, 0, 0], rows=T, device="cuda")
    y = grouped_gemm_tn(x, weight, splits, batch_invariant=True)
    gemm = Gemm("TN", torch.bfloat16, torch.bfloat16, False, 4, 512, 256)
    with tiles_of_groups(10, T, gemm):  # half as high
        same_bits(grouped_gemm_tn(x, weight, splits, batch_invariant=True), y, "beside a measured tile")


@pytest.mark.gpu
def test_a_graph_replays_it():
    torch.utils.deterministic.fill_uninitialized_memory = False
    layer = layer_of("grouped_mlp", QWEN._replace(E=8), torch.bfloat16, "cuda").eval()
    batch = batch_of(QWEN._replace(E=8, T=600), torch.bfloat16, "cuda")
    sizes = torch.bincount(batch.group, minlength=8)
    with autocast("mxfp8", batch_invariant=True), torch.no_grad():
        whole = layer(batch.x, split_sizes=sizes, scales=batch.scales)
        graphed = make_graphed_callables(
            layer, (batch.x,), sample_kwargs={"split_sizes": sizes, "scales": batch.scales}
        )
        found = graphed(batch.x, split_sizes=sizes, scales=batch.scales)
    same_bits(found, whole, "replayed")
