"""The command line's other doors: --help, explain, host."""

import pytest
import torch

from bench.__main__ import COMMANDS, main
from bench.bench_host import measure_host_cost
from bench.explain import explain_model
from bench.models import EXPERT_SHAPES, expert_operations
from bench.timing import time_interleaved

PLAN_OPERATIONS = ("RMSNorm", "Router", "Dispatch", "GroupedLinear", "Combine")


@pytest.mark.parametrize(
    "command", [[], *([name] for name in COMMANDS)], ids=lambda command: " ".join(command) or "bench"
)
def test_help_names_what_there_is(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (COMMANDS if not command else ["--help"]))


def test_a_wrong_recipe_is_a_sentence_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["train", "--recipe", "bf17"])
    assert exit_info.value.code == 2
    assert "no recipe named 'bf17'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["train", "speed"])
def test_a_missing_gpu_is_a_sentence(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--device", "cuda"])
    assert "finds no CUDA device here" in capsys.readouterr().err


# --- explain


@pytest.mark.parametrize("name", EXPERT_SHAPES)
def test_every_model_has_a_plan(name):
    text = explain_model(name, recipe="mxfp8")
    assert text.startswith(name)
    assert "emulated" in text
    assert all(operation in text for operation in PLAN_OPERATIONS)


def test_explain_prints_the_plan(capsys):
    assert main(["explain", "--model", "qwen3-30b-a3b", "--recipe", "bf16,mxfp8"]) == 0
    printed = capsys.readouterr().out
    assert explain_model("qwen3-30b-a3b", recipe="bf16") in printed
    assert explain_model("qwen3-30b-a3b", recipe="mxfp8") in printed


def test_explain_plans_for_a_gpu_that_is_not_there():
    assert "on cuda" in explain_model("olmoe-1b-7b", device="cuda")


@pytest.mark.parametrize("name", EXPERT_SHAPES)
def test_parameter_count_of_a_shape(name):
    shape = EXPERT_SHAPES[name]
    fc1, fc2 = (m for m in expert_operations(shape, device="meta") if type(m).__name__ == "GroupedLinear")
    parameters = [*fc1.parameters(), *fc2.parameters()]
    assert all(parameter.is_meta for parameter in parameters)
    assert sum(parameter.numel() for parameter in parameters) == shape.num_parameters


# --- benchmarks, run once for their checks and not for their times


def test_host_benchmark_runs_and_agrees_by_bits():
    cost = measure_host_cost(rounds=2, calls=1)
    assert cost.ours.median > 0 and cost.allowed_on_top == pytest.approx(100e-6)


def test_candidates_take_turns():
    order = []
    times = time_interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, warmup=1)
    assert order == ["b", "a", "a", "b"] * 2, "each comes first every other time"
    assert times.keys() == {"a", "b"}
