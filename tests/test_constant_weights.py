"""constant_weights: each weight is quantized once in the scope, and what ends it."""

import copy
import gc
import sys
import threading
from collections import deque
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fuser
from fuser import Sequential, autocast, checkpoint, constant_weights, count_casts, ops
from recipes import DelayedScaling, MixedScaling, MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from recipes.tensors.scaled_codes import ScaledCodes
from tests.reference import assert_same_bits

RECIPES = {
    "mxfp8": "mxfp8",
    "fp8_delayed": DelayedScaling(amax_history_len=2),
    "fp8_current": "fp8_current",
    "fp8_block": "fp8_block",
    "fp8_rowwise": "fp8_rowwise",
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
EVERY = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
SIZES = [7, 0, 9]


def build(path=None):
    torch.manual_seed(0)
    return Sequential(
        ops.GroupedLinear(3, 32, 64, bias=False), ops.SwiGLU(), ops.GroupedLinear(3, 32, 32), ops.Linear(32, 32),
        path=path,
    )  # fmt: skip


def data(seed=0):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))


def run(model, recipe, seed=0, function=None):
    x = data(seed).requires_grad_()
    with autocast(recipe):
        y = (function or model)(x, split_sizes=SIZES)
    y.square().sum().backward()
    found = {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def silently(model):
    """Changes every weight in a way that nobody can see."""
    for parameter in model.parameters():
        parameter.data.mul_(-2)


def evaluated(model, recipe):
    with torch.no_grad(), autocast(recipe):
        return model(data(), split_sizes=SIZES)


@EVERY
@pytest.mark.parametrize("path", ["grouped", "split"])
def test_weights_are_quantized_once(recipe, path):
    """What changes them in silence is not seen within it, and seen after it."""
    model = build(path)
    with constant_weights(model):
        before = evaluated(model, recipe)
        for linear in (model[0], model[2], model[3]):
            linear.weight.data.mul_(-2)
        assert torch.equal(evaluated(model, recipe), before)
    assert not torch.equal(evaluated(model, recipe), before)


@EVERY
def test_microbatches_have_the_bits_that_they_have_without_it(recipe):
    """Under delayed scaling the first alone: then the scales of the weights would move."""
    kept, plain = build(), build()
    with constant_weights(kept):
        for seed in range(1 if isinstance(recipe, DelayedScaling) else 3):
            assert_same_bits(run(kept, recipe, seed), run(plain, recipe, seed))


def test_a_delayed_scale_of_a_weight_stays_that_of_the_first_cast():
    recipe, model, other = RECIPES["fp8_delayed"], build(), build()
    with constant_weights(model):
        run(model, recipe)
        for _ in range(3):
            other.load_state_dict(model.state_dict())
            for index in (0, 2, 3):
                assert (model[index].quantizer_weight_scale != 1).all(), "it has moved on"
                other[index].quantizer_weight_scale.fill_(1)
            assert_same_bits(run(other, recipe, 1), run(model, recipe, 1))


def test_an_evaluation_makes_only_what_it_reads_and_training_adds_the_rest():
    model = build()
    plain = build()
    with constant_weights(model):
        with torch.no_grad(), autocast("mxfp8"):
            model(data(), split_sizes=SIZES)
        assert_same_bits(run(model, "mxfp8"), run(plain, "mxfp8"))


ENDS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step(),
    "another's": lambda model: torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step(),
    "loading": lambda model: model.load_state_dict(model.state_dict()),
    "loading-a-part": lambda model: model[0].load_state_dict(model[0].state_dict()),
}


@EVERY
@pytest.mark.parametrize("end", ENDS)
def test_what_ends_it(end, recipe):
    model = build()
    with constant_weights(model):
        for seed in range(2):
            run(model, recipe, seed)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        ENDS[end](model)
        model.zero_grad()
        for _ in range(2):  # it is over: what follows is seen, too
            silently(model)
            fresh = build()
            fresh.load_state_dict(model.state_dict())
            assert_same_bits(run(fresh, recipe), run(model, recipe))


SEEN = {
    "in-place": lambda linear: linear.weight.detach().mul_(2),
    "data": lambda linear: setattr(linear.weight, "data", linear.weight.data * 2),
    "replaced": lambda linear: setattr(linear, "weight", torch.nn.Parameter(linear.weight.detach() * 2)),
    "told": lambda linear: (linear.weight.data.mul_(2), linear.forget_quantized_weights()),
}


