"""prepare makes the state of delayed scaling before a checkpoint or an average of weights looks for it."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fuser import Sequential, autocast, lora, ops, prepare
from recipes import DelayedScaling, Role
from tests.ranks import on_ranks
from tests.reference import assert_same_bits

RECIPE = DelayedScaling(amax_history_len=3)


def build():
    torch.manual_seed(0)
    return Sequential(
        ops.Linear(16, 32), ops.Quantize(), ops.GroupedLinear(3, 32, 64), ops.SwiGLU(),
        ops.GroupedLinear(3, 32, 16, stacked=False),
    )  # fmt: skip


def step(model, seed=0):
    return step_of(model, seed, split_sizes=[5, 0, 7])


def step_of(model, seed=0, **extras):
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    with autocast(RECIPE):
        y = model(x, **extras)
    y.square().sum().backward()
    found = {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def forms(model):
    return {name: (buffer.shape, buffer.dtype, buffer.device) for name, buffer in model.named_buffers()}


def test_it_makes_what_a_step_would_make_and_changes_no_bit():
    prepared, plain = prepare(build(), RECIPE), build()
    assert forms(prepared)
    for seed in range(3):
        assert_same_bits(step(plain, seed), step(prepared, seed))
        assert forms(prepared) == forms(plain)


def test_state_that_a_neighbour_makes_needless_stays_as_it_began():
    """Quantize hands the gradient on in codes, so Linear quantizes none."""
    model = prepare(Sequential(ops.Linear(16, 16), ops.Quantize(backward=True), ops.Linear(16, 16)), RECIPE)
    step_of(model)
    assert (model[0].quantizer_grad_output_scale == 1).all() and (model[1].quantizer_grad_output_scale != 1).all()


def test_state_that_is_there_stays():
    model = build()
    step(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    prepare(model, RECIPE)
    assert_same_bits(before, dict(model.named_buffers()))


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16", "fp8_current", "nvfp4", "fp8_block"])
def test_recipes_without_a_state_add_no_key(recipe):
    assert not forms(prepare(build(), recipe))


def test_an_operation_is_prepared_for_its_own_recipe():
    model = build()
    model[0].set_recipe("mxfp8")
    model[2].set_recipe(DelayedScaling(amax_history_len=7))
    prepare(model, RECIPE)
    lengths = {name.split(".")[0]: len(b) for name, b in model.named_buffers() if name.endswith("history")}
    assert lengths == {"1": 3, "2": 7, "4": 3}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_a_distributed_checkpoint_goes_on_in_a_fresh_model(tmp_path):
    model = build()
    for seed in range(3):
        step(model, seed)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    fresh = prepare(build(), RECIPE)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    fresh.load_state_dict(state["model"])
    for seed in range(3, 5):
        assert_same_bits(step(model, seed), step(fresh, seed))


def test_an_average_made_before_the_first_step_has_the_state():
    model = prepare(build(), RECIPE)
    average = AveragedModel(model, use_buffers=True)
    for seed in range(2):
        step(model, seed)
        average.update_parameters(model)
    assert forms(average.module) == forms(model)
    scales = average.module[2].quantizer_input_scale
    assert (scales != 1).any() and scales.isfinite().all()
    weights = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    weights.update_parameters(model)
    assert_same_bits(dict(model.named_buffers()), dict(weights.module.named_buffers()))


def test_loading_makes_the_state_whose_keys_are_there():
    model, fresh = build(), build()
    step(model)
    fresh.load_state_dict(model.state_dict())
    assert_same_bits(step(model, 1), step(fresh, 1))


def test_roles_are_those_that_run():
    model = build()
    step(model)
    for operation in model:
        made = {role for role in Role if any(n.startswith(f"quantizer_{role.value}_") for n in operation._buffers)}
        assert made == set(operation.quantized_roles)


def test_a_second_time_changes_nothing():
    model = prepare(build(), RECIPE)
    before = dict(model.named_buffers())
    step(model)
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    prepare(model, RECIPE)
    found = dict(model.named_buffers())
    assert all(found[name] is buffer for name, buffer in before.items())
    assert_same_bits(found, after)


@pytest.mark.parametrize("prepared_first", [False, True])
def test_adapters_keep_and_get_state(prepared_first):
    model, plain = build(), build()
    for each in (model, plain):
        if each is model and prepared_first:
            prepare(each, RECIPE)
        torch.manual_seed(1)  # of A
        lora.add(each, 2)
    prepare(model, RECIPE)
    assert_same_bits(step(plain), step(model))
    assert forms(model) == forms(plain)


def on_meta():
    with torch.device("meta"):
        return build()


def materialised(model):
    """With the parameters of `build()`, and uninitialised memory elsewhere, which is NaN in tests."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for mine, parameter in zip(model.parameters(), build().parameters(), strict=True):
            mine.copy_(parameter)
    return model


