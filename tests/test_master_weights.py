"""Training with weights that are held quantized, stepped by torch's own optimizers through float32 masters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import _default_to_fused_or_foreach

import fuser
from fuser import Sequential, autocast, ops
from tests.pairwise import rest


def model(dtype: torch.dtype = torch.float32) -> Sequential:
    torch.manual_seed(0)
    return Sequential(
        ops.Linear(16, 32, dtype=dtype),
        ops.GroupedLinear(2, 32, 64, dtype=dtype),
        ops.SwiGLU(),
        ops.GroupedLinear(2, 32, 16, dtype=dtype, stacked=False),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, torch.tanh(x.flip(1) * 2)


def train(
    layers: nn.Module, optimizer: torch.optim.Optimizer, recipe: str, steps: int, dtype: torch.dtype
) -> list[float]:
    """The losses."""
    losses = []
    torch.manual_seed(0)
    for step in range(steps):
        x, target = batch(step)
        with autocast(recipe):
            loss = (layers(x.to(dtype), split_sizes=[40, 24]).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["fp8_delayed", rest("fp8_current"), rest("fp8_block"), rest("mxfp8"), "nvfp4"])
def test_steps_are_those_of_float32_weights_that_are_quantized_in_each(recipe: str) -> None:
    """Bit for bit: these weights are the masters, and both are quantized once from them."""
    plain, layers = model(), fuser.to_quantized(model(), recipe, preserve_high_precision_init_val=True)
    masters = fuser.MasterWeights(layers.parameters())
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), recipe, 4, torch.float32)
    optimizer = masters.attach(torch.optim.AdamW(masters.parameters(), lr=3e-3))
    assert train(layers, optimizer, recipe, 4, torch.float32) == expected
    assert expected[-1] != expected[0]


class Outside:
    """Float32 masters of weights in bfloat16, which are quantized in each step: what held weights are compared with."""

    def __init__(self, layers: nn.Module) -> None:
        self.pairs = [(p, nn.Parameter(p.detach().float())) for p in layers.parameters()]

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_pre_hook(lambda *_: self.before())
        optimizer.register_step_post_hook(lambda *_: self.after())
        return optimizer

    def before(self) -> None:
        for parameter, master in self.pairs:
            master.grad, parameter.grad = parameter.grad.float(), None

    def after(self) -> None:
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_the_loss_of_bfloat16_is_within_2_percent_of_masters_outside(recipe: str, kind: str) -> None:
    """Theirs are rounded to bfloat16 before they are quantized, so the bits differ. Means of the last ten steps."""
    settings = {"lr": 3e-3} if kind == "AdamW" else {"lr": 0.3, "momentum": 0.9}
    plain = model(torch.bfloat16)
    layers = fuser.to_quantized(model(torch.bfloat16), recipe, preserve_high_precision_init_val=True)
    outside, inside = Outside(plain), fuser.MasterWeights(layers.parameters())
    make = getattr(torch.optim, kind)
    theirs = outside.attach(make([master for _, master in outside.pairs], **settings))
    expected = train(plain, theirs, recipe, 40, torch.bfloat16)
    found = train(layers, inside.attach(make(inside.parameters(), **settings)), recipe, 40, torch.bfloat16)
    assert sum(found[-10:]) < 0.9 * sum(found[:10])
    assert abs(sum(found[-10:]) - sum(expected[-10:])) < 0.02 * sum(expected[-10:])


Loss = Callable[[int], Tensor]


def loss_of(layers: nn.Module) -> Loss:
    def loss(step: int) -> Tensor:
        x, target = batch(step)
        with autocast("mxfp8"):
            return (layers(x, split_sizes=[40, 24]) - target).square().mean()

    return loss


def groups_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def scaled(layers: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    """Its second step overflows, and is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        optimizer.zero_grad()
        scaler.scale(loss(step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()


def scaled_accumulated_and_clipped(layers: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    """As the Trainer of Hugging Face does."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        for microbatch in range(2):
            scaler.scale(loss(2 * step + microbatch) / 2).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(layers.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        layers.zero_grad()


def clipped_over_the_model(layers: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for step in range(3):
        loss(step).backward()
        clip_grad_norm_(layers.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def clipped_over_the_groups(layers: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for step in range(3):
        loss(step).backward()
        clip_grad_norm_(groups_of(optimizer), 0.01)
        optimizer.step()
        optimizer.zero_grad()


def in_a_closure(layers: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            value = loss(step)
            value.backward()
            return value

        optimizer.step(closure)


def with_batches_left_out(layers: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for step in range(2):
        for clears in (layers, optimizer):
            (loss(step) * float("nan")).backward()
            clears.zero_grad()
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def of_one_layer_later(layers: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    """What has no gradient in the second step has none left from the first either."""
    loss(0).backward()
    optimizer.step()
    layers.zero_grad()
    with autocast("mxfp8"):
        layers[0](batch(1)[0]).square().mean().backward()  # type: ignore[index]
    clip_grad_norm_(groups_of(optimizer), 0.01)
    optimizer.step()


def never_cleared(layers: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for step in range(2):
        loss(step).backward()
        optimizer.step()


HABITS = [
    scaled, scaled_accumulated_and_clipped, clipped_over_the_model, clipped_over_the_groups, in_a_closure,
    with_batches_left_out, of_one_layer_later, never_cleared,
]  # fmt: skip


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_trains_as_plain_weights(
    habit: Callable[..., None], kind: Callable[..., torch.optim.Optimizer], shard: bool
) -> None:
    plain, layers = model(), fuser.to_quantized(model(), "mxfp8", preserve_high_precision_init_val=True)
    for module in (layers[0], layers) if shard else ():
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    masters = fuser.MasterWeights(layers.parameters())
    habit(plain, kind(plain.parameters(), lr=3e-3), loss_of(plain))
    habit(layers, masters.attach(kind(masters.parameters(), lr=3e-3)), loss_of(layers))
    expected = fuser.to_quantized(copy.deepcopy(plain), "mxfp8")
    for (name, p), master, q, e, before in zip(
        plain.named_parameters(), masters.parameters(), layers.parameters(), expected.parameters(),
        model().parameters(), strict=True,
    ):  # fmt: skip
        master, q = (t.full_tensor() if isinstance(t, dist.tensor.DTensor) else t for t in (master, q))
        assert torch.equal(master, p) and torch.equal(q + 0, e + 0) and not torch.equal(p, before), name


@pytest.mark.parametrize("habit", HABITS)
def test_the_gradient_may_be_handled_as_that_of_plain_weights(habit: Callable[..., None]) -> None:
    """Bit for bit: the plain weights are quantized in each step."""
    assert_trains_as_plain_weights(habit, torch.optim.AdamW, shard=False)


@pytest.mark.parametrize("habit", [scaled, *(rest(habit) for habit in HABITS[1:])])
def test_so_may_that_of_sharded_weights(habit: Callable[..., None], one_rank: None) -> None:
    assert_trains_as_plain_weights(habit, torch.optim.AdamW, shard=True)


def test_a_closure_that_is_called_again_meets_the_masters_where_they_have_moved() -> None:
    assert_trains_as_plain_weights(in_a_closure, partial(torch.optim.LBFGS, max_iter=3), shard=False)


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch.compile's own
def test_a_compiled_step_reads_the_gradients() -> None:
    weight = fuser.to_quantized(ops.Linear(32, 32, bias=False), "mxfp8").weight
    masters = fuser.MasterWeights([weight])
    (master,) = masters.parameters()
    step = torch.compile(masters.attach(torch.optim.SGD([master], lr=0.5)).step, backend="eager")
    for value in (1.0, 2.0):
        before, weight.grad = master.detach().clone(), torch.full_like(weight, value)
        step()
        assert torch.equal(master, before - 0.5 * value)
        weight.grad = None


def test_two_optimizers_divide_the_masters() -> None:
    plain, layers = model(), fuser.to_quantized(model(), "mxfp8", preserve_high_precision_init_val=True)
    masters = fuser.MasterWeights(layers.parameters())
    for module, stepped in ((plain, list(plain.parameters())), (layers, masters.parameters())):
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in (stepped[:2], stepped[2:])]
        if module is layers:
            optimizers = list(map(masters.attach, optimizers))
        for step in range(2):
            loss_of(module)(step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(p, m) for p, m in zip(plain.parameters(), masters.parameters(), strict=True))


def test_the_gradient_becomes_float32_when_it_is_first_read_of_the_master() -> None:
    layers = fuser.to_quantized(model(torch.bfloat16), "mxfp8")
    weight = layers[0].weight
    masters = fuser.MasterWeights(layers.parameters())
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=0.5))
    master = masters.parameters()[0]
    assert master.grad is None

    def gradient(step: int) -> Tensor:
        with autocast("mxfp8"):
            (found,) = torch.autograd.grad(layers[0](batch(step)[0].bfloat16()).sum(), weight)
        return found

    first, second = gradient(0), gradient(1)
    weight.backward(first)
    assert weight.grad.dtype == torch.bfloat16
    assert master.grad is weight.grad and torch.equal(weight.grad, first.float())
    weight.backward(second)
    expected, before = first.float() + second.float(), master.detach().clone()
    assert master.grad is weight.grad and torch.equal(weight.grad, expected)
    optimizer.step()
    assert torch.equal(master, before - 0.5 * expected)
    assert layers.to("meta")[0].weight.grad.dtype == torch.bfloat16


def test_an_optimizer_must_step_the_masters_alone() -> None:
    layers = fuser.to_quantized(model(), "mxfp8")
    masters = fuser.MasterWeights(layers.parameters())
    for stepped, found in ((layers.parameters(), "4 quantized parameters in place"), ([layers[0].bias], "no master")):
        with pytest.raises(ValueError, match=f"SGD steps {found}.*masters.parameters"):
            masters.attach(torch.optim.SGD(stepped, lr=0.1))
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=0.1))
    optimizer.add_param_group({"params": [layers[0].weight]})
    with pytest.raises(ValueError, match="SGD steps 1 quantized parameters in place"):
        optimizer.step()


def test_masters_are_stepped_by_foreach_kernels_where_parameters_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = _default_to_fused_or_foreach.__globals__
    monkeypatch.setitem(asks, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    masters = fuser.MasterWeights(fuser.to_quantized(model(), "mxfp8").parameters())
    assert _default_to_fused_or_foreach(masters.parameters(), False) == (False, True)


def test_a_copy_of_a_master_is_an_ordinary_parameter() -> None:
    master = fuser.MasterWeights(fuser.to_quantized(model(), "mxfp8").parameters()).parameters()[0]
    for other in (copy.deepcopy(master), pickle.loads(pickle.dumps(master))):
        assert type(other) is nn.Parameter and torch.equal(other, master) and other.grad is None


def test_masters_begin_with_the_values_before_quantization() -> None:
    for keep in (True, False):
        layers = fuser.to_quantized(model(), "mxfp8", preserve_high_precision_init_val=keep)
        master = fuser.MasterWeights(layers.parameters()).parameters()[0]
        weight = layers[0].weight
        assert master.dtype == torch.float32 and master.is_leaf and master.requires_grad
        assert torch.equal(master, model()[0].weight if keep else weight.dequantize())
        assert weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("change", ["dtype", "device", "assign"])
def test_a_step_of_parameters_that_others_took_the_place_of_is_refused(change: str) -> None:
    """It would not train the model."""
    layers = fuser.to_quantized(model(), "mxfp8")
    masters = fuser.MasterWeights(layers.parameters())
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=0.1))
    copy.deepcopy(layers).double()  # others
    layers.to("cpu").load_state_dict(layers.state_dict())
    loss_of(layers)(0).backward()
    optimizer.step()
    before = masters.parameters()[0].detach().clone()
    held = [(module, dict(module._parameters)) for module in layers]
    if change == "dtype":
        layers.double()
    elif change == "device":
        layers.to("meta")
    else:
        layers.load_state_dict(layers.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"A quantized parameter \[.*\] was replaced in its operation by"):
        optimizer.step()
    assert torch.equal(masters.parameters()[0], before)
    for module, parameters in held:
        for name, parameter in parameters.items():
            setattr(module, name, parameter)
    optimizer.step()


def test_masters_read_what_was_loaded_into_the_model() -> None:
    layers, other = fuser.to_quantized(model(), "mxfp8"), model()
    masters = fuser.MasterWeights(layers.parameters())
    with torch.no_grad():
        other[0].weight.mul_(1.7)
    layers.load_state_dict(other.state_dict())
    assert not torch.equal(masters.parameters()[0], layers[0].weight.dequantize())
    masters.read()
    assert torch.equal(masters.parameters()[0], layers[0].weight.dequantize())
    masters.quantize()
    expected = fuser.to_quantized(other, "mxfp8")[0].weight
    assert torch.equal(layers[0].weight.dequantize(), expected.dequantize())


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "fp8_block", "nvfp4", "fp8_delayed"])
def test_its_own_state_may_be_loaded(recipe: str) -> None:
    layers = fuser.to_quantized(model(), recipe)
    masters = fuser.MasterWeights(layers.parameters())
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=0.1))
    for _ in range(2):
        layers.load_state_dict(copy.deepcopy(layers.state_dict()))
        train(layers, optimizer, recipe, 1, torch.float32)


def test_a_capture_compares_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not wait for them, and what its warm-up wrote was put back."""
    layers = fuser.to_quantized(model(), "mxfp8")
    masters = fuser.MasterWeights(layers.parameters())
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=0.1))
    layers.load_state_dict(layers.state_dict())  # counted as a change
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("values were compared"))
    optimizer.step()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    layers.load_state_dict(layers.state_dict())
    with pytest.raises(pytest.fail.Exception, match="values were compared"):
        optimizer.step()


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
def test_a_step_that_would_undo_a_load_is_refused(recipe: str) -> None:
    layers, other = fuser.to_quantized(model(), recipe), model()
    masters = fuser.MasterWeights(layers.parameters())
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=0.1))
    train(layers, optimizer, recipe, 1, torch.float32)
    with torch.no_grad():
        other[0].weight.mul_(1.7)
    layers.load_state_dict(other.state_dict())
    loaded, before = layers[0].weight.dequantize(), [master.clone() for master in masters.parameters()]
    with pytest.raises(RuntimeError, match=r"was written since its master was, .* Call masters\.read\(\)"):
        train(layers, optimizer, recipe, 1, torch.float32)
    assert torch.equal(layers[0].weight.dequantize(), loaded)
    assert all(map(torch.equal, masters.parameters(), before))
    optimizer.zero_grad()
    masters.read()
    train(layers, optimizer, recipe, 1, torch.float32)
    assert torch.allclose(layers[0].weight.dequantize(), loaded, atol=0.2)


