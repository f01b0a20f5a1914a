"""DelayedScaling: scales from earlier steps, against a simulation in plain Python; state, checkpoints, exceptions."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import fuser
from fuser import Sequential, autocast, checkpoint, ops, quantized_model_init
from recipes import E4M3, E5M2, DelayedScaling, Format, MXFP8BlockScaling, Role
from recipes.casts.amax_history import end_step_ref
from recipes.pending import PendingUpdates

SHORT = DelayedScaling(amax_history_len=4)


class History:
    """One tensor's history in plain Python, by the words of TransformerEngine's documentation."""

    def __init__(self, recipe: DelayedScaling, largest: float) -> None:
        self.recipe, self.largest = recipe, largest
        self.seen: list[float] = []
        self.scale = 1.0

    def step(self, amax: float) -> None:
        if amax:
            self.seen = (self.seen + [amax])[-self.recipe.amax_history_len :]
        newest = max(self.seen, default=0.0) if self.recipe.amax_compute_algo == "max" else amax
        if 0 < newest < float("inf"):
            quotient = torch.tensor(self.largest * 2.0**-self.recipe.margin) / torch.tensor(newest)
            self.scale = min(quotient.item(), torch.finfo(torch.float32).max)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(SHORT, id="max"),
        pytest.param(DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"), id="most-recent"),
        pytest.param(DelayedScaling(amax_history_len=1), id="history-1"),
        pytest.param(DelayedScaling(amax_history_len=3, margin=2, fp8_format=Format.E4M3), id="margin"),
    ],
)
def test_scales_follow_the_history(recipe):
    """w, x and dy constant in each step, so that their amaxes are known; a step of zeros does not roll the history."""
    op = ops.Linear(8, 8, bias=False)
    forms = {"input": recipe.fp8_format.forward, "weight": recipe.fp8_format.forward}
    forms["grad_output"] = recipe.fp8_format.backward
    histories = {role: History(recipe, form.max) for role, form in forms.items()}
    steps = [(2.0, 7.0, 1.0), (5.0, 3.0, 2.0), (3.0, 0.0, 1.0), (11.0, 5.0, 0.25), (1.0, 2.0, 0.5), (1.0, 1.0, 0.125)]
    for w, x, dy in steps:
        with torch.no_grad():
            op.weight.fill_(w)
        with autocast(recipe):
            y = op(torch.full((4, 8), x, requires_grad=True))
        y.backward(torch.full((4, 8), dy))
        for role, amax in (("weight", w), ("input", x), ("grad_output", dy)):
            history = histories[role]
            history.step(amax)
            assert op._buffers[f"quantizer_{role}_scale"].item() == history.scale


def test_a_step_casts_with_the_scale_of_the_step_before():
    op = ops.Linear(16, 16, bias=False)
    x = torch.randn(8, 16)
    for _ in range(3):
        scale = getattr(op, "quantizer_input_scale", torch.ones(1)).clone()
        w_scale = getattr(op, "quantizer_weight_scale", torch.ones(1)).clone()
        with autocast(SHORT):
            y = op(x)
        x_q = E4M3.encode(x * scale).double() / scale.double()
        w_q = E4M3.encode(op.weight.detach() * w_scale).double() / w_scale.double()
        torch.testing.assert_close(y.double(), x_q @ w_q.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("amax", [float("inf"), float("nan")], ids=str)
def test_an_amax_that_is_no_number_leaves_the_scale_alone(amax):
    history, scale = torch.zeros(4, 2), torch.tensor([3.0, 3.0])
    history[0] = torch.tensor([amax, 7.0])
    end_step_ref(history, scale, 448.0, "most_recent")
    assert scale.tolist() == [3.0, 64.0]
    assert history[0].tolist() == [0.0, 0.0] and history[-1, 1] == 7.0


def test_a_tiny_amax_gives_the_largest_scale():
    history, scale = torch.zeros(2, 1), torch.ones(1)
    history[0] = 2.0**-149
    end_step_ref(history, scale, 448.0, "max")
    assert scale.item() == torch.finfo(torch.float32).max


def test_functions_in_place_of_the_formulas():
    seen = []

    def mean_of_history(history):
        seen.append(history.clone())
        return history.mean(0)

    def half(amax, old, largest, recipe):
        assert recipe.margin == 3 and largest in (448.0, 57344.0)
        return old / 2

    recipe = DelayedScaling(
        margin=3, amax_history_len=2, amax_compute_algo=mean_of_history, scaling_factor_compute_algo=half
    )
    op = ops.Linear(4, 4, bias=False)
    with autocast(recipe):
        op(torch.full((2, 4), 6.0))
    assert any(torch.equal(history, torch.tensor([[6.0], [0.0]])) for history in seen)
    assert op.quantizer_input_scale.item() == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"amax_history_len": 0}, "amax_history_len is 0, but must be at least 1", id="no-history"),
        pytest.param({"amax_compute_algo": "mean"}, "amax_compute_algo is 'mean', but must be", id="algorithm"),
    ],
)
def test_bad_fields_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DelayedScaling(**settings)


# --------------------------------------------------------------------------------------------- when a step ends


def scales_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers() if "quantizer_" in name}


def mlp(groups: int = 3, path: str | None = None) -> Sequential:
    torch.manual_seed(1)
    return Sequential(
        ops.GroupedLinear(groups, 16, 64), ops.ScaledSwiGLU(), ops.GroupedLinear(groups, 32, 16), path=path
    )


def step(model: nn.Module, seed: int, run=None, recipe=SHORT, sizes=(5, 0, 3)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 16, generator=generator).requires_grad_()
    model.zero_grad()
    scales = torch.rand(8, generator=generator)
    with autocast(recipe):
        y = (run or model)(x, split_sizes=list(sizes), scales=scales)
    y.backward(torch.randn(y.shape, generator=generator))
    return torch.cat([y.detach().flatten(), x.grad.flatten(), *(p.grad.flatten() for p in model.parameters())])


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    first, second = scales_of(left), scales_of(right)
    assert first.keys() == second.keys() and first
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_each_group_has_a_scale_of_its_own():
    model = mlp()
    step(model, 0)
    state = scales_of(model)
    assert state["0.quantizer_input_scale"].shape == (3,) and state["0.quantizer_input_amax_history"].shape == (4, 3)
    assert state["0.quantizer_input_scale"][1] == 1.0  # it has no rows
    assert len({round(s, 6) for s in state["0.quantizer_input_scale"].tolist()}) == 3


def test_evaluation_leaves_the_state_alone():
    model = mlp()
    step(model, 0)
    before = scales_of(model)
    with torch.no_grad(), autocast(SHORT):
        model(torch.randn(8, 16) * 100, split_sizes=[4, 2, 2], scales=torch.rand(8))
    for name, tensor in scales_of(model).items():
        assert torch.equal(tensor, before[name])


def test_an_evaluation_with_another_history_length_leaves_the_state_alone():
    model = Sequential(ops.Linear(16, 16))
    for seed in range(5):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        with autocast(SHORT):
            model(x.mul(seed + 1)).sum().backward()
    before = copy.deepcopy(dict(model.named_buffers()))
    for length in (1, 9):
        with torch.no_grad(), autocast(DelayedScaling(amax_history_len=length)):
            model(x)
    after = dict(model.named_buffers())
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_nested_checkpoints_record_once(outer, inner):
    """Whether reentrant, whose first run is without gradients, or not."""
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = Sequential(ops.Linear(16, 16))

        def nested(x, model=model):
            return checkpoint(lambda x: checkpoint(model, x, use_reentrant=inner), x, use_reentrant=outer)

        for _ in range(2):
            x = torch.randn(4, 16).mul(3).requires_grad_()
            with autocast(SHORT):
                y = nested(x) if checkpoints else model(x)
            y.square().sum().backward()
        found.append(dict(model.named_buffers()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_an_evaluation_within_a_checkpoint_records_nothing():
    model = Sequential(ops.Linear(16, 16))

    def function(x):
        with torch.no_grad():
            scale = model(1000 * x).abs().max().clamp(max=1)
        return model(x) * scale

    with autocast(SHORT):
        checkpoint(function, torch.ones(4, 16, requires_grad=True)).sum().backward()
    assert model[0].quantizer_input_amax_history.max() == 1


def test_what_a_step_has_recorded_keeps_the_addresses_of_its_states():
    """Else the state of another operation may come to lie there, and be taken for one that has recorded already."""
    updates = PendingUpdates()
    for number in range(20):
        updates.add(number, torch.zeros(4))
    assert list(updates.take().values()) == list(range(20))


def test_calls_in_one_context_are_one_step():
    op, x = ops.Linear(4, 4, bias=False), torch.ones(2, 4)
    with autocast(SHORT):
        op(x * 7)
        op(x * 2)
        assert op.quantizer_input_scale.item() == 1.0
    assert op.quantizer_input_scale.item() == 64.0
    assert sorted(op.quantizer_input_amax_history.flatten().tolist()) == [0.0, 0.0, 0.0, 7.0]


def test_only_the_outermost_context_ends_a_step():
    op = ops.Linear(4, 4, bias=False)
    with autocast("mxfp8"):
        with autocast(SHORT):
            op(torch.full((2, 4), 7.0))
        assert op.quantizer_input_scale.item() == 1.0
    assert op.quantizer_input_scale.item() == 64.0


def test_contexts_that_overlap_end_their_steps():
    """As those of generators that take turns: the outermost of those that are open ends a step."""
    operations = [ops.Linear(4, 4, bias=False) for _ in range(2)]

    def stream(op):
        while True:
            with autocast(SHORT):
                yield op(torch.full((2, 4), 7.0, requires_grad=True))

    streams = [stream(op) for op in operations]
    for _ in range(3):
        for each in streams:
            next(each).sum().backward()
    assert [op.quantizer_input_scale.item() for op in operations] == [64.0, 64.0]
    for each in reversed(streams):
        each.close()

    op = ops.Linear(4, 4, bias=False)
    first, second = autocast(SHORT), autocast(SHORT)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    op(torch.full((2, 4), 7.0))
    assert op.quantizer_input_scale.item() == 1.0
    second.__exit__(None, None, None)
    assert op.quantizer_input_scale.item() == 64.0


def test_without_a_context_a_call_is_a_step():
    op = ops.Linear(4, 4, bias=False).set_recipe(SHORT)
    op(torch.full((2, 4), 7.0))
    assert op.quantizer_input_scale.item() == 64.0


def test_an_exception_leaves_no_half_of_a_step():
    model = mlp()
    step(model, 0)
    before = scales_of(model)
    with pytest.raises(KeyError), autocast(SHORT):
        model(torch.randn(8, 16), split_sizes=[4, 2, 2], scales=torch.rand(8))
        raise KeyError
    for name, tensor in scales_of(model).items():
        assert torch.equal(tensor, before[name]), name


def test_an_exception_at_the_end_of_a_step_leaves_no_amax_to_the_next_one():
    def fails(history):
        raise ArithmeticError

    model = mlp()
    step(model, 0)
    with pytest.raises(ArithmeticError), autocast(replace(SHORT, amax_compute_algo=fails)):
        model(torch.randn(8, 16), split_sizes=[4, 2, 2], scales=torch.rand(8))
    histories = [tensor for name, tensor in model.named_buffers() if name.endswith("amax_history")]
    assert histories and not any(history[0].any() for history in histories)


def test_an_exception_in_backward_leaves_no_half_of_a_step():
    model = mlp()
    step(model, 0)
    before = scales_of(model)

    class Broken(ops.Bias):
        def fuser_backward(self, ctx, dy, d_extra_outputs):
            raise KeyError

    broken = Sequential(Broken(16), *model)
    with autocast(SHORT):
        y = broken(torch.randn(8, 16), split_sizes=[4, 2, 2], scales=torch.rand(8))
    forward_only = scales_of(model)
    with pytest.raises(KeyError):
        y.sum().backward()
    after = scales_of(model)
    for name, tensor in after.items():
        assert torch.equal(tensor, (before if "grad_output" in name else forward_only)[name]), name


# -------------------------------------------------------------------------------------------- paths, checkpoints


def test_both_paths_and_the_fused_mlp_agree_bit_for_bit():
    fused, split, unfused = mlp(), mlp(path="split"), mlp()
    alone = Sequential(*unfused, fusions=[])
    for seed in range(3):
        results = [step(model, seed) for model in (fused, split, alone)]
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert_same_state(fused, split)
    assert_same_state(fused, alone)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit_and_rolls_once(use_reentrant):
    plain, saving = mlp(), mlp()

    def recomputed(x, **extras):
        return checkpoint(lambda x: saving(x, **extras), x, use_reentrant=use_reentrant)

    for seed in range(4):
        first, second = step(plain, seed), step(saving, seed, recomputed)
        assert torch.equal(first, second)
        assert_same_state(plain, saving)


def test_pipelined_microbatches_go_back_through_their_own_weights():
    """Forward 1, forward 2, backward 1, backward 2: dx of each is with the weight as its own forward cast it."""
    op = ops.Linear(16, 16, bias=False)
    xs = [torch.randn(4, 16).requires_grad_() for _ in range(2)]
    scales, ys = [], []
    for x in xs:
        scales.append(getattr(op, "quantizer_weight_scale", torch.ones(1)).clone())
        with autocast(DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3)):
            ys.append(op(x))
    assert scales[0] != scales[1]
    for x, y, scale in zip(xs, ys, scales, strict=True):
        y.backward(torch.eye(16)[:4])
        w_q = E4M3.encode(op.weight.detach() * scale).float() / scale
        torch.testing.assert_close(x.grad, w_q[:4], rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------------- state


def train(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        last = step(model, seed)
        optimizer.step()
    return last


def test_continuing_from_a_checkpoint_changes_no_bit(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")
    expected = train(model, optimizer, range(2, 4))

    other = mlp()
    step(other, 77, recipe=MXFP8BlockScaling())
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    saved = torch.load(tmp_path / "checkpoint")
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    assert torch.equal(train(other, other_optimizer, range(2, 4)), expected)
    assert_same_state(model, other)


def test_a_recipe_without_state_adds_no_key():
    model = mlp()
    keys = set(model.state_dict())
    step(model, 0, recipe="mxfp8")
    assert set(model.state_dict()) == keys
    step(model, 0)
    assert len(set(model.state_dict()) - keys) == 2 * 3 * 2


def test_strict_loading_between_any_two_recipes():
    with_state, without = mlp(), mlp()
    step(with_state, 0)
    without.load_state_dict(with_state.state_dict())
    assert_same_state(with_state, without)
    fresh = mlp()
    with_state.load_state_dict(fresh.state_dict())
    assert not scales_of(with_state)  # back to the beginning
    assert torch.equal(step(with_state, 3), step(fresh, 3))


@pytest.mark.parametrize("given", [[], ["2.bias"], ["0.weight", "2.quantizer_input_scale"]], ids=str)
def test_states_that_a_part_of_a_state_dict_lacks_stay(given):
    """As all that is absent, with strict=False and where strict loading fails."""
    model, other = mlp(), mlp()
    step(model, 0)
    step(other, 1)
    part = {name: tensor for name, tensor in other.state_dict().items() if name in given}
    before = scales_of(model)
    for strict in (False, True):
        if strict:
            with pytest.raises(RuntimeError, match="Missing key"):
                model.load_state_dict(part)
        else:
            model.load_state_dict(part, strict=False)
        after = scales_of(model)
        of_weight = {name for name in before if name.startswith("0.quantizer_weight_") and "0.weight" in given}
        assert after.keys() == before.keys() - of_weight  # which begin anew with it
        for name, tensor in after.items():
            assert torch.equal(tensor, part.get(name, before[name])), name


@pytest.mark.parametrize("make", [lambda: ops.Quantize(backward=True), lambda: weight_norm(ops.Linear(16, 16))])
def test_states_that_a_whole_state_dict_lacks_begin_anew(make):
    """Without torch's metadata, too, as of a file of safetensors."""
    model, fresh = (Sequential(make(), ops.Linear(16, 16, bias=False)) for _ in range(2))
    for module in (model, fresh):
        torch.manual_seed(2)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    x = torch.randn(16, 16)
    with autocast(SHORT):
        model(x.clone().requires_grad_()).sum().backward()
    assert any(name.startswith("0.") for name in scales_of(model))
    model.load_state_dict(dict(fresh.state_dict()))
    assert not scales_of(model)