META = {
    "prepared": lambda: prepare(on_meta(), RECIPE),
    "converted": lambda: prepare(on_meta(), RECIPE).bfloat16().float(),
    "copied": lambda: copy.deepcopy(prepare(on_meta(), RECIPE)),
    "prepared, then moved": lambda: prepare(build(), RECIPE).to("meta"),
}


@pytest.mark.parametrize("made", META)
def test_state_that_was_on_the_meta_device_begins_anew(made):
    model, plain = META[made](), prepare(build(), RECIPE)
    assert all(buffer.is_meta for buffer in model.buffers())
    materialised(model)
    assert forms(model) == forms(plain)
    for seed in range(2):
        assert_same_bits(step(model, seed), step(plain, seed))


def test_state_of_a_run_begins_anew_behind_the_meta_device():
    model = prepare(build(), RECIPE)
    step(model)
    keys = model.state_dict().keys()
    materialised(model.to("meta"))
    assert model.state_dict().keys() == keys
    assert_same_bits(step(model), step(prepare(build(), RECIPE)))


def test_state_that_was_loaded_begins_anew_behind_the_meta_device():
    ran, model = build(), build()
    step(ran)
    model.load_state_dict(ran.state_dict())
    materialised(model.to("meta"))
    assert_same_bits(step(model), step(build()))


def test_a_move_without_the_meta_device_keeps_the_state():
    model = build()
    step(model)
    states = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    assert_same_bits(dict(model.named_buffers()), states)


def state_of_a_sharded_meta_model(rank):
    model, mesh = on_meta(), init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    prepare(model, RECIPE).to_empty(device="cpu")
    assert_same_bits(dict(model.named_buffers()), dict(prepare(build(), RECIPE).named_buffers()))
    step(model)


@pytest.mark.rest
def test_sharded_state_that_was_on_the_meta_device_begins_anew(tmp_path):
    on_ranks(state_of_a_sharded_meta_model, folder=tmp_path)


def test_an_operation_outside_of_a_sequential_is_prepared():
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(16, 16), "second": ops.Linear(16, 16)})
    assert set(forms(prepare(model, RECIPE))) == {
        f"second.{name}" for name in forms(prepare(ops.Linear(16, 16), RECIPE))
    }


def state_of_a_sharded_model(rank, before):
    model, plain = build(), build()
    mesh = init_device_mesh("cpu", (2,))
    if before:
        prepare(model, RECIPE)
    for operation in model:
        if any(True for _ in operation.parameters()):
            fully_shard(operation, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not before:
        prepare(model, RECIPE)
    made = dict(model.named_buffers())
    assert forms(model) == forms(prepare(plain, RECIPE))
    prepare(model, RECIPE)
    step(model)
    found = dict(model.named_buffers())
    assert found.keys() == made.keys() and all(found[name] is buffer for name, buffer in made.items())


@pytest.mark.rest
@pytest.mark.parametrize("before", [False, True])
def test_sharded_models_are_prepared_before_and_behind(before, tmp_path):
    on_ranks(state_of_a_sharded_model, before, folder=tmp_path)


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="got Linear, which contains no operation"):
        prepare(torch.nn.Linear(2, 2), RECIPE)
    with pytest.raises(ValueError, match="no recipe named 'fp9'"):
        prepare(build(), "fp9")
