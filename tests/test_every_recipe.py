"""What every recipe promises: both paths, fused and unfused, kept weights, checkpoints, states, exact products."""

import itertools

import pytest
import torch
from torch import Tensor

from fuser import Sequential, autocast, checkpoint, constant_weights, ops
from recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    HighPrecision,
    MixedScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Role,
    Splits,
)
from tests.pairwise import rest

RECIPES = {
    "high-precision": HighPrecision(),
    "delayed": DelayedScaling(amax_history_len=3),
    "delayed-margin": DelayedScaling(margin=1, amax_history_len=2, amax_compute_algo="most_recent"),
    "current": Float8CurrentScaling(),
    "current-pow2": Float8CurrentScaling(power_2_scale=True, amax_epsilon=0.5),
    "block": Float8BlockScaling(),
    "block-f32": Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID),
    "block-1d": Float8BlockScaling(w_block_scaling_dim=1),
    "rowwise": Float8RowwiseScaling(),
    "rowwise-pow2": Float8RowwiseScaling(Format.HYBRID, power_2_scale=True),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8-hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "mxfp4": MXFP4BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4-plain": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    "nvfp4-four-over-six": NVFP4BlockScaling(four_over_six="all"),
    "nvfp4-rows": NVFP4BlockScaling(row_scaled_activation=True),
    "custom": CustomRecipe(MXFP8BlockScaling().quantizer),
    "mixed": MixedScaling("mxfp8", "fp8_block", "fp8_current", "fp8_block", "mxfp8", "mxfp8"),
    "mixed-dequantized": MixedScaling.forward_only("fp8_current", backward="dequantized"),
}
EVERY = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
STATES = [name for name, recipe in RECIPES.items() if isinstance(recipe, DelayedScaling)]
# Of every two recipes `make test` takes neighbours, and each with one that has states.
OF_TWO = [
    pair if "delayed" in pair or pair in itertools.pairwise(RECIPES) else rest(*pair)
    for pair in itertools.permutations(RECIPES, 2)
]
SIZES = (5, 0, 17, 1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


def mlp(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **settings) -> Sequential:
    torch.manual_seed(11)
    factory = {"device": device, "dtype": dtype}
    layers = ops.GroupedLinear(4, 48, 128, **factory), ops.ScaledSwiGLU(), ops.GroupedLinear(4, 64, 48, **factory)
    return Sequential(*layers, **settings)


def step(model: Sequential, recipe: Recipe, seed: int = 0, *, run=None, between=lambda: None) -> dict[str, Tensor]:
    """One step on random data; rows past the sum hold NaN."""
    parameter = next(model.parameters())
    like = {"dtype": parameter.dtype, "device": parameter.device}
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(29, 48, generator=generator).to(**like) for _ in range(2))
    scales = torch.rand(29, generator=generator).to(**like)
    for tensor in (x, dy):
        tensor[sum(SIZES) :] = float("nan")
    x.requires_grad_()
    scales.requires_grad_()
    model.zero_grad()
    torch.manual_seed(seed)
    sizes = torch.tensor(SIZES, device=parameter.device)
    with autocast(recipe):
        y = (run or model)(x, split_sizes=sizes, scales=scales)
    between()
    y.backward(dy)
    results = {"y": y.detach(), "dx": x.grad, "dscales": scales.grad}
    return results | {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@EVERY
@ON_EACH_DEVICE
def test_rows_of_no_group_and_empty_groups(recipe, device):
    result = step(mlp(device), recipe)
    for name in ("y", "dx", "dscales"):
        assert result[name].isfinite().all() and result[name][sum(SIZES) :].eq(0).all(), name
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert result[name].isfinite().all() and result[name][1].eq(0).all() and result[name][0].ne(0).any(), name


@EVERY
def test_both_paths_agree_bit_for_bit_on_the_cpu(recipe):
    grouped, split = mlp(), mlp(path="split")
    for seed in range(3):
        assert_same(step(grouped, recipe, seed), step(split, recipe, seed))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


@EVERY
@ON_EACH_DEVICE
def test_codes_and_scales_are_those_of_each_group_alone(recipe, device):
    x = torch.randn(29, 48, device=device, dtype=torch.bfloat16)
    splits = Splits.make(SIZES, rows=29, device=device)
    for role in (Role.INPUT, Role.GRAD_OUTPUT):
        quantizer = recipe.quantizer(role)
        if quantizer is None:
            continue
        quantizer = quantizer.seeded(torch.device(device))
        grouped = quantizer.quantize_grouped(x, splits, rowwise=True, columnwise=True)
        for group, (member, part) in enumerate(zip(grouped.unbind(), x[:23].split(SIZES), strict=True)):
            alone = quantizer.for_group(group).quantize(part, rowwise=True, columnwise=True)
            for mine, other in zip(member.tensors(), alone.tensors(), strict=True):
                if mine is not None:
                    assert torch.equal(as_bytes(mine), as_bytes(other)), group


@EVERY
@ON_EACH_DEVICE
def test_fused_and_unfused_agree(recipe, device):
    fused, unfused = mlp(device), mlp(device, fusions=[])
    for seed in range(2):
        assert_same(step(fused, recipe, seed), step(unfused, recipe, seed))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch.compile's own
@EVERY
@ON_EACH_DEVICE
def test_torch_compile_changes_no_bit(recipe, device):
    torch.compiler.reset()  # what was compiled for other recipes counts against a limit
    plain, compiled = mlp(device), mlp(device)
    run = torch.compile(compiled, backend="aot_eager")
    for seed in range(2):
        assert_same(step(plain, recipe, seed), step(compiled, recipe, seed, run=run))


@pytest.mark.gpu
@pytest.mark.gpu2
@EVERY
def test_another_gpu_than_the_current_one_gives_the_same_bits(recipe):
    here, there = mlp("cuda:0"), mlp("cuda:1")
    for seed in range(3):  # in the third the current GPU repeats recorded launches; the other launches anew
        found = step(there, recipe, seed)
        assert {tensor.get_device() for tensor in found.values()} == {1}
        assert torch.cuda.current_device() == 0
        assert_same(step(here, recipe, seed), {name: tensor.to("cuda:0") for name, tensor in found.items()})


@EVERY
def test_what_is_kept_of_weights_changes_no_bit(recipe):
    """Within the scope; of delayed scaling the first step alone, after which the weights' scales would move."""
    kept, fresh = mlp(), mlp()
    with constant_weights(kept):
        for seed in range(1 if recipe in map(RECIPES.get, STATES) else 3):
            assert_same(step(kept, recipe, seed), step(fresh, recipe, seed))


@EVERY
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_changes_no_bit(recipe, use_reentrant):
    plain, saving = mlp(), mlp()

    def recomputed(x, **extras):
        return checkpoint(lambda x, scales: saving(x, split_sizes=extras["split_sizes"], scales=scales), x,
                          extras["scales"], use_reentrant=use_reentrant)  # fmt: skip

    for seed in range(3):
        assert_same(step(plain, recipe, seed), step(saving, recipe, seed, run=recomputed))


@pytest.mark.parametrize("other", ["high-precision", "current", "nvfp4"])
@EVERY
def test_another_recipe_in_between_leaves_no_trace(recipe, other):
    switched, alone = mlp(), mlp()
    for seed in range(2):
        assert_same(step(switched, recipe, seed), step(alone, recipe, seed))
        if recipe != RECIPES[other]:
            step(switched, RECIPES[other], 9)


# ------------------------------------------------------------------------------------------------------- products


def exact_product(layout: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """In float64: the product of dequantized operands, and the sum of the products' magnitudes."""
    a = a.T if layout == "NT" else a
    b = b.T if layout == "TN" else b
    return a @ b, a.abs() @ b.abs()


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_those_of_the_dequantized_operands(recipe, dtype):
    """|error| <= K 2^-24 sum |a b| + half an ulp of the output, each element; wgrad of transformed operands, too."""
    op = ops.Linear(200, 40, bias=False, dtype=dtype)
    quantizers = {role: recipe.quantizer(role) for role in Role}
    x, dy = torch.randn(50, 200).to(dtype).requires_grad_(), torch.randn(50, 40).to(dtype)
    torch.manual_seed(5)
    with autocast(recipe):
        y = op(x)
    y.backward(dy)
    torch.manual_seed(5)  # the one seed that a stochastic cast draws
    operands = {}
    for role, tensor in ((Role.INPUT, x), (Role.WEIGHT, op.weight), (Role.GRAD_OUTPUT, dy)):
        quantizer = quantizers[role]
        tensor = tensor.detach()
        for columnwise in (False, True):
            operands[role, columnwise] = tensor.double()
        if quantizer is not None:
            cast = quantizer.quantize(tensor, rowwise=True, columnwise=True)
            for columnwise in (False, True):
                operand = cast.operand(columnwise, torch.float64)
                alpha = 1.0 if operand.alpha is None else operand.alpha.double()
                operands[role, columnwise] = operand.values.double() * alpha
    products = {
        "TN": (y, Role.INPUT, Role.WEIGHT), "NN": (x.grad, Role.GRAD_OUTPUT, Role.WEIGHT),
        "NT": (op.weight.grad, Role.GRAD_OUTPUT, Role.INPUT),
    }  # fmt: skip
    for layout, (found, first, second) in products.items():
        a, b = operands[first, layout == "NT"], operands[second, layout != "TN"]
        exact, magnitude = exact_product(layout, a, b)
        length = a.shape[0] if layout == "NT" else a.shape[1]
        half_ulp = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal
        # 2^-22: alpha is rounded, multiplied and applied in float32
        bound = (length * 2.0**-24 + 2.0**-22) * magnitude + half_ulp
        assert ((found.detach().double() - exact).abs() <= bound).all(), layout


SQNR = {
    "E4M3 x E4M3": (Float8CurrentScaling(fp8_format=Format.E4M3), 27.5),
    "E4M3 x E4M3, block": (Float8BlockScaling(), 27.5),
    "E4M3 x E4M3, rowwise": (Float8RowwiseScaling(), 27.5),
    "E4M3 x E4M3, mxfp8": (MXFP8BlockScaling(), 27.5),
    "E4M3 x E5M2": (MixedScaling("fp8_current", Float8CurrentScaling(fp8_format=Format.E5M2)), 23.5),
    "nvfp4": (NVFP4BlockScaling(), 16.0),
}


@pytest.mark.parametrize(("recipe", "floor"), SQNR.values(), ids=SQNR)
@ON_EACH_DEVICE
def test_products_of_random_matrices_are_as_exact_as_their_formats(recipe, floor, device):
    op = ops.Linear(1024, 1024, bias=False, dtype=torch.bfloat16, device=device)
    torch.nn.init.normal_(op.weight)
    x = torch.randn(128, 1024, dtype=torch.bfloat16, device=device)
    with autocast(recipe), torch.no_grad():
        y = op(x).double()
    exact = x.double() @ op.weight.detach().double().T
    noise = (y - exact).square().sum()
    assert 10 * torch.log10(exact.square().sum() / noise).item() >= floor


# ---------------------------------------------------------------------------------------------------------- state


@EVERY
def test_a_state_dict_has_what_the_recipe_keeps(recipe):
    model = mlp()
    before = set(model.state_dict())
    step(model, recipe)
    extra = set(model.state_dict()) - before
    assert bool(extra) == isinstance(recipe, DelayedScaling)
    assert all("quantizer_" in name for name in extra)


@pytest.mark.parametrize(("first", "second"), OF_TWO)
def test_strict_loading_between_any_two_recipes(first, second):
    source, target = mlp(), mlp()
    step(source, RECIPES[first])
    step(target, RECIPES[second], 1)
    target.load_state_dict(source.state_dict(), strict=True)
    if first == second or not {first, second} & set(STATES):
        assert_same(step(source, RECIPES[second], 2), step(target, RECIPES[second], 2))


def trained(model: Sequential, optimizer: torch.optim.Optimizer, recipe: Recipe, seeds) -> list[dict[str, Tensor]]:
    results = []
    for seed in seeds:
        results.append(step(model, recipe, seed))
        optimizer.step()
    return results


@EVERY
@pytest.mark.parametrize("store", ["torch", "safetensors"])
def test_two_steps_and_two_after_loading_are_four(recipe, store, tmp_path):
    def fresh():
        model = mlp(dtype=torch.float32)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = fresh()
    trained(model, optimizer, recipe, range(2))
    if store == "torch":
        torch.save(model.state_dict(), tmp_path / "model")
        load = lambda: torch.load(tmp_path / "model")  # noqa: E731
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(model.state_dict(), tmp_path / "model")
        load = lambda: safetensors.load_file(tmp_path / "model")  # noqa: E731
    torch.save(optimizer.state_dict(), tmp_path / "optimizer")
    expected = trained(model, optimizer, recipe, range(2, 4))

    other, other_optimizer = fresh()
    other.load_state_dict(load())
    other_optimizer.load_state_dict(torch.load(tmp_path / "optimizer"))
    for left, right in zip(trained(other, other_optimizer, recipe, range(2, 4)), expected, strict=True):
        assert_same(left, right)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
