"""The recipe of a training run by the Trainer of Hugging Face."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

reason = "transformers 5 is not installed here, so its Trainer cannot be run: `pip install 'fuser-ops[hf]'`."
pytest.importorskip("transformers", minversion="5", reason=reason)

import transformers  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import fuser.hf  # noqa: E402
from fuser import Sequential, autocast, ops  # noqa: E402
from tests.hf_models import ids, make, step  # noqa: E402
from tests.reference import assert_same_bits  # noqa: E402

pytestmark = [pytest.mark.hf, pytest.mark.rest]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ALL_EXPERTS_FUNCTIONS), "_global_mapping", dict(ALL_EXPERTS_FUNCTIONS._global_mapping))
    fuser.hf.register()


def prepared(how: str = "experts") -> Any:
    model = make("qwen3-moe")
    if how == "blocks":
        return fuser.hf.replace_moe_blocks(model)
    model.set_experts_implementation("fuser")
    return model


def begin(callback: fuser.hf.RecipeCallback, model: nn.Module) -> None:
    callback.on_train_begin(None, None, None, model=model, optimizer=None)


@pytest.mark.parametrize("how", ["experts", "blocks"])
def test_training_runs_under_the_recipe_from_its_beginning_to_its_end(how: str) -> None:
    model = prepared(how).train()
    high_precision = step(model)
    with autocast("mxfp8"):
        expected = step(model)
    callback = fuser.hf.RecipeCallback("mxfp8")
    begin(callback, model)
    assert "input_ids" in inspect.signature(model.forward).parameters  # by which Trainer chooses columns
    assert_same_bits(step(model), expected)
    callback.on_train_end(None, None, None, model=model)
    assert_same_bits(step(model), high_precision)
    assert "forward" not in model.__dict__


def test_evaluation_is_without_the_recipe() -> None:
    model = prepared().eval()
    expected = model(ids()).logits
    begin(fuser.hf.RecipeCallback("mxfp8"), model)
    assert torch.equal(model(ids()).logits, expected)
    with torch.no_grad():
        assert torch.equal(model.train()(ids()).logits, expected)
    with autocast("mxfp8"):  # the user's own is not closed
        assert not torch.equal(model.eval()(ids()).logits, expected)


def test_a_training_that_was_interrupted_leaves_no_recipe_behind() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model = prepared().train()
    high_precision = step(model)
    callback = fuser.hf.RecipeCallback("mxfp8")
    begin(callback, model)
    hook = model.lm_head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids())
    hook.remove()
    assert torch.equal(model.eval()(ids()).logits, high_precision["logits"])
    begin(callback, model.train())  # again: not wrapped twice
    callback.on_train_end(None, None, None, model=model)
    assert_same_bits(step(model), high_precision)


def test_forwards_that_others_wrap_are_left_to_them() -> None:
    model = prepared().train()
    high_precision = step(model)
    plain = model.forward
    model.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    mine = model.forward
    callback = fuser.hf.RecipeCallback("mxfp8")
    begin(callback, model)
    callback.on_train_end(None, None, None, model=model)
    assert model.forward is mine
    begin(callback, model)
    under_recipe = model.forward
    model.forward = lambda *args, **kwargs: under_recipe(*args, **kwargs)
    callback.on_train_end(None, None, None, model=model)
    assert_same_bits(step(model), high_precision)


def test_a_model_on_which_it_has_no_effect_is_refused() -> None:
    eager, named = make("qwen3-moe"), make("qwen3-moe")
    named.set_experts_implementation("fuser:mxfp8")
    replaced = fuser.hf.replace_moe_blocks(make("qwen3-moe"), "mxfp8")
    for model in (eager, named, replaced, nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=r"would have no effect.*set_experts_implementation\(\"fuser\"\)"):
            begin(fuser.hf.RecipeCallback("mxfp8"), model)
        assert "forward" not in model.__dict__
    begin(fuser.hf.RecipeCallback("mxfp8"), Sequential(ops.Linear(2, 2)))
    with pytest.raises(ValueError, match="there is no recipe named 'fp9'"):
        fuser.hf.RecipeCallback("fp9")


def test_delayed_scaling_is_refused_where_the_trainer_compiles() -> None:
    model, callback = Sequential(ops.Linear(2, 2)), fuser.hf.RecipeCallback("fp8_delayed")
    with pytest.raises(ValueError, match="where delayed scaling cannot end its steps"):
        callback.on_train_begin(SimpleNamespace(torch_compile=True), None, None, model=model)
    assert "forward" not in vars(model)
    callback.on_train_begin(SimpleNamespace(torch_compile=False), None, None, model=model)
    assert "forward" in vars(model)
    callback.on_train_end(None, None, None)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed", "high_precision"])
def test_trainer_trains(recipe: str, tmp_path: Path) -> None:
    reason = "accelerate is not installed here, which Trainer needs: `pip install 'fuser-ops[hf]'`."
    pytest.importorskip("accelerate", reason=reason)
    torch.use_deterministic_algorithms(False)

    def losses(*callbacks: Any) -> dict[str, list[float]]:
        torch.manual_seed(0)
        model = prepared()
        data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(3, 64, (16, 9))]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            learning_rate=5e-3, lr_scheduler_type="constant", logging_steps=1, eval_strategy="steps", eval_steps=3,
            save_strategy="steps", save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks)
        )
        trainer.train()
        logged = trainer.state.log_history
        return {key: [entry[key] for entry in logged if key in entry] for key in ("loss", "eval_loss")}

    expected, ours = losses(), losses(fuser.hf.RecipeCallback(recipe))
    assert len(ours["loss"]) == 6 and len(ours["eval_loss"]) == 2
    assert all(math.isclose(a, b, rel_tol=0.05) for a, b in zip(ours["loss"], expected["loss"], strict=True))
    assert ours["loss"][-1] < ours["loss"][0] - 0.5
    assert (ours == expected) == (recipe == "high_precision")


def test_a_training_that_is_resumed_from_a_loaded_checkpoint_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    reason = "accelerate is not installed here, which Trainer needs: `pip install 'fuser-ops[hf]'`."
    pytest.importorskip("accelerate", reason=reason)
    torch.manual_seed(0)
    model = make("qwen3-moe")
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(3, 64, (16, 9))]

    def trained(model: Any, resume_from: str | None = None) -> dict[str, torch.Tensor]:
        model.set_experts_implementation("fuser")
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            learning_rate=5e-3, lr_scheduler_type="constant", save_steps=2, report_to=[], use_cpu=True,
            disable_tqdm=True, seed=0,
        )  # fmt: skip
        callbacks = [fuser.hf.RecipeCallback("mxfp8")]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume_from)
        return model.state_dict()

    expected, checkpoint = trained(model), str(tmp_path / "checkpoint-2")
    assert_same_bits(trained(type(model).from_pretrained(checkpoint), checkpoint), expected)