@pytest.mark.parametrize("stacked", [True, False])
def test_weights_that_are_held_quantized_and_loaded_alone_have_their_own_scale(stacked):
    with quantized_model_init(SHORT):
        model = Sequential(ops.GroupedLinear(2, 16, 32, stacked=stacked))
    for _ in range(2):
        with autocast(SHORT):
            model(torch.randn(8, 16, requires_grad=True), split_sizes=[5, 3]).sum().backward()
    name = "0.weight" if stacked else "0.weight0"
    weight = 20 * torch.randn(2, 32, 16) if stacked else 20 * torch.randn(32, 16)
    model.load_state_dict({name: weight}, strict=False)
    found = fuser.dequantized_state_dict(model.state_dict())[name]
    torch.testing.assert_close(found.float(), weight, rtol=0.07, atol=0.05)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_scales_of_another_number_of_groups_are_refused(length):
    """Such as those of all experts, where weights and histories were cut to a rank's."""
    model = mlp(2)
    step(model, 0, sizes=(5, 3))
    state = model.state_dict()
    state["0.quantizer_input_scale"] = torch.full((length,), 5.0)
    model.load_state_dict(state)
    with pytest.raises(ValueError, match=rf"has quantizer_input_scale of shape \[{length}\], but \[2\] is needed"):
        step(model, 1, sizes=(5, 3))