def test_weights_that_were_put_back_are_no_change() -> None:
    layers, other = (fuser.to_quantized(model(), "mxfp8") for _ in range(2))
    masters, others = (fuser.MasterWeights(m.parameters()) for m in (layers, other))
    mine, theirs = (m.attach(torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (masters, others))
    for _ in range(2):
        kept = [parameter.detach().clone() for parameter in layers.parameters()]
        with torch.no_grad():
            for parameter in layers.parameters():  # as an average of weights, for an evaluation
                parameter.mul_(0.5)
            for parameter, value in zip(layers.parameters(), kept, strict=True):
                parameter.copy_(value)
        assert train(layers, mine, "mxfp8", 1, torch.float32) == train(other, theirs, "mxfp8", 1, torch.float32)


def test_a_step_takes_main_grad_and_quantizes_from_the_master() -> None:
    layer = fuser.to_quantized(ops.Linear(32, 32, accumulate_into_main_grad=True), "mxfp8")
    layer.weight.main_grad = torch.zeros(32, 32)
    masters = fuser.MasterWeights([layer.weight])
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=0.5))
    before = layer.weight.dequantize()
    with autocast("mxfp8"):
        layer(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    expected = fuser.quantize(before.detach() - 0.5 * layer.weight.main_grad, "mxfp8", "weight")
    for mine, other in zip(layer.weight.quantized.tensors(), expected.quantized.tensors(), strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("flat", [True, False])
def test_main_grad_is_unscaled_and_clipped_in_its_own_memory(flat: bool) -> None:
    layer = fuser.to_quantized(ops.Linear(32, 32, bias=False, accumulate_into_main_grad=True), "mxfp8")
    main_grad = layer.weight.main_grad = torch.zeros(32 * 32) if flat else torch.zeros(32, 32)
    masters = fuser.MasterWeights([layer.weight])
    (master,) = masters.parameters()
    optimizer = masters.attach(torch.optim.SGD([master], lr=0.5))
    before, scaler = master.detach().clone(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with autocast("mxfp8"):
        scaler.scale(layer(torch.randn(8, 32)).sum()).backward()
    expected = main_grad.view(32, 32) / 1024
    scaler.unscale_(optimizer)
    assert torch.equal(main_grad.view(32, 32), expected)
    norm = clip_grad_norm_([master], 0.1)
    assert norm == expected.norm() and torch.equal(main_grad.view(32, 32), expected * (0.1 / (norm + 1e-6)))
    scaler.step(optimizer)
    assert torch.equal(master, before - 0.5 * main_grad.view(32, 32))
    master.grad = torch.ones(32, 32)
    optimizer.zero_grad()
    assert (main_grad == 1).all() and layer.weight.grad is None
    layer.weight.main_grad = main_grad.bfloat16()
    with pytest.raises(ValueError, match=r"has a main_grad of torch.bfloat16.*Give it a main_grad of float32"):
        optimizer.step()


def test_what_is_not_quantized_is_stepped_itself() -> None:
    layers = fuser.to_quantized(model(), "mxfp8")
    layers[0].weight.requires_grad_(False)
    stepped = fuser.MasterWeights(layers.parameters()).parameters()
    kept = [p is s for p, s in zip(layers.parameters(), stepped, strict=True)]
    assert kept == [name == "0.weight" or "bias" in name for name, _ in layers.named_parameters()]
    masters = fuser.MasterWeights(layers.parameters())
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=1e-2))
    optimizer.step()
    layers[0].weight.requires_grad_(True)
    before = layers[0].weight.dequantize()
    with pytest.raises(ValueError, match="1 quantized parameters were frozen when MasterWeights was made, and require"):
        optimizer.step()
    assert torch.equal(layers[0].weight.dequantize(), before)
    with pytest.raises(ValueError, match="got no quantized parameter that requires grad"):
        fuser.MasterWeights(model().parameters())


WRITES: dict[str, Callable[[Sequential], object]] = {
    "load_state_dict": lambda model: model.load_state_dict(
        {"0.weight": torch.randn(64, 64), "0.bias": torch.zeros(64)}
    ),
    "copy_": lambda model: model[0].weight.copy_(torch.randn(64, 64)),
    "mul_": lambda model: model[0].weight.mul_(3),
    "codes": lambda model: model[0].weight.copy_(fuser.to_quantized(Sequential(ops.Linear(64, 64)), "mxfp8")[0].weight),
    "reset_parameters": lambda model: model[0].reset_parameters(),
}


@pytest.mark.parametrize("write", WRITES)
def test_masters_begin_with_what_was_written_since(write):
    """Not with the values that the weights kept before."""
    with fuser.quantized_model_init("mxfp8", preserve_high_precision_init_val=True):
        model = Sequential(ops.Linear(64, 64))
    weight = model[0].weight
    assert weight.get_high_precision_init_val() is not None
    with torch.no_grad():
        WRITES[write](model)
    assert weight.get_high_precision_init_val() is None
    written = weight.dequantize().clone()
    masters = fuser.MasterWeights(model.parameters())
    (master,) = (m for m in masters.parameters() if m.dim() == 2)
    assert torch.equal(master, written)
    masters.quantize()
    assert torch.equal(weight.dequantize(), written)


def test_masters_are_not_copied():
    model = fuser.to_quantized(Sequential(ops.Linear(64, 64)), "mxfp8")
    masters = fuser.MasterWeights(model.parameters())
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=1.0))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make MasterWeights and the optimizer anew"):
            copied((model, masters))
    copy.deepcopy(model), pickle.dumps(model), pickle.dumps(optimizer.state_dict())


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8_current", "mxfp8"])
def test_weights_put_back_before_the_first_step_are_no_change(recipe):
    """Masters without kept values are the dequantized codes, whose own may have a scale with another last bit."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = fuser.to_quantized(Sequential(ops.Linear(128, 64)), recipe)
        masters = fuser.MasterWeights(model.parameters())
        optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=0.0))
        weight = model[0].weight
        kept = copy.deepcopy(weight)
        with torch.no_grad():
            weight.mul_(0.5)
            weight.copy_(kept)
        with autocast(recipe):
            model(torch.randn(32, 128)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="was written since"):
            optimizer.step()


def test_masters_of_shards_begin_with_what_was_loaded_since(one_rank: None) -> None:
    kept, other = (
        fuser.to_quantized(Sequential(ops.Linear(64, 64)), "mxfp8", preserve_high_precision_init_val=keeps)
        for keeps in (True, False)
    )
    for layers in (kept, other):
        fully_shard(layers, mesh=init_device_mesh("cpu", (1,)))
    assert kept[0].weight.to_local().get_high_precision_init_val() is not None
    kept.load_state_dict(other.state_dict())
    fuser.MasterWeights(kept.parameters()).quantize()
    mine, loaded = (layers[0].weight.to_local().dequantize() for layers in (kept, other))
    assert torch.equal(mine, loaded)


@pytest.mark.parametrize("trains", [True, False])
def test_an_amax_that_a_write_recorded_outlives_a_step_that_breaks_off(trains: bool) -> None:
    def model() -> tuple[Sequential, fuser.MasterWeights]:
        torch.manual_seed(0)
        held = fuser.to_quantized(
            Sequential(ops.Linear(64, 64, bias=False)), "fp8_delayed", preserve_high_precision_init_val=True
        )
        return held, fuser.MasterWeights(held.parameters())

    def step(held: Sequential) -> None:
        with autocast("fp8_delayed"):
            held(torch.ones(8, 64)).sum().backward()

    (broken, masters), (whole, others) = model(), model()
    for held, each in ((broken, masters), (whole, others)):
        step(held)
        with torch.no_grad():
            for master in each.parameters():
                master.mul_(6)
        each.quantize()
    with pytest.raises(KeyError), torch.set_grad_enabled(trains), autocast("fp8_delayed"):
        broken(torch.ones(8, 64))
        raise KeyError
    for held in (broken, whole):
        step(held)
    for name, state in whole[0].named_buffers():
        if "weight" in name:
            assert torch.equal(broken[0].get_buffer(name), state), name