@pytest.mark.parametrize("change", SEEN)
def test_what_is_seen_within_it(change):
    model = build()
    with constant_weights(model):
        for _ in range(3):
            run(model, "mxfp8")
            for index in (0, 2, 3):
                SEEN[change](model[index])
            fresh = build()
            fresh.load_state_dict(model.state_dict())
            assert_same_bits(run(fresh, "mxfp8"), run(model, "mxfp8"))


@EVERY
def test_debugging_compares_the_weights(recipe):
    model = build()
    with constant_weights(model, debug=True):
        run(model, recipe)
        run(model, recipe)
        model[2].weight.data[1, 2, 3] += 1
        with pytest.raises(RuntimeError, match=r"GroupedLinear, of shape \[3, 32, 32\], was changed inside"):
            run(model, recipe)


@pytest.mark.parametrize("use_reentrant", [False, True])
@EVERY
def test_a_recomputation_after_it_has_the_bits_of_the_first_time(recipe, use_reentrant):
    """Also under delayed scaling, whose scale of a weight has moved on meanwhile."""
    found = []
    for recomputes in (False, True):
        model = build()

        def function(x, model=model, recomputes=recomputes, **extras):
            if recomputes:
                return checkpoint(lambda x: model(x, **extras), x, use_reentrant=use_reentrant)
            return model(x, **extras)

        x = data(1).requires_grad_()
        with constant_weights(model):
            run(model, recipe)
            with autocast(recipe):
                y = function(x, split_sizes=SIZES)
        y.square().sum().backward()
        found.append({"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in model.named_parameters()})
    assert_same_bits(*found)


@EVERY
def test_generation_in_inference_mode_before_training(recipe):
    model, plain = build(), build()
    with constant_weights(model):
        with torch.inference_mode(), autocast(recipe):
            model(data(), split_sizes=SIZES)
        assert_same_bits(run(plain, recipe), run(model, recipe))


def test_one_that_was_never_left_ends_with_its_object():
    model = build()
    scope = constant_weights(model)
    scope.__enter__()
    run(model, "mxfp8")
    assert model[0].weights_scope is scope
    del scope
    assert model[0].weights_scope is None


def test_a_step_ends_scopes_while_another_thread_opens_some():
    mine, theirs = ops.Linear(32, 32), ops.Linear(32, 32)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter])
    opened, done = deque(maxlen=100), threading.Event()

    def open_some():
        while not done.is_set():
            opened.append(constant_weights(theirs))
            opened[-1].__enter__()

    thread = threading.Thread(target=open_some)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(20):
            scopes = [constant_weights(mine) for _ in range(500)]
            for scope in scopes:
                scope.__enter__()
            optimizer.step()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert mine.weights_scope is None


def test_a_scope_inside_of_another_does_nothing():
    model = build()
    with constant_weights(model) as outer, constant_weights(model):
        assert outer is None
        run(model, "mxfp8")
    assert model[0].weights_scope is None
    with constant_weights(model):
        scope = model[0].weights_scope
        with constant_weights(model[0]):
            pass
        assert model[0].weights_scope is scope


def test_copies_and_counts_are_not_of_it():
    model = build()
    with constant_weights(model):
        assert copy.deepcopy(model)[0].weights_scope is None
        run(model, "mxfp8")
        with count_casts(model) as counted:
            run(model, "mxfp8")
        assert any("weight" in name for name in counted.counts)


@pytest.mark.slow
def test_it_keeps_nothing_afterwards():
    model = build()
    with constant_weights(model):
        run(model, "mxfp8")
    gc.collect()
    before = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    with constant_weights(model):
        run(model, "mxfp8")
    gc.collect()
    known = set(map(id, before))  # those of other tests may be freed meanwhile
    assert not [t.shape for t in gc.get_objects() if type(t) is torch.Tensor and id(t) not in known]


def test_modules_without_operations_are_refused():
    with pytest.raises(ValueError, match="got Linear, which contains no operation"):
        constant_weights(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="constant_weights got a NoneType, which is no module. Give the model"):
        constant_weights(None)


