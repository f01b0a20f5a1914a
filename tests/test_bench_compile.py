"""The benchmark of compiled steps: results are compared before they are timed, and figures and sentences come out."""

import json

import pytest
import torch

from bench.__main__ import main
from bench.bench_compile import layer_steps, model_steps
from bench.language_model import LANGUAGE_MODELS
from bench.models import ExpertShape

SHAPE = ExpertShape(64, 32, num_experts=4, topk=2, tokens=16)


@pytest.mark.slow
def test_steps_are_timed_and_written(tmp_path, capsys):
    file = tmp_path / "compile.json"
    command = ["compile", "--device", "cpu", "--models", "micro,tiny-qwen3-30b-a3b", "--backend", "aot_eager"]
    assert main([*command, "--rounds", "1", "--json", str(file)]) == 0
    assert "tiny-qwen3-30b-a3b, forward + backward, aot_eager" in capsys.readouterr().out
    steps = json.loads(file.read_text())["steps"]
    assert [(step["model"], step["recipe"]) for step in steps] == [
        (model, recipe) for model in ("micro", "tiny-qwen3-30b-a3b") for recipe in ("bf16", "fp8_current")
    ]
    for step in steps:
        assert step["of_eager"] == step["compiled"][0] / step["eager"][0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--models", "micro,none"], "--models none is not known"),
        (["--recipes", "fp3"], "--recipes fp3 is not known"),
        (["--rounds", "0"], "--rounds is 0, but must be at least 1"),
    ],
)
def test_a_wrong_call_is_said(wrong, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["compile", "--device", "cpu", *wrong])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_a_compiled_step_that_differs_is_not_timed():
    with pytest.raises(AssertionError, match="mxfp8: y of the compiled layer is not that of the eager one"):
        layer_steps(SHAPE, "mxfp8", "cpu", lambda layer: lambda x: layer(x) * 1.5)
    with pytest.raises(AssertionError, match=r"bf16: a loss of .* compiled, and of .* eager"):
        model_steps(LANGUAGE_MODELS["micro"], "bf16", "cpu", lambda loss_of: lambda *batch: loss_of(*batch) * 1.5)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch.compile's own, as the next two
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning")
@pytest.mark.gpu
def test_the_command_times_on_a_gpu(capsys):
    torch.utils.deterministic.fill_uninitialized_memory = False
    main(["compile", "--device", "cuda", "--models", "micro,tiny-qwen3-30b-a3b", "--rounds", "2"])
    assert "compiled / eager" in capsys.readouterr().out