def test_a_history_of_another_length_is_cut_or_goes_on():
    model = mlp()
    step(model, 0)
    history = model[0].quantizer_input_amax_history.clone()
    for length in (2, 6):
        other = copy.deepcopy(model)
        step(other, 1, recipe=DelayedScaling(amax_history_len=length))
        assert len(other[0].quantizer_input_amax_history) == length
    assert torch.equal(model[0].quantizer_input_amax_history, history)


def test_copies_and_pickles_go_on_alike():
    model = mlp()
    step(model, 0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for seed in (1, 2):
        expected = step(model, seed)
        for twin in twins:
            assert torch.equal(step(twin, seed), expected)


def test_converting_a_module_keeps_its_state_in_float32():
    model = mlp()
    step(model, 0)
    before = scales_of(model)
    model.bfloat16()
    for name, tensor in scales_of(model).items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name])


def test_a_state_of_other_groups_is_refused():
    small, large = mlp(2), mlp(3)
    step(small, 0, sizes=(5, 3))
    state = {name: tensor for name, tensor in small.state_dict().items() if "quantizer_" in name}
    large.load_state_dict(large.state_dict() | state)
    with pytest.raises(ValueError, match="Load the state of an operation with as many groups"):
        step(large, 1)


def test_forms_follow_the_roles():
    assert [DelayedScaling().quantizer(role).form for role in Role] == [E4M3, E4M3, E5M2]


def test_state_is_not_made_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    op = ops.Linear(32, 32)
    with autocast("fp8_delayed"), pytest.raises(RuntimeError, match="Run forward and backward once under the recipe"):
        op(torch.randn(4, 32))
    assert "quantizer_input_amax_history" not in op.state_dict()
