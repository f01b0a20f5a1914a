"""torch.compile of Hugging Face models with our experts and blocks: one graph, with the bits of eager steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

reason = "transformers 5 is not installed here, so its models cannot be run: `pip install 'fuser-ops[hf]'`."
pytest.importorskip("transformers", minversion="5", reason=reason)

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import fuser.hf  # noqa: E402
from fuser import autocast  # noqa: E402
from recipes import Float8CurrentScaling, MXFP8BlockScaling  # noqa: E402
from tests.hf_models import ids, make  # noqa: E402
from tests.reference import assert_same_bits  # noqa: E402

pytestmark = [
    pytest.mark.hf,
    pytest.mark.rest,
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # its own too
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(type(ALL_EXPERTS_FUNCTIONS), "_global_mapping", dict(ALL_EXPERTS_FUNCTIONS._global_mapping))
    fuser.hf.register()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def with_ours(name: str, way: str) -> Any:
    model = make(name)
    if way == "experts":
        model.set_experts_implementation("fuser")
        return model
    return fuser.hf.replace_moe_blocks(model)


def block_of(model: nn.Module) -> Any:
    """The last block with experts."""
    return [module for module in model.modules() if hasattr(module, "experts")][-1]


def step(module: nn.Module, run: Any, recipe: str | None, *given: Tensor) -> dict[str, Tensor | None]:
    """What a model or a block returns, and the gradient of every parameter."""
    module.zero_grad()
    with autocast(recipe):
        y = run(*given) if len(given) == 1 else run(given[0], labels=given[1], use_cache=False)
    if len(given) == 1:
        y = y[0] if isinstance(y, tuple) else y  # gpt-oss: with probs
        loss = y.square().mean()
    else:
        y, loss = y.logits, y.loss
    loss.backward()
    return {"y": y.detach()} | {name: p.grad for name, p in module.named_parameters()}


def compiled(module: Any, **settings: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(module, backend=counter, fullgraph=True, **settings), counter


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
@pytest.mark.parametrize("way", ["experts", "blocks"])
@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_delayed"])
def test_a_model_is_one_graph_with_the_bits_of_eager_steps(name: str, way: str, recipe: str | None) -> None:
    eager = with_ours(name, way)
    # Compiled, torch's fused attention sums gradients in another order, also with the library's own experts.
    eager.set_attn_implementation("eager")
    other = copy.deepcopy(eager)
    run, _ = compiled(other)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, other)]
    for _ in range(3):  # weights change between steps, and the scales of delayed scaling move on
        assert_same_bits(step(other, run, recipe, ids(), ids()), step(eager, eager, recipe, ids(), ids()))
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
@pytest.mark.parametrize("way", ["experts", "blocks"])
def test_token_counts_of_a_block_change_without_compiling_again(name: str, way: str) -> None:
    block = block_of(with_ours(name, way))
    other = copy.deepcopy(block)
    run, counter = compiled(other, dynamic=True)
    graphs = []
    for tokens in (9, 5, 130, 17):
        x = torch.randn(2, tokens, 32)
        assert_same_bits(step(other, run, "mxfp8", x), step(block, block, "mxfp8", x))
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


@pytest.mark.parametrize("way", ["experts", "blocks"])
def test_another_recipe_or_mode_is_compiled_anew(way: str) -> None:
    block = block_of(with_ours("qwen3-moe", way))
    other = copy.deepcopy(block)
    run, _ = compiled(other)
    x = torch.randn(2, 9, 32)
    for recipe, training in (("mxfp8", True), (None, True), ("mxfp8", False), ("fp8_block", False)):
        for module in (block, other):
            module.train(training)
        assert_same_bits(step(other, run, recipe, x), step(block, block, recipe, x))


@pytest.mark.parametrize("way", ["experts", "blocks"])
def test_parameters_that_are_replaced_are_read_by_what_was_compiled(way: str) -> None:
    model = with_ours("deepseek-v3", way)
    block = block_of(model)
    run, _ = compiled(block)
    x = torch.randn(2, 9, 32)
    step(block, run, "mxfp8", x)
    model.load_state_dict(make("deepseek-v3").state_dict(), assign=True)
    expected = step(block, block, "mxfp8", x)  # its operations are others now
    assert_same_bits(step(block, run, "mxfp8", x), expected)


def test_the_bias_of_the_choice_is_read_at_each_call() -> None:
    block = block_of(with_ours("deepseek-v3", "blocks"))
    run, _ = compiled(block)
    x = torch.randn(2, 9, 32)
    step(block, run, None, x)
    block.layer()[0].update_expert_bias(rate=0.5)
    assert_same_bits(step(block, run, None, x), step(block, block, None, x))
    block.gate.e_score_correction_bias = 10 * torch.randn(8)
    changed = step(block, run, None, x)
    assert_same_bits(changed, step(block, block, None, x))
    assert int(block.layer()[0].tokens_since_update.sum()) == 4 * 2 * 9 * 2  # of these four, behind the update


@pytest.mark.parametrize(
    ("name", "module", "setting", "values"),
    [
        ("deepseek-v3", "gate", "routed_scaling_factor", (3.0, 1.5)),
        ("gpt-oss", "experts", "limit", (0.125, 0.5)),
    ],
)
def test_changed_settings_are_compiled_anew(name: str, module: str, setting: str, values: Any) -> None:
    block = block_of(with_ours(name, "blocks"))
    run, _ = compiled(block)
    x = torch.randn(2, 9, 32)
    before = step(block, run, None, x)["y"]
    for value in values:
        setattr(getattr(block, module), setting, value)
        changed = step(block, run, None, x)
        assert not torch.equal(changed["y"], before)
        assert_same_bits(changed, step(block, block, None, x))
        before = changed["y"]


def test_another_recipe_of_a_block_is_compiled_anew() -> None:
    block = block_of(with_ours("qwen3-moe", "blocks"))
    run, _ = compiled(block)
    x = torch.randn(2, 9, 32)
    for recipe in (None, MXFP8BlockScaling(), Float8CurrentScaling(), Float8CurrentScaling(amax_epsilon=10.0), None):
        block.recipe = recipe
        assert_same_bits(step(block, run, None, x), step(block, block, None, x))


def test_a_setting_that_is_changed_within_the_compiled_function_is_refused() -> None:
    block = block_of(with_ours("qwen3-moe", "blocks"))

    def forward(x: Tensor) -> Any:
        block.gate.top_k = 1
        return block(x)

    with pytest.raises(Exception, match="changes settings or modules of this MoEBlock and then calls it"):
        torch.compile(forward, fullgraph=True, backend="aot_eager")(torch.randn(2, 9, 32))


@pytest.mark.parametrize("way", ["experts", "blocks"])
def test_hooks_of_an_activation_are_refused(way: str) -> None:
    block = block_of(with_ours("qwen3-moe", way))
    block.experts.act_fn.register_forward_hook(lambda *_: None)
    run = torch.compile(block, backend="eager")
    with pytest.raises(RuntimeError, match="act_fn has forward hooks"):
        run(torch.randn(2, 9, 32))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def test_weights_that_are_computed_are_computed_in_the_graph() -> None:
    block = block_of(with_ours("qwen3-moe", "experts"))
    parametrize.register_parametrization(block.experts, "down_proj", Halved())
    run, _ = compiled(block)
    x = torch.randn(2, 9, 32)
    for _ in range(2):
        assert_same_bits(step(block, run, "mxfp8", x), step(block, block, "mxfp8", x))


def test_a_changed_operation_of_a_block_is_an_error() -> None:
    block = block_of(with_ours("deepseek-v3", "blocks"))
    run, _ = compiled(block)
    x = torch.randn(2, 9, 32)
    step(block, run, None, x)
    block.layer()[0].scaling_factor = 7.0
    with pytest.raises(RuntimeError, match=r"Router was changed after .*torch.compiler.reset"):
        step(block, run, None, x)


def test_hooks_of_a_router_receive_what_is_computed_in_the_graph() -> None:
    block = block_of(with_ours("qwen3-moe", "blocks"))
    seen: list[Tensor] = []
    block.gate.register_forward_hook(lambda module, args, output: seen.append(output[0]))

    def run(x: Tensor) -> Tensor:
        seen.clear()
        return block(x) + seen[0].sum()

    x = torch.randn(2, 9, 32)
    assert torch.equal(compiled(run)[0](x), run(x))


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("way", ["experts", "blocks"])
def test_a_model_is_exported_for_inference(name: str, way: str) -> None:
    model = with_ours(name, way).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        program = torch.export.export(model, (ids(),), kwargs={"use_cache": False}, strict=False)
        assert torch.equal(program.module()(ids(), use_cache=False).logits, model(ids()).logits)
    assert any("grouped_mlp" in str(node.target) for node in program.graph.nodes)


def test_fake_tensors_run_through_experts_that_have_not_run_before() -> None:
    model = with_ours("qwen3-moe", "experts")
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(ids()).logits.shape == (2, 9, 64)
