"""generate() of Hugging Face models within constant_weights: each weight is quantized and dequantized once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

reason = "transformers 5 is not installed here, so its models cannot be run: `pip install 'fuser-ops[hf]'`."
pytest.importorskip("transformers", minversion="5", reason=reason)

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import fuser.hf  # noqa: E402
from fuser import autocast, constant_weights  # noqa: E402
from ops.products.paths import GroupedPath  # noqa: E402
from recipes.tensors.scaled_codes import ScaledCodes  # noqa: E402
from tests.hf_models import LAYERS, ids, make, step  # noqa: E402
from tests.reference import assert_same_bits  # noqa: E402

pytestmark = [pytest.mark.hf, pytest.mark.rest]
QUANTIZED = ["fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", "nvfp4"]
TOKENS = 5
EVERY_WAY = pytest.mark.parametrize("how", ["name", "autocast", "blocks"])


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ALL_EXPERTS_FUNCTIONS), "_global_mapping", dict(ALL_EXPERTS_FUNCTIONS._global_mapping))
    fuser.hf.register()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often weights of experts are quantized, and codes of such weights dequantized."""
    counted: Counter[str] = Counter()
    weight, operand = GroupedPath.weight, ScaledCodes.operand

    def quantizing(self: Any, w: Any, quantizer: Any, **copies: bool) -> Any:
        counted["quantized"] += quantizer is not None
        return weight(self, w, quantizer, **copies)

    def dequantizing(self: Any, *args: Any) -> Any:
        counted["dequantized"] += len(self.shape) == 3
        return operand(self, *args)

    monkeypatch.setattr(GroupedPath, "weight", quantizing)
    monkeypatch.setattr(ScaledCodes, "operand", dequantizing)
    return counted


def model_of(name: str, recipe: str, how: str) -> Any:
    torch.manual_seed(0)
    model = make(name).eval()
    if how == "blocks":
        return fuser.hf.replace_moe_blocks(model, recipe=recipe)
    model.set_experts_implementation(f"fuser:{recipe}" if how == "name" else "fuser")
    return model


def generated(model: Any, recipe: str) -> torch.Tensor:
    with autocast(recipe):
        settings = {"attention_mask": torch.ones_like(ids()), "max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        tokens: torch.Tensor = model.generate(ids(), do_sample=False, **settings)
    return tokens


@EVERY_WAY
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_weights_are_quantized_and_dequantized_once_not_at_each_token(
    name: str, recipe: str, how: str, work: Counter[str]
) -> None:
    model = model_of(name, recipe, how)
    weights = 2 * LAYERS
    expected = generated(model, recipe)
    assert work == {"quantized": TOKENS * weights, "dequantized": TOKENS * weights}
    work.clear()
    with torch.no_grad(), constant_weights(model, prepare=recipe):
        assert work == {"quantized": weights, "dequantized": weights}
        tokens = generated(model, recipe)
    assert work == {"quantized": weights, "dequantized": weights}
    assert torch.equal(tokens, expected)


@EVERY_WAY
def test_weights_that_change_are_quantized_again(how: str) -> None:
    """Within the scope where torch counts the change, and after it in any case."""
    model, other = (model_of("qwen3-moe", "mxfp8", how) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    with autocast("mxfp8"), torch.no_grad():
        expected = [each(ids()).logits for each in (model, other)]
        with constant_weights(model):
            assert torch.equal(model(ids()).logits, expected[0])
            model.load_state_dict(other.state_dict())
            assert torch.equal(model(ids()).logits, expected[1])
        for parameter in model.parameters():
            parameter.data.mul_(-1)
        assert not torch.equal(model(ids()).logits, expected[1])


@EVERY_WAY
def test_microbatches_have_the_bits_of_weights_quantized_in_each(how: str, work: Counter[str]) -> None:
    model = model_of("qwen3-moe", "mxfp8", how).train()
    with autocast("mxfp8"):
        expected = step(model)
        work.clear()
        with constant_weights(model):
            for _ in range(2):
                assert_same_bits(step(model), expected)
    assert work["quantized"] == 2 * LAYERS
