"""Backward has the settings that forward had, or says that they were changed."""

import pickle
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fuser import BasicOperation, Sequential, autocast, lora, ops


def adapted() -> Sequential:
    model = Sequential(ops.Linear(8, 8))
    lora.add(model, rank=2, alpha=8.0, dropout=0.25)
    nn.init.ones_(model[0].lora_B.weight)
    return model


CHANGES = {
    "scale": (lambda: Sequential(ops.ConstantScale(2.0)), 5.0),
    "p": (lambda: Sequential(ops.Dropout(0.5)), 0.1),
    "zero_centered_gamma": (lambda: Sequential(ops.RMSNorm(8)), True),
    "eps": (lambda: Sequential(ops.LayerNorm(8)), 1.0),
    "alpha": (adapted, 2.0),
    "dropout": (adapted, 0.5),
    "scaling_factor": (lambda: Sequential(ops.Router(8, 4, topk=2)), 3.0),
    "normalize_probs": (lambda: Sequential(ops.Router(8, 4, topk=2)), True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_between_forward_and_backward_is_refused_until_it_is_set_back(name):
    make, value = CHANGES[name]
    model = make()
    is_router = isinstance(model[0], ops.Router)

    def loss() -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(4, 8, requires_grad=True)
        result = model(x, outputs=("probs",))[1]["probs"] if is_router else model(x)
        return result.square().sum()

    def gradients(loss: Tensor) -> list[Tensor]:
        model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, waits = gradients(loss()), loss()
    before = getattr(model[0], name)
    setattr(model[0], name, value)
    message = rf"In operation 0 \({type(model[0]).__name__}\): {name} was changed between forward and backward"
    with pytest.raises(RuntimeError, match=f"{message} \\({before!r} in forward, {value!r} now\\)"):
        waits.backward(retain_graph=True)
    loss()  # a forward with the other value, in between
    setattr(model[0], name, before)
    assert all(map(torch.equal, gradients(waits), expected))


def test_forwards_of_several_values_wait_each_for_its_own():
    model, x = Sequential(ops.ConstantScale(2.0)), torch.ones(3, requires_grad=True)
    first = model(x)
    model[0].scale = 5.0
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    assert dx.tolist() == [5.0] * 3
    with pytest.raises(RuntimeError, match="scale was changed"):
        first.sum().backward()
    model[0].scale = 2.0
    (dx,) = torch.autograd.grad(first.sum(), x)
    assert dx.tolist() == [2.0] * 3


class Counting(BasicOperation):
    """y = factor x; counts its forwards."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.calls = factor, 0

    def fuser_forward(self, ctx, x, extras):
        self.calls += 1
        return x * self.factor, {}

    def fuser_backward(self, ctx, dy, d_extra_outputs):
        return dy * self.factor, {}, {}


def test_of_an_operation_of_ones_own_arguments_of_the_constructor_count_and_others_do_not():
    model, x = Sequential(Counting(3.0)), torch.ones(2, requires_grad=True)
    y = model(x)
    model(x)
    model[0].note = "of its user"
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.tolist() == [3.0, 3.0] and model[0].calls == 2
    y = model(x)
    model[0].factor = 4.0
    with pytest.raises(RuntimeError, match="factor was changed"):
        y.sum().backward()


def test_weights_that_hooks_compute_and_adapters_that_are_gone_are_no_settings():
    pruned, unloaded = Sequential(ops.Linear(4, 4)), Sequential(ops.Linear(4, 4))
    prune.random_unstructured(pruned[0], "bias", 0.5)
    lora.add(unloaded, rank=2)
    x = torch.randn(3, 4, requires_grad=True)
    for model in (pruned, unloaded):
        model(x).sum().backward()
    lora.unload(unloaded)
    for model in (pruned, unloaded):
        y = model(x)
        model[0].set_recipe("bf16")
        model(x)
        y.sum().backward()


class Holding(BasicOperation):
    """Pickled without what it was made of."""

    def __init__(self, function: object, sizes: tuple) -> None:
        super().__init__()
        self.function, self.sizes = function, sizes

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "function": None}

    def fuser_forward(self, ctx, x, extras):
        return x * 2, {}

    def fuser_backward(self, ctx, dy, d_extra_outputs):
        return dy * 2, {}, {}


def test_arguments_of_any_kind_are_compared_and_pickled_as_the_operation_says():
    tensor = torch.ones(2)
    model, x = Sequential(Holding(lambda: None, (1, (2.0, tensor)))), torch.ones(2, requires_grad=True)
    y = model(x)
    assert pickle.loads(pickle.dumps(model))[0].sizes[0] == 1
    model[0].sizes = (1, (2.0, tensor))
    y.sum().backward()
    y = model(x)
    model[0].sizes = (1, (2.0, torch.ones(2)))
    with pytest.raises(RuntimeError, match="sizes was changed between forward and backward"):
        y.sum().backward()


def test_recipes_training_and_where_gradients_go_may_change():
    layer = ops.Linear(8, 8, bias=False)
    model, x = Sequential(ops.RMSNorm(8), layer), torch.randn(4, 8, requires_grad=True)
    with autocast("mxfp8"):
        y = model(x)
    layer.set_recipe("bf16")
    layer.weight.main_grad = torch.zeros(8, 8)
    layer.accumulate_into_main_grad = True
    model.eval()
    y.sum().backward()
    assert layer.weight.main_grad.any() and x.grad.any()


def test_a_compiled_model_keeps_those_of_forward():
    model = Sequential(ops.ConstantScale(2.0))
    compiled, x = torch.compile(model, backend="aot_eager"), torch.ones(3, requires_grad=True)
    y = compiled(x)
    model[0].scale = 5.0
    y.sum().backward()
    assert x.grad.tolist() == [2.0] * 3


def test_a_fusion_is_asked_again_when_a_setting_was_assigned():
    """The scale of a fused product, one that a fusion refuses, and what a fusion does not do."""
    model = Sequential(ops.Linear(8, 8, bias=False), ops.ConstantScale(2.0), ops.AddExtraInput("e"))
    x, e = torch.randn(4, 8), torch.randn(4, 8)
    for scale in (2.0, 5.0, 0.0, 2.0):
        model[1].scale = scale
        torch.testing.assert_close(model(x, e=e), e + scale * (x @ model[0].weight.T))
        assert ("  LinearScaleAdd" in model.explain()) == (scale != 0)

    def experts() -> Sequential:
        torch.manual_seed(0)
        return Sequential(ops.GroupedLinear(2, 8, 16), ops.SwiGLU(), ops.GroupedLinear(2, 8, 8))

    def gradients(model: Sequential) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(torch.randn(6, 8), split_sizes=[2, 4]).square().sum().backward()
        return [p.grad for p in model.parameters()]

    before, after = experts(), experts()
    gradients(before)
    for changed in (before, after):
        changed[1].cache_quantized_input = True
    assert all(map(torch.equal, gradients(before), gradients(after)))


def test_whether_biases_are_scaled_is_not_set_later():
    with pytest.raises(AttributeError, match="scale_bias"):
        ops.GroupedLinear(2, 8, 8).scale_bias = True


CONSTANTS = [
    *[(ops.ClampedSwiGLU, name, 0.25) for name in ("limit", "alpha", "glu_linear_offset")],
    *[(ops.ScaledClampedQGeGLU, name, 0.25) for name in ("limit", "alpha", "glu_linear_offset")],
    *[(kind, name, 0.25) for kind in (ops.SiTUGLU, ops.ScaledSiTUGLU) for name in ("beta1", "beta2")],
    *[(kind, "glu_interleave_size", 4) for kind in (ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU)],
    *[(kind, "glu_interleave_size", 4) for kind in (ops.ScaledSwiGLU, ops.ScaledClampedQGeGLU, ops.ScaledSiTUGLU)],
]


def feed_forward(activation: BasicOperation) -> Sequential:
    torch.manual_seed(0)
    return Sequential(ops.GroupedLinear(2, 8, 16), activation, ops.GroupedLinear(2, 8, 8))


def results(model: Sequential, run: object) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    x, extras = torch.randn(6, 8, requires_grad=True), {"split_sizes": torch.tensor([2, 4])}
    if "scales" in model[1].extra_inputs:
        extras["scales"] = torch.rand(6)
    y = run(x, **extras)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("way", ["fused", "unfused", "compiled"])
@pytest.mark.parametrize(("kind", "name", "value"), CONSTANTS, ids=lambda v: getattr(v, "__name__", v))
def test_a_constant_of_an_activation_that_is_assigned_later_is_the_one_it_is_made_with(kind, name, value, way):
    late, made = feed_forward(kind()), feed_forward(kind(**{name: value}))
    if way == "unfused":
        late, made = Sequential(*late, fusions=()), Sequential(*made, fusions=())
    run = torch.compile(late, backend="aot_eager") if way == "compiled" else late
    before = results(late, run)
    setattr(late[1], name, value)
    after = results(late, run)
    assert getattr(late[1], name) == value and repr(late[1]) == repr(made[1])
    assert all(map(torch.equal, after, results(made, made)))
    assert not torch.equal(after[0], before[0])


def test_constants_of_activations_are_checked_and_belong_to_forward():
    model, x = Sequential(ops.ClampedSwiGLU(limit=2.0)), torch.randn(3, 8, requires_grad=True)
    for value, error in ((0, ValueError), ("7", TypeError)):
        with pytest.raises(error, match="limit is"):
            model[0].limit = value
    y = model(x)
    model[0].limit = 1.0
    with pytest.raises(RuntimeError, match=r"activation was changed between.*limit=2.0.*limit=1.0"):
        y.sum().backward(retain_graph=True)
    model[0].limit = 2
    y.sum().backward()


ROUTED = {"score_function": "sigmoid", "num_groups": 4, "topk_groups": 2, "z_loss": 0.1}

ASSIGNED = [
    (lambda **given: ops.Router(8, 16, **{"topk": 2, "z_loss": 0.5} | given), {name: value})
    for name, value in {
        "topk": 3,
        "score_function": "sigmoid",
        "use_pre_softmax": False,
        "normalize_probs": True,
        "scaling_factor": 3.0,
        "z_loss": 0.25,
    }.items()
]
ASSIGNED += [
    (lambda **given: ops.Router(8, 16, **{"topk": 2} | ROUTED | given), {"num_groups": 8, "topk_groups": 3}),
    (lambda p=0.5: ops.Dropout(p), {"p": 0.25}),
    (lambda scale=2.0: ops.ConstantScale(scale), {"scale": -3}),
    (lambda **given: ops.RMSNorm(8, **given), {"eps": 1.0, "zero_centered_gamma": True}),
    (lambda **given: ops.LayerNorm(8, **given), {"eps": 1.0}),
    (lambda **given: ops.L2Normalization(**given), {"eps": 1}),
    (lambda shape=(4, 4): ops.Reshape(shape), {"shape": [-1, 2]}),
]


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize(("make", "values"), ASSIGNED)
def test_an_argument_that_is_assigned_later_is_the_one_it_is_made_with(make, values, way):
    late, made = Sequential(make()), Sequential(make(**values))
    with torch.no_grad():
        for parameter, other in zip(late.parameters(), made.parameters(), strict=True):
            parameter.copy_(torch.randn_like(parameter))
            other.copy_(parameter)
    outputs = tuple(late[0].extra_outputs)

    def run(model: object) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 8, requires_grad=True)
        y, extra = model(x, outputs=outputs) if outputs else (model(x), {})
        heads = [y, *(tensor for tensor in extra.values() if tensor.requires_grad)]
        return [*heads, *extra.values(), *torch.autograd.grad(sum(h.square().sum() for h in heads), x)]

    torch.compiler.reset()  # of one function a limited number is compiled
    model = torch.compile(late, backend="aot_eager") if way == "compiled" else late
    before = run(model)
    for name, value in values.items():
        setattr(late[0], name, value)
    after = run(model)
    assert repr(late) == repr(made)
    assert all(map(torch.equal, after, run(made)))
    assert not all(a.shape == b.shape and a.equal(b) for a, b in zip(after, before, strict=True))
    torch.compiler.reset()


REFUSED = [
    (lambda: ops.Router(8, 16, 2), "score_function", "sigmiod", ValueError, "is 'sigmiod', but must be 'softmax'"),
    (lambda: ops.Router(8, 16, 2), "topk", 17, ValueError, "topk is 17, but must be between 1 and num_experts=16"),
    (lambda: ops.Router(8, 16, 2), "topk", 2.0, TypeError, "topk is 2.0, but must be an integer"),
    (lambda: ops.Router(8, 16, 2), "num_groups", 3, ValueError, "num_groups is 3, but must divide"),
    (lambda: ops.Router(8, 16, 2), "num_groups", 0, ValueError, "Router got num_groups=0. It must be positive"),
    (lambda: ops.Router(8, 16, 2), "num_groups", 16, ValueError, "topk is 2, but topk_groups=1 of num_groups=16"),
    (lambda: ops.Router(8, 16, 2), "topk_groups", 2, ValueError, "topk_groups is 2, but there are num_groups=1"),
    (lambda: ops.Router(8, 16, 2), "normalize_probs", "no", TypeError, "normalize_probs is 'no'"),
    (lambda: ops.Router(8, 16, 2), "scaling_factor", 0, ValueError, "scaling_factor is 0.0, but must be positive"),
    (lambda: ops.Router(8, 16, 2), "z_loss", 0.1, AttributeError, "z_loss cannot be set to 0.1.*Make another one"),
    (lambda: ops.Router(8, 16, 2, z_loss=0.1), "z_loss", None, AttributeError, "z_loss cannot be set to None"),
    (lambda: ops.Router(8, 16, 2, z_loss=0.1), "z_loss", -1, ValueError, "z_loss is -1.0, but must be positive"),
    (lambda: ops.Router(8, 16, 2, use_pre_softmax=False), "score_function", "sigmoid", ValueError, "has no softmax"),
    (lambda: ops.Router(8, 16, 2, **ROUTED), "use_pre_softmax", False, ValueError, "which has no softmax"),
    (lambda: ops.Router(8, 16, 2, **ROUTED), "num_groups", 16, ValueError, "leaves one expert in each group"),
    (
        lambda: ops.Router(8, 16, 2, **ROUTED, expert_bias=True), "score_function", "softmax", NotImplementedError,
        "the bias is added to sigmoid scores",
    ),
    (lambda: ops.Dropout(0.5), "p", 1.5, ValueError, "Dropout got p=1.5. It is the probability of a zero"),
    (lambda: ops.ConstantScale(2.0), "scale", float("inf"), ValueError, "ConstantScale got scale=inf"),
    (lambda: ops.RMSNorm(8), "eps", 0, ValueError, "eps is 0, but must be positive"),
    (lambda: ops.RMSNorm(8), "zero_centered_gamma", 1, TypeError, "zero_centered_gamma is 1"),
    (lambda: ops.LayerNorm(8), "eps", "1e-5", TypeError, "eps is '1e-5'"),
    (lambda: ops.L2Normalization(), "eps", float("nan"), ValueError, "eps is nan"),
    (lambda: ops.Reshape((4, 4)), "shape", (-1, -1), ValueError, "-1 once at most"),
    (lambda: ops.Linear(8, 8), "delay_wgrad_compute", "no", TypeError, "must be True or False"),
    (lambda: ops.Linear(8, 8), "accumulate_into_main_grad", 1, TypeError, "must be True or False"),
    (lambda: ops.Linear(8, 8), "as_one_group", 1, TypeError, "must be True or False"),
    (lambda: ops.GroupedLinear(2, 8, 8), "save_original_input", 1, TypeError, "must be True or False"),
    (lambda: ops.SwiGLU(), "cache_quantized_input", 1, TypeError, "must be True or False"),
    (lambda: ops.Quantize(), "quantizes_backward", 1, TypeError, "must be True or False"),
    (lambda: adapted()[0], "alpha", float("inf"), ValueError, "alpha is inf, but must be finite"),
    (lambda: adapted()[0], "dropout", 1, ValueError, "dropout is 1.0. It is the probability of a zero"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name", "value", "error", "message"), REFUSED)
def test_an_argument_is_checked_when_it_is_assigned_before_anything_is_changed(make, name, value, error, message):
    operation = make()
    before, settings = getattr(operation, name), operation.settings
    with pytest.raises(error, match=message):
        setattr(operation, name, value)
    assert getattr(operation, name) == before and operation.settings == settings


SET_ONCE = [
    (lambda: ops.Linear(8, 8), {"in_features": 4, "out_features": 4, "tensor_parallel": "row"}),
    (lambda: ops.Linear(8, 8), {"group": "tp", "sequence_parallel": True, "gated": True}),
    (lambda: ops.GroupedLinear(2, 8, 8), {"num_groups": 3, "in_features": 4, "out_features": 4, "group": "tp"}),
    (lambda: ops.GroupedLinear(2, 8, 8), {"stacked": False, "stacked_bias": False, "tensor_parallel": "row"}),
    (lambda: ops.GroupedLinear(2, 8, 8), {"scale_bias": True, "gated": True}),
    (lambda: adapted()[0], {"rank": 4, "in_features": 4}),
    (lambda: ops.Bias(8), {"size": 4}),
    (lambda: ops.RMSNorm(8), {"normalized_shape": (4,)}),
    (lambda: ops.Router(8, 4, topk=2), {"hidden_size": 4, "num_experts": 8}),
    (lambda: ops.Dispatch(4), {"num_experts": 8, "group": "ep", "empty_slots": True, "transport": "symmetric"}),
    (lambda: ops.Dispatch(4), {"capacity": 8, "partial_sums": "rounded", "send_codes": "never", "overlap": True}),
    (lambda: ops.Combine(), {"group": "ep", "transport": "symmetric", "partial_sums": "rounded"}),
    (lambda: ops.ScaledSwiGLU(), {"group": "tp"}),
]


@pytest.mark.parametrize(("make", "values"), SET_ONCE)
def test_what_other_things_are_made_of_is_not_set_later(make, values):
    operation = make()
    for name, value in values.items():
        before = getattr(operation, name)
        kind = type(operation).__name__
        with pytest.raises(
            AttributeError, match=f"{name} of this {kind} is {re.escape(repr(before))}.*Make another one"
        ):
            setattr(operation, name, value)
        setattr(operation, name, before)
        assert getattr(operation, name) == before


def test_extra_tensors_are_renamed_by_rename_extras_alone():
    for operation in (ops.MakeExtraOutput("r"), ops.AddExtraInput("r")):
        with pytest.raises(AttributeError, match="name of this .*ExtraOutput|Input is 'r'.* Call rename_extras"):
            operation.name = "s"


def test_in_place_may_be_set_later():
    model = Sequential(ops.ConstantScale(2.0), ops.AddExtraInput("extra"))
    x, extra = torch.ones(3), torch.ones(3)
    assert model(x, extra=extra).tolist() == [3.0] * 3 and extra.tolist() == [1.0] * 3
    model[1].in_place = True
    y = model(x, extra=extra)
    assert y.data_ptr() == extra.data_ptr() and extra.tolist() == [3.0] * 3
    model[1].in_place = False
    assert model(x, extra=extra).tolist() == [5.0] * 3 and extra.tolist() == [3.0] * 3
    made = ops.MakeExtraOutput("extra")
    made.in_place = True
    assert made.in_place and made.reuses_gradients and repr(made) == repr(ops.MakeExtraOutput("extra", in_place=True))
    with pytest.raises(TypeError, match="in_place is 1"):
        made.in_place = 1


def test_quantize_takes_what_it_quantizes_later():
    model, x = Sequential(ops.Quantize()), torch.randn(4, 32, requires_grad=True)
    dy = torch.randn(4, 32)

    def gradient() -> Tensor:
        x.grad = None
        with autocast("fp8_delayed"):
            model(x).backward(dy)
        return x.grad

    assert torch.equal(gradient(), dy)
    for name in ("forward", "backward"):
        with pytest.raises(AttributeError, match=f"{name} is read where .*Set quantizes_{name} = True"):
            setattr(model[0], name, True)
    model[0].quantizes_backward = True
    assert not torch.equal(gradient(), dy)
    assert any(name.startswith("quantizer_grad_output") for name in model[0]._buffers)


@pytest.mark.parametrize("fusions", [None, ()])
@pytest.mark.parametrize("late", ["before forward", "before backward"])
def test_weight_gradients_that_are_delayed_later_read_their_own_dy(late, fusions):
    """MakeExtraOutput adds dy into the memory of the gradient that the delayed product reads."""

    def gradients(delays: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Sequential(
            ops.MakeExtraOutput("r", in_place=True),
            ops.Linear(8, 8, bias=False),
            ops.AddExtraInput("r"),
            ops.ConstantScale(2.0),
            fusions=fusions,
        )
        x = torch.randn(4, 8, requires_grad=True)
        if delays and late == "before forward":
            model[1].delay_wgrad_compute = True
        y = model(x)
        model[1].delay_wgrad_compute = delays
        y.square().sum().backward()
        if delays:
            model.backward_dw()
        return [x.grad, model[1].weight.grad]

    assert all(map(torch.equal, gradients(True), gradients(False)))