def bytes_of_values(model):
    """Of stacked weights in bfloat16, of a Linear's in the dtype in which they are multiplied."""
    return sum((2 if weight.dim() == 3 else 4) * weight.numel() for weight in weights_of(model))


@pytest.mark.parametrize("make", [MXFP8BlockScaling, NVFP4BlockScaling])
def test_emulated_formats_keep_values_unless_the_recipe_says_codes(make, monkeypatch):
    """Both have the bits of no scope; values are made once, in bfloat16, and are not made again."""
    settings = {"disable_stochastic_rounding": True} if make is NVFP4BlockScaling else {}
    plain = run(build(), make(**settings))
    made = []
    operand = ScaledCodes.operand
    monkeypatch.setattr(ScaledCodes, "operand", lambda self, *args: made.append(self.shape) or operand(self, *args))
    nbytes, calls = {}, {}
    for keeps in (True, False):
        recipe, model = make(keep_weight_values=keeps, **settings), build()
        scope = constant_weights(model)
        with scope:
            for _ in range(3):
                made.clear()
                assert_same_bits(run(model, recipe), plain)
            calls[keeps] = sum(len(shape) == 3 or shape == (32, 32) for shape in made)
            nbytes[keeps] = scope.nbytes
        assert scope.nbytes == 0
    copies = 1 if make is NVFP4BlockScaling else 2  # its blocks of weights are square
    of_values = copies * bytes_of_values(model)
    assert calls == {True: 0, False: 6} and nbytes[True] > nbytes[False] > 0
    assert of_values <= nbytes[True] <= of_values + 64  # and a factor for each group


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "fp8_delayed", "fp8_rowwise"])
def test_on_a_cpu_codes_that_a_gpu_multiplies_are_dequantized_once(recipe, monkeypatch):
    plain = run(build(), recipe)
    made = []
    operand = ScaledCodes.operand
    monkeypatch.setattr(ScaledCodes, "operand", lambda self, *args: made.append(self.shape) or operand(self, *args))
    model = build()
    with constant_weights(model):
        for at in range(3):
            made.clear()
            found = run(model, recipe)
            if at == 0:
                assert_same_bits(found, plain)
        assert made, "rows are dequantized"
        assert not any(len(shape) == 3 or shape == (32, 32) for shape in made)


BUILT_IN = RECIPES | {
    "bf16": "bf16",
    "mxfp4": MXFP4BlockScaling(),
    "mixed": MixedScaling(input="mxfp8", weight="fp8_block"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", ["fp8_rowwise", MixedScaling(weight="fp8_rowwise")], ids=["rowwise", "mixed"])
def test_on_a_cpu_values_that_need_float32_are_kept_as_bfloat16_and_a_factor(weight, dtype):
    """Of stacked weights. The bits of no scope, in backward too, whose copy has a factor for each column."""

    def step(scope):
        torch.manual_seed(0)
        model = Sequential(ops.GroupedLinear(3, 32, 48, bias=False, dtype=dtype))
        x, kept = data().to(dtype).requires_grad_(), constant_weights(model)
        with kept if scope else nullcontext(), autocast(weight):
            y = model(x, split_sizes=SIZES)
            y.square().sum().backward()
            assert kept.nbytes == (2 * 2 * 3 * 48 * 32 + 4 * 3 * (48 + 32) if scope else 0)
        return {"y": y.detach(), "dx": x.grad, "dw": model[0].weight.grad}

    assert_same_bits(step(True), step(False))


class Work(TorchDispatchMode):
    """Counts operations of torch, the tensors that all return, and the elements of those in memory of their own."""

    def __init__(self):
        super().__init__()
        self.calls = self.tensors = self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor) and a.numel()}
        found = [t for t in (made if isinstance(made, tuple | list) else [made]) if isinstance(t, torch.Tensor)]
        fresh = [t for t in found if t.untyped_storage().data_ptr() not in given]
        written = found if function._schema.name.endswith(("_", ".out", ".default_out")) else fresh
        self.calls += bool(written)
        self.tensors += len(found)
        self.elements += sum(t.numel() for t in written)
        return made


