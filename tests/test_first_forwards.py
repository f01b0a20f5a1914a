"""A forward within a backward runs under the recipe of the forward that it computes again, or is refused."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fuser import Sequential, autocast, checkpoint, ops
from recipes import HighPrecision, MXFP8BlockScaling, NVFP4BlockScaling, current_recipe
from recipes.first_forwards import FirstForwards

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True])
RECIPES = {
    name: name if name != "nvfp4" else NVFP4BlockScaling(disable_stochastic_rounding=True)
    for name in ("mxfp8", "nvfp4", "bf16")
}


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch):
    """Calls of `fuser.checkpoint` are kept for the process: those without gradients, of other tests, wait for good."""
    monkeypatch.setattr(sys.modules["fuser.checkpoint"], "_calls", FirstForwards())


def dense():
    return Sequential(ops.Linear(32, 48), ops.SwiGLU(), ops.Linear(24, 32))


def everything(y, x, model):
    y.square().sum().backward()
    found = [y.detach(), x.grad, *[p.grad for p in model.parameters()]]
    model.zero_grad()
    return found


def leaf():
    torch.manual_seed(3)
    return torch.randn(8, 32, requires_grad=True)


def checkpointed(model, use_reentrant, recipe, covering=None, torch_last=False):
    """By torch's own checkpoint, with the recipe around forward alone.

    torch_last: the node of a torch function asks for the recomputation first, and not one of the pipeline's
    """
    x = leaf()
    with autocast(recipe):
        y = torch_checkpoint((lambda x: model(x).sin()) if torch_last else model, x, use_reentrant=use_reentrant)
    if covering is None:
        return everything(y, x, model)
    with autocast(covering):
        return everything(y, x, model)


def stored(model, recipe, torch_last=False):
    x = leaf()
    with autocast(recipe):
        y = model(x).sin() if torch_last else model(x)
    return everything(y, x, model)


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("torch_last", [False, True])
@pytest.mark.parametrize("covering", [None, "bf16", "fp8_current"])
@pytest.mark.parametrize("recipe", RECIPES)
@REENTRANT
def test_torchs_checkpoint_recomputes_under_the_recipe_of_forward(recipe, covering, use_reentrant, torch_last):
    """Also where backward runs outside of it, or within another one."""
    model = dense()
    found = checkpointed(model, use_reentrant, RECIPES[recipe], covering, torch_last)
    assert same(found, stored(model, RECIPES[recipe], torch_last))


@REENTRANT
def test_an_operations_own_recipe_is_kept(use_reentrant):
    model = dense()
    model[0].set_recipe("fp8_block")
    assert same(checkpointed(model, use_reentrant, "mxfp8"), stored(model, "mxfp8"))


@REENTRANT
def test_scales_that_have_moved_are_refused(use_reentrant):
    with pytest.raises(RuntimeError, match=r"'fp8_delayed' is computed again .* Use fuser.checkpoint"):
        checkpointed(dense(), use_reentrant, "fp8_delayed")


def test_two_recipes_that_wait_are_refused():
    """By the reentrant checkpoint, which tells nothing of the forward that it computes again."""
    model, x, total = dense(), leaf(), 0
    for recipe in ("mxfp8", "bf16"):
        with autocast(recipe):
            total = total + torch_checkpoint(model, x, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="'high_precision' and 'mxfp8' wait for their backward. Use fuser"):
        total.backward()


def test_each_forward_that_waits_is_computed_again_under_its_own_recipe():
    """By the checkpoint that is not reentrant, whose frame tells which one it is; in any order."""
    model = dense()
    expected = [stored(model, recipe) for recipe in RECIPES.values()]
    xs, ys = [leaf() for _ in RECIPES], []
    for x, recipe in zip(xs, RECIPES.values(), strict=True):
        with autocast(recipe):
            ys.append(torch_checkpoint(model, x, use_reentrant=False))
    for index in (1, 2, 0):
        assert same(everything(ys[index], xs[index], model), expected[index])


def test_scales_of_another_step_are_never_taken_for_those_of_a_forward():
    """Two steps of delayed scaling: within the second one, the first one's forward is refused, the second one's not,
    though both are waiting, also where the first one is never run."""
    model = dense()
    with autocast("fp8_delayed"):
        first = torch_checkpoint(model, leaf(), use_reentrant=False)
    twin = copy.deepcopy(model)
    for backward_of_first in (False, True):
        x = leaf()
        with autocast("fp8_delayed"):
            second = torch_checkpoint(model, x, use_reentrant=False)
            found = everything(second, x, model)
            if backward_of_first:
                with pytest.raises(RuntimeError, match=r"'fp8_delayed' is computed again .* Use fuser.checkpoint"):
                    first.sum().backward()
        again = leaf()
        with autocast("fp8_delayed"):
            assert same(found, everything(twin(again), again, twin))


@REENTRANT
def test_steps_under_changing_recipes_with_evaluations_between(use_reentrant):
    model = dense()
    for recipe in ("bf16", "mxfp8", "fp8_current", "mxfp8"):
        found = checkpointed(model, use_reentrant, recipe, torch_last=True)
        assert same(found, stored(model, recipe, torch_last=True))
        with torch.no_grad(), autocast("fp8_block"):
            model.eval()(leaf())
        model.train()


@REENTRANT
def test_several_microbatches_wait_at_once(use_reentrant):
    model = dense()
    xs = [torch.randn(8, 32, requires_grad=True) for _ in range(3)]
    ys = []
    for x in xs:
        with autocast("mxfp8"):
            ys.append(torch_checkpoint(model, x, use_reentrant=use_reentrant))
    for y in reversed(ys):
        y.sum().backward()
    for x in xs:
        again = x.detach().requires_grad_()
        with autocast("mxfp8"):
            model(again).sum().backward()
        assert torch.equal(again.grad, x.grad)


class Look(ops.SwiGLU):
    """Notes the recipe that its backward sees."""

    seen = None

    def fuser_backward(self, ctx, dy, d_extra_outputs):
        self.seen = current_recipe()
        return super().fuser_backward(ctx, dy, d_extra_outputs)


def test_backward_on_another_thread_has_the_recipe_of_its_forward():
    model = Sequential(Look())
    with autocast("mxfp8"):
        y = model(torch.randn(8, 32, requires_grad=True))
    with autocast("fp8_current"), ThreadPoolExecutor(1) as pool:
        pool.submit(y.sum().backward).result()
    assert model[0].seen == MXFP8BlockScaling() and current_recipe() == HighPrecision()


@pytest.mark.gpu
@pytest.mark.parametrize("torch_last", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@REENTRANT
def test_on_the_threads_of_a_gpu(recipe, use_reentrant, torch_last):
    model = Sequential(ops.Linear(64, 128), ops.SwiGLU(), ops.Linear(64, 32)).cuda().bfloat16()
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)

    def run(function):
        leaf = x.clone().requires_grad_()
        with autocast(RECIPES[recipe]):
            y = function(leaf)
        return everything(y, leaf, model)

    def segment(x):
        return model(x).sin() if torch_last else model(x)

    assert same(run(lambda x: torch_checkpoint(segment, x, use_reentrant=use_reentrant)), run(segment))


def test_a_second_backward_recomputes_under_the_recipe_too():
    model, x = dense(), leaf()
    with autocast("mxfp8"):
        y = torch_checkpoint(model, x, use_reentrant=True).square().sum()
    y.backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.backward()
    assert torch.equal(x.grad, first)


@REENTRANT
def test_forwards_that_get_no_backward_stand_in_nobodys_way(use_reentrant):
    """A loss that was dropped, an evaluation in training mode, a frozen model."""
    model = dense()
    with autocast("mxfp8"):
        model(leaf())
        with torch.no_grad():
            model(leaf())
        model.requires_grad_(False)(leaf().detach())
        model.requires_grad_(True)
    if use_reentrant:
        with torch.no_grad(), autocast("nvfp4"):
            model.eval()(leaf())
        model.train()
        recipe = "mxfp8"  # of another one it could not be told which runs again: refused
    else:
        recipe = "fp8_current"
    assert same(checkpointed(model, use_reentrant, recipe), stored(model, recipe))


def test_a_forward_that_was_dropped_does_not_stop_the_recording_of_amaxes():
    model = dense()
    with autocast("fp8_delayed"):
        model(leaf() * 0.01)
    x = 100 * leaf().detach()
    for _ in range(2):
        with autocast("fp8_delayed"):
            torch_checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()
    assert model[0].quantizer_input_scale.item() == pytest.approx(448 / x.detach().abs().max().item())


@pytest.mark.parametrize("change", ["hook", "append"])
@REENTRANT
def test_a_model_changed_between_forward_and_backward_keeps_the_recipe(use_reentrant, change):
    """Its pipelines are made anew; an operation with a hook becomes one of its own."""
    model = dense()
    expected = stored(model, "mxfp8")
    x = leaf()
    with autocast("mxfp8"):
        y = torch_checkpoint(model, x, use_reentrant=use_reentrant)
    if change == "hook":
        model[0].register_forward_hook(lambda *_: None)
    else:
        model.append(torch.nn.Identity())
    assert same(everything(y, x, model), expected)


@REENTRANT
def test_delayed_scaling_records_once_where_autocast_covers_both_passes(use_reentrant):
    """Reentrant checkpointing runs the first time without gradients: what is computed again records."""
    found = []
    for run in (lambda model, x: torch_checkpoint(model, x, use_reentrant=use_reentrant), lambda model, x: model(x)):
        torch.manual_seed(0)
        model = dense()
        for _ in range(3):
            x = leaf()
            with autocast("fp8_delayed"):
                y = run(model, x)
                steps = everything(y, x, model)
        assert (model[0].quantizer_input_scale != 1).all()
        found.append([*steps, *model.buffers()])
    assert same(*found)


@REENTRANT
def test_checkpoints_within_checkpoints_have_the_recipe_of_forward(mxfp8_and_another_that_waits, use_reentrant):
    """A non-reentrant one of torch's or of `fuser` within torch's, with an operation of torch in between."""
    model, covering = mxfp8_and_another_that_waits
    for inner in (lambda h: torch_checkpoint(model, h, use_reentrant=False), lambda h: checkpoint(model, h)):
        x, again = leaf(), leaf()
        with autocast("mxfp8"):
            y = torch_checkpoint(lambda x, inner=inner: inner(x.sin()).sin(), x, use_reentrant=use_reentrant)
            expected = model(again.sin()).sin()
        with autocast(covering):
            assert same(everything(y, x, model), everything(expected, again, model))


def test_hooks_within_a_checkpoint_hide_no_recipe(mxfp8_and_another_that_waits):
    model, covering = mxfp8_and_another_that_waits

    def function(x):
        with torch.autograd.graph.save_on_cpu():
            y = model(x.sin())
        return y.sin()  # which the checkpoint saves, and so computes the function again

    x, again = leaf(), leaf()
    with autocast("mxfp8"):
        y, expected = torch_checkpoint(function, x, use_reentrant=False), function(again)
    with autocast(covering):
        assert same(everything(y, x, model), everything(expected, again, model))


@pytest.fixture(params=["bf16", "fp8_current"])
def mxfp8_and_another_that_waits(request):
    """A model whose forward under another recipe waits for a backward, and that recipe."""
    model = dense()
    with autocast(request.param):
        y = model(leaf())
    yield model, request.param
    del y


@pytest.mark.parametrize("outer", ["bf16", "fp8_current"])
def test_forwards_of_one_checkpoint_have_each_their_own_recipe(outer):
    """Also one whose result was thrown away."""
    model = dense()

    def function(x):
        gate = model(x).detach()
        with autocast("mxfp8"):
            y = model(x)
        return y * gate + model(x)

    x, again = leaf(), leaf()
    with autocast(outer):
        y, expected = torch_checkpoint(function, x, use_reentrant=False), function(again)
    assert same(everything(y, x, model), everything(expected, again, model))


@REENTRANT
def test_an_autocast_inside_of_the_function_does_not_bring_back_scales_that_moved(use_reentrant):
    model = dense()

    def function(x):
        with autocast("fp8_delayed"):
            return model(x)

    y = torch_checkpoint(function, leaf(), use_reentrant=use_reentrant)
    with pytest.raises(RuntimeError, match=r"'fp8_delayed' is computed again .* Use fuser.checkpoint"):
        y.sum().backward()
    twin, x, again = copy.deepcopy(model), leaf(), leaf()
    y = checkpoint(function, x, use_reentrant=use_reentrant)
    with autocast("fp8_delayed"):
        expected = twin(again)
    assert same(everything(y, x, model), everything(expected, again, twin))


def test_an_autocast_in_a_hook_decides_though_another_forward_waits(mxfp8_and_another_that_waits):
    """A forward of the hook's own is not computed again, of which the runner sees no difference."""
    model, _ = mxfp8_and_another_that_waits
    found = []

    def hook(gradient):
        for recipe in ("mxfp8", "high_precision"):
            with autocast(recipe):
                found.append(model(leaf()).detach())

    dy = torch.ones(8, 32, requires_grad=True)
    dy.register_hook(hook)
    dy.sum().backward()
    for recipe, y in zip(("mxfp8", "high_precision"), found, strict=True):
        with autocast(recipe):
            assert torch.equal(y, model(leaf()))


def test_batch_invariance_around_a_checkpoint_holds_for_what_is_computed_again():
    seen = []

    class Look(ops.SwiGLU):
        def fuser_forward(self, ctx, x, extras):
            seen.append(current_recipe().batch_invariant)
            return super().fuser_forward(ctx, x, extras)

    model = Sequential(Look())

    def function(x):
        with autocast("mxfp8"):
            return model(x).sin()

    with autocast(batch_invariant=True):
        y = torch_checkpoint(function, leaf(), use_reentrant=False)
    y.sum().backward()
    assert seen == [True, True]


def test_a_hook_of_somebody_elses_may_hold_nothing():
    """A cell of its closure that is still empty when forward looks for torch's checkpoint."""

    def hook():
        return lambda tensor: tensor if isinstance(tensor, torch.Tensor) else later
        later = None  # makes it a variable of `hook`, which never gets a value

    with torch.autograd.graph.saved_tensors_hooks(hook(), hook()):
        dense()(leaf()).sum().backward()
