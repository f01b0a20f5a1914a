"""A whole step as one graph: as many steps of it are as many eager ones, and making it leaves no trace."""

from functools import partial

import pytest
import torch
from torch import nn

import fuser
from fuser import Sequential, autocast, ops
from fuser.graph import make_graphed_step
from tests.reference import assert_same_bits, random_sizes

# torch says it of eager steps of an optimizer that can be captured
pytestmark = pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True:UserWarning")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIMIZERS = {
    "sgd": lambda p, device: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p, device: torch.optim.AdamW(p, lr=0.01, capturable=device == "cuda"),
}


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda":  # filling new memory is a kernel of its own, which graphs would repeat
        torch.utils.deterministic.fill_uninitialized_memory = False
    return request.param


def make(device, optimizer="adam", recipe=None, **switches):
    torch.manual_seed(0)
    model = Sequential(
        ops.GroupedLinear(4, 32, 64, dtype=torch.bfloat16, device=device, **switches),
        ops.SwiGLU(),
        ops.GroupedLinear(4, 32, 32, dtype=torch.bfloat16, device=device, **switches),
        ops.Dropout(0.1),
    )
    chosen = OPTIMIZERS[optimizer](model.parameters(), device)

    def step(x, sizes, target):
        chosen.zero_grad()
        with autocast(recipe):
            loss = (model(x, split_sizes=sizes) - target).float().square().mean()
        loss.backward()
        if switches:
            model.backward_dw()
        chosen.step()
        return loss

    return model, chosen, step


def batch(seed, device):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(random_sizes(generator, 4, 48 if seed % 2 else 30), device=device)
    x, target = (torch.randn(48, 32, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    return x, sizes, target


def state_of(model, optimizer):
    tensors = {f"model {name}": t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for index, parameter in enumerate(model.parameters()):
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{index} {name}": t.clone() for name, t in state.items() if isinstance(t, torch.Tensor)}
    return tensors


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_delayed"])
@pytest.mark.parametrize("switches", [{}, {"delay_wgrad_compute": True}], ids=str)
def test_steps_have_the_bits_of_eager_ones(optimizer, recipe, switches, device):
    results = []
    for captured in (False, True):
        model, chosen, step = make(device, optimizer, recipe, **switches)
        call = make_graphed_step(step, batch(99, device), modules=model, optimizers=chosen) if captured else step
        torch.manual_seed(1)
        losses = [call(*batch(seed, device)).detach().clone() for seed in range(50 if device == "cuda" else 8)]
        results.append({"losses": torch.stack(losses)} | state_of(model, chosen))
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("fails", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("is_new", [True, False])
def test_making_it_disturbs_nothing_also_when_it_fails(fails, is_new, device):
    model, chosen, step = make(device, "adam", "mxfp8")
    if not is_new:
        step(*batch(0, device))
    before, rng = state_of(model, chosen), torch.get_rng_state()
    grads = [parameter.grad for parameter in model.parameters()]
    calls = []

    def failing(*args):
        calls.append(1)
        loss = step(*args)
        if len(calls) == fails:
            raise ArithmeticError("as asked")
        return loss

    if fails:
        with pytest.raises(ArithmeticError):
            make_graphed_step(failing, batch(1, device), modules=model, optimizers=chosen)
    else:
        make_graphed_step(failing, batch(1, device), modules=model, optimizers=chosen)
    after = state_of(model, chosen)
    if fails:
        assert after.keys() == before.keys()
    assert_same_bits({name: after[name] for name in before}, before)
    assert all(not after[name].any() for name in after.keys() - before.keys())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


def test_gradients_are_there_after_a_replay(device):
    model, chosen, step = make(device)
    eager, _, eager_step = make(device)
    call = make_graphed_step(step, batch(1, device), modules=[model], optimizers=[chosen])
    for run in (call, eager_step):
        torch.manual_seed(0)
        run(*batch(2, device))
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    call.reset()
    call.reset()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(RuntimeError, match="was reset"):
        call(*batch(2, device))


def test_a_step_must_clear_its_gradients(device):
    model = nn.Linear(4, 4, device=device)
    with pytest.raises(ValueError, match=r"adds to gradients that were there before it.*zero_grad"):
        make_graphed_step(lambda x: model(x).sum().backward(), (torch.randn(4, 4, device=device),), modules=model)


def test_masters_of_quantized_weights_are_restored_too(device):
    results = []
    for captured in (False, True):
        model = fuser.to_quantized(make(device, bias=False)[0], "mxfp8")
        masters = fuser.MasterWeights(model.parameters())
        optimizer = masters.attach(OPTIMIZERS["sgd"](masters.parameters(), device))

        def step(x, sizes, target, clear=True, model=model, optimizer=optimizer):
            if clear:
                optimizer.zero_grad()
            with autocast("mxfp8"):
                (model(x, split_sizes=sizes) - target).float().square().mean().backward()
            optimizer.step()

        graphed = make_graphed_step(step, batch(1, device), modules=model, optimizers=optimizer) if captured else step
        torch.manual_seed(1)
        for seed in range(3):
            graphed(*batch(seed, device))
        results.append({str(index): master.detach() for index, master in enumerate(masters.parameters())})
    assert_same_bits(results[1], results[0])
    with pytest.raises(ValueError, match="adds to gradients that were there before it"):
        make_graphed_step(partial(step, clear=False), batch(1, device), modules=model, optimizers=optimizer)


def test_settings_of_the_optimizer_are_fixed(device):
    model, chosen, step = make(device, "sgd")
    call = make_graphed_step(step, batch(1, device), modules=model, optimizers=chosen)
    call(*batch(2, device))
    chosen.param_groups[0]["lr"] = 0.01
    with pytest.raises(RuntimeError, match="A setting of an optimizer has changed since the capture"):
        call(*batch(3, device))


@pytest.mark.gpu
def test_an_optimizer_on_the_host_is_refused():
    model = nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"Adam counts its steps on the host. Give Adam\(\.\.\., capturable=True\)"):
        make_graphed_step(lambda x: model(x), (torch.randn(4, 4, device="cuda"),), modules=model, optimizers=optimizer)


def test_inputs_must_keep_their_form(device):
    model, chosen, step = make(device)
    call = make_graphed_step(step, batch(1, device), modules=model, optimizers=chosen)
    x, sizes, target = batch(2, device)
    with pytest.raises(ValueError, match=r"step: '0' has shape \[20, 32\]"):
        call(x[:20], sizes, target)