def decoded(recipe, num_groups, dtype):
    """The work of a token that two experts get, and y, within the scope, after the first."""
    torch.manual_seed(0)
    model = Sequential(ops.GroupedLinear(num_groups, 32, 48, bias=False, dtype=dtype))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(48, 32, generator=torch.Generator().manual_seed(1)))  # of each
    sizes = torch.zeros(num_groups, dtype=torch.int64)
    sizes[[1, num_groups - 1]] = 1
    x = data()[:2].to(dtype)
    with torch.no_grad(), autocast(recipe), constant_weights(model):
        model(x, split_sizes=sizes)
        with Work() as work:
            y = model(x, split_sizes=sizes)
    return work, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", BUILT_IN.values(), ids=BUILT_IN)
def test_decode_on_a_cpu_does_nothing_for_experts_without_rows(recipe, dtype):
    """And dequantizes no weight: the weights of the experts with rows are read, at most into another dtype."""
    few, y = decoded(recipe, 3, dtype)
    many, same = decoded(recipe, 40, dtype)
    assert torch.equal(y, same)
    assert (many.calls, many.tensors) == (few.calls, few.tensors)
    assert many.elements - few.elements <= 37 * 64, "of an expert without rows a few numbers, not a row of its weight"
    assert few.elements < 4 * 48 * 32 + 5000
    assert few.calls <= 100, "what one token takes besides reading weights is the host's time for these"


@pytest.mark.parametrize("recipe", BUILT_IN.values(), ids=BUILT_IN)
def test_a_linear_on_a_cpu_converts_no_weight(recipe):
    """Its values are kept in the dtype in which they are multiplied."""
    model, x = Sequential(ops.Linear(64, 512, bias=False, dtype=torch.bfloat16)), torch.randn(1, 64).bfloat16()
    with torch.no_grad(), autocast(recipe), constant_weights(model):
        model(x)
        with Work() as work:
            model(x)
    assert 512 <= work.elements < 512 * 64 / 4


def weights_of(model):
    return [model[index].weight for index in (0, 2, 3)]


@pytest.mark.parametrize("inside", [False, True], ids=["autocast-around", "autocast-inside"])
@pytest.mark.parametrize("path", ["grouped", "split"])
@EVERY
def test_prepare_quantizes_ahead_of_the_first_pass(recipe, path, inside):
    """A change in silence before the first pass is not seen: neither pass quantizes a weight, in either copy."""
    plain, model = run(build(path), recipe), build(path)
    with nullcontext() if inside else autocast(recipe), constant_weights(model, prepare=recipe if inside else True):
        for weight in weights_of(model):
            weight.data.mul_(-2)
        assert_same_bits(run(model, recipe), plain)


def test_prepare_makes_the_copies_that_the_phase_reads():
    """In training both, in evaluation the rowwise one; passes add none. Values are kept of each."""
    model, found = build(), {}
    of_one = bytes_of_values(model)
    for enabled in (False, True):
        scope = constant_weights(model, prepare="mxfp8")
        with torch.set_grad_enabled(enabled), scope:
            found[enabled] = scope.nbytes
            evaluated(model, "mxfp8")
            run(model, "mxfp8") if enabled else None
            assert scope.nbytes == found[enabled]
    assert found == {False: of_one, True: 2 * of_one}


@pytest.mark.parametrize("around", [False, True])
def test_prepare_under_delayed_scaling_leaves_the_state_of_a_step_without_it(around):
    recipe, found = RECIPES["fp8_delayed"], []
    for prepares in (False, True):
        model = build()
        for seed in range(2):  # scopes
            step = autocast(recipe) if around else nullcontext()
            with step, constant_weights(model, prepare=recipe if prepares else False):
                found.append(run(model, recipe, seed))
            found[-1] |= {name: value.clone() for name, value in model.state_dict().items()}
    assert any("scale" in name for name in found[0])
    assert_same_bits(found[0], found[2])
    assert_same_bits(found[1], found[3])


def test_prepare_in_evaluation_leaves_a_state_alone():
    model, recipe = build(), RECIPES["fp8_delayed"]
    run(model, recipe)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), constant_weights(model, prepare=recipe):
        evaluated(model, recipe)
    assert_same_bits(before, dict(model.state_dict()))


def test_prepare_that_would_quantize_nothing_is_refused():
    model = build()
    with pytest.raises(ValueError, match="entered under 'high_precision', under which no weight"):
        constant_weights(model, prepare=True).__enter__()
    assert model[0].weights_scope is None
    with pytest.raises(ValueError, match="mxfp9"):
        constant_weights(model, prepare="mxfp9")


