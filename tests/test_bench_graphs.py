"""The benchmark of graphs: on a CPU it compares and says that there is nothing to time; a wrong replay is found."""

import pytest
import torch

from bench import bench_graphs
from bench.__main__ import main
from bench.bench_graphs import make_steps
from bench.grouped_case import expert_mlp
from bench.models import ExpertShape

SHAPE = ExpertShape(64, 32, num_experts=4, topk=2, tokens=16)


@pytest.mark.slow
def test_a_cpu_says_that_it_has_no_graphs(capsys):
    assert main(["graphs", "--recipes", "bf16,mxfp8,fp8_delayed,nvfp4"]) == 0
    assert "A CPU has no CUDA graphs to show" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--model", "none"], ["--recipes", "bf16,fp3"]])
def test_a_wrong_call_is_said(wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["graphs", *wrong])
    assert stopped.value.code == 2 and f"{wrong[-1].split(',')[-1]} is not known" in capsys.readouterr().err


def test_a_replay_that_differs_is_not_timed(monkeypatch):
    def graphed(module, *_, **__):
        return lambda x, **extras: 2 * module(x, **extras)

    monkeypatch.setattr(bench_graphs, "make_graphed_callables", graphed)
    with pytest.raises(AssertionError, match="bf16: y of a replay is not that of the eager step"):
        make_steps("bf16", expert_mlp(SHAPE))


@pytest.mark.gpu
def test_the_command_times_on_a_gpu(capsys):
    torch.utils.deterministic.fill_uninitialized_memory = False
    main(["graphs", "--device", "cuda", "--model", "tiny-olmoe-1b-7b", "--rounds", "2"])
    assert "replay / kernels" in capsys.readouterr().out
