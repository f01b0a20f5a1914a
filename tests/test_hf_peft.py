"""Adapters of peft on models of transformers with experts of this framework, and on Sequentials."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

reason = "transformers 5 or peft is not installed here, so adapters cannot be run: `pip install 'fuser-ops[hf]'`."
pytest.importorskip("transformers", minversion="5", reason=reason)
peft = pytest.importorskip("peft", reason=reason)

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import fuser.hf  # noqa: E402
from fuser import Sequential, autocast, ops  # noqa: E402
from tests.hf_models import GRADIENTS, LOGITS, ids, make, step  # noqa: E402
from tests.reference import assert_close  # noqa: E402

pytestmark = [
    pytest.mark.hf,
    pytest.mark.rest,
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),  # what peft calls of transformers
]

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
NAMES = pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ALL_EXPERTS_FUNCTIONS), "_global_mapping", dict(ALL_EXPERTS_FUNCTIONS._global_mapping))
    fuser.hf.register()


def adapted(model: nn.Module, modules: list[str], parameters: list[str] | None = None) -> Any:
    """With adapters of rank 4, none of which is zero."""
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, target_parameters=parameters))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(ids()).logits


@NAMES
def test_adapters_of_experts_and_attention_train(name: str) -> None:
    model = adapted(make(name), ["q_proj"], EXPERTS)
    expected, ours = step(model, "eager"), step(model, "fuser")
    assert sum(gradient is not None for key, gradient in ours.items() if "experts" in key) == 8
    assert_close(ours, expected, GRADIENTS)


@NAMES
@pytest.mark.parametrize("implementation", ["eager", "fuser"])
def test_saved_adapters_load_into_either_implementation(name: str, implementation: str, tmp_path: Path) -> None:
    base = make(name)
    model = adapted(copy.deepcopy(base), ["q_proj"], EXPERTS)
    model.set_experts_implementation("fuser")
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    loaded.set_experts_implementation(implementation)
    assert_close({"logits": logits(loaded)}, {"logits": logits(model)}, LOGITS)


@NAMES
def test_merging_and_disabling_are_seen(name: str) -> None:
    base = make(name, experts_implementation="fuser")
    plain = logits(base)
    model = adapted(base, ["q_proj"], EXPERTS)
    with_adapters = logits(model)
    assert (with_adapters - plain).abs().max() > 0.1
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    model.merge_adapter()
    assert_close({"logits": logits(model)}, {"logits": with_adapters}, GRADIENTS)
    model.unmerge_adapter()
    assert_close({"logits": logits(model)}, {"logits": with_adapters}, GRADIENTS)
    merged = model.merge_and_unload()
    assert_close({"logits": logits(merged)}, {"logits": with_adapters}, GRADIENTS)
    assert_close({"logits": logits(fuser.hf.replace_moe_blocks(merged))}, {"logits": with_adapters}, GRADIENTS)


def test_blocks_take_adapters_around_them_and_refuse_those_within() -> None:
    model = make("qwen3-moe")
    around = adapted(copy.deepcopy(model), ["q_proj"])
    expected = step(around)
    fuser.hf.replace_moe_blocks(around)
    assert_close(step(around), expected, GRADIENTS)
    within = adapted(fuser.hf.replace_moe_blocks(model), ["q_proj"], EXPERTS)
    with pytest.raises(NotImplementedError, match="holds a ParamWrapper, whose own computation would be left out"):
        logits(within)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
        self.sparse = Sequential(
            ops.Router(32, 4, topk=2),
            ops.Dispatch(4),
            ops.GroupedLinear(4, 32, 96, bias=False),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(4, 48, 32, bias=False),
            ops.Combine(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.sparse(self.dense(x))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_parameters_of_operations_take_adapters(recipe: str) -> None:
    model = Model()
    x = torch.randn(32, 32)
    names = ["dense.0.weight", "sparse.2.weight", "sparse.4.weight"]
    with autocast(recipe):
        plain = model(x)
        with_adapters = adapted(copy.deepcopy(model), [], names)
        y = with_adapters(x)
        y.square().sum().backward()
        gradients = [p.grad for name, p in with_adapters.named_parameters() if "lora" in name]
        assert len(gradients) == 6 and all(gradient.any() for gradient in gradients)
        merged = with_adapters.merge_and_unload()
        assert not torch.equal(y, plain)
        torch.testing.assert_close(merged(x), y, rtol=1e-5, atol=1e-5)


def test_operations_are_no_target_modules() -> None:
    with pytest.raises(ValueError, match=r"Target module Linear\(.* is not supported"):
        adapted(Model(), ["dense.0"])