@pytest.mark.parametrize("recipe", [None, "bf16"])
def test_prepare_takes_a_recipe_that_quantizes_nothing(recipe):
    """So that a script may have the recipe as a variable."""
    model = build()
    with constant_weights(model, prepare=recipe), autocast(recipe):
        assert model[0].weights_scope is not None
        model(data(0), split_sizes=SIZES)


def test_a_model_without_weights_is_named_once():
    with pytest.raises(ValueError, match="got Sequential, which contains no operation"):
        constant_weights(Sequential())


@EVERY
def test_frozen_weights_are_quantized_once_too_and_without_a_scope_in_each_forward(recipe):
    model = build().requires_grad_(False)

    def dx():
        x = data().requires_grad_()
        with autocast(recipe):
            model(x, split_sizes=SIZES).square().sum().backward()
        return x.grad

    for _ in range(15):
        dx()  # until delayed scales of the same data are the same
    with constant_weights(model):
        before = dx()
        for weight in weights_of(model):
            weight.data.mul_(-2)
        assert torch.equal(dx(), before)
    assert not torch.equal(dx(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["grouped", "split"])
@EVERY
def test_prepare_on_a_gpu(recipe, path):
    found = []
    for prepares in (False, True):
        model = build(path).to("cuda", torch.bfloat16)
        x = data().to("cuda", torch.bfloat16).requires_grad_()
        sizes = torch.tensor(SIZES, device="cuda")
        with constant_weights(model, prepare=recipe if prepares else False):
            for weight in weights_of(model) if prepares else ():
                weight.data.mul_(-2)
            with autocast(recipe):
                y = model(x, split_sizes=sizes)
            y.float().square().sum().backward()
        found.append({"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in model.named_parameters()})
    assert_same_bits(*found)


def test_a_scope_that_begins_with_an_evaluation_records_the_weights_amaxes():
    recipe, found = RECIPES["fp8_delayed"], []
    for evaluates in (False, True):
        model = build()
        for step in range(3):
            with constant_weights(model):
                if evaluates:
                    with torch.no_grad(), autocast(recipe):
                        model(data(50), split_sizes=SIZES)
                outcomes = [run(model, recipe, seed) for seed in (2 * step, 2 * step + 1)]
        found.append([*(t for outcome in outcomes for t in outcome.values()), *model.buffers()])
    assert (model[0].quantizer_weight_scale[0] != 1).all()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("held", [False, True])
def test_a_microbatch_that_broke_off_leaves_the_weights_amaxes_to_the_next_one(held):
    recipe, found = RECIPES["fp8_delayed"], []
    for breaks_off in (False, True):
        model = build()
        run(model, recipe)
        if held:
            fuser.to_quantized(model, recipe)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        with constant_weights(model):
            if breaks_off:
                with pytest.raises(MemoryError), autocast(recipe):
                    model(data(50), split_sizes=SIZES)
                    raise MemoryError
            outcomes = [run(model, recipe, seed) for seed in (1, 2)]
        found.append([*(t for outcome in outcomes for t in outcome.values()), *model.buffers()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("order", ["forward, scope", "scope, forward"])
def test_a_scope_between_forward_and_its_recomputation_changes_neither(order):
    """Delayed scales move between two steps: what is computed again has those of its forward, a new forward has not."""
    recipe, found = RECIPES["fp8_delayed"], []
    for checkpoints in (False, True):
        model = build()
        for seed in range(2):
            run(model, recipe, seed)
        with torch.no_grad():  # so that scales follow that are not powers of two of those before
            for parameter in model.parameters():
                parameter.mul_(3)
        xs, ys = [data(seed).requires_grad_() for seed in (7, 8)], []

        def forward(x, model=model, checkpoints=checkpoints):
            with autocast(recipe):
                if checkpoints:
                    return checkpoint(lambda x: model(x, split_sizes=SIZES), x)
                return model(x, split_sizes=SIZES)

        ys.append(forward(xs[0]))
        with constant_weights(model):
            if order == "forward, scope":
                ys[0].square().sum().backward()
                ys.append(forward(xs[1]))
            else:
                ys.append(forward(xs[1]))
                ys[0].square().sum().backward()
            ys[1].square().sum().backward()
        found.append([*ys, *(x.grad for x in xs), *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(map(torch.equal, *found))
