"""The element-wise benchmark: its checks find what is wrong, its bytes are counted by hand, its command runs."""

import json
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bench.__main__ import main
from bench.bench_elementwise import CHAINS, DTYPES, P, compare_chain, make_layer
from fuser import BasicOperation, ops

PASSES = ["forward", "forward + backward"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
def test_every_chain_agrees_with_its_formula(name, dtype):
    comparisons = compare_chain(name, dtype, rows=64, features=32, rounds=2, calls=1)
    assert [found.passes for found in comparisons] == PASSES
    for found in comparisons:
        assert found.times.keys() == {"ours", "eager", "copy"} and found.errors.keys() == {"ours", "eager"}
        assert all(timing.median > 0 for timing in found.times.values())
        assert found.percent_of_copy["copy"] == 100 and found.ratios.keys() == {"eager"}


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch.compile's own
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
def test_every_chain_is_one_kernel_on_a_gpu_and_is_compared_with_compile(name, dtype):
    assert "ElementwiseChain = " in make_layer(name, dtype, 256, "cuda").explain(device="cuda", dtype=DTYPES[dtype])
    for found in compare_chain(name, dtype, rows=512, features=256, device="cuda", rounds=2, calls=1):
        assert found.errors.keys() == found.ratios.keys() | {"ours"} == {"ours", "eager", "compile"}


# --- what is wrong is found


class Dropout(BasicOperation):
    """Dropout(P), with one fault."""

    class Saved(NamedTuple):
        mask: Tensor

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault

    def fuser_forward(self, ctx, x, extras):
        p = 0.2 if self.fault == "rate" else P
        mask = (torch.rand(x.shape) >= p).to(x.dtype)
        if self.fault != "scale":
            mask /= 1 - P
        if ctx.needs_grad:
            ctx.saved = self.Saved(mask)
        return x * mask, {}

    def fuser_backward(self, ctx, dy, d_extra_outputs):
        mask = ctx.saved.mask
        return dy * (mask.flip(0) if self.fault == "mask of backward" else mask), {}, {}


class SwiGLUWithWrongBackward(ops.SwiGLU):
    def fuser_backward(self, ctx, dy, d_extra_outputs):
        return super().fuser_backward(ctx, 1.1 * dy, d_extra_outputs)


@pytest.fixture
def run_with(monkeypatch):
    """Compare a chain whose operations are those given."""

    def run(name, *operations):
        monkeypatch.setitem(CHAINS, name, replace(CHAINS[name], operations=lambda features: list(operations)))
        return compare_chain(name, "fp32", rows=128, features=32, rounds=1, calls=1)

    return run


@pytest.mark.parametrize(
    ("operation", "sentence"),
    [
        (ops.ClampedSwiGLU, "bias-swiglu, forward: ours is off by .* in fp32, more than 1e-05"),
        (SwiGLUWithWrongBackward, r"bias-swiglu, forward \+ backward: ours is off by"),
    ],
)
def test_a_wrong_operation_is_found(operation, sentence, run_with):
    with pytest.raises(AssertionError, match=sentence):
        run_with("bias-swiglu", ops.Bias(64), operation())


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("rate", "of .* elements were kept, expected 0.9"),
        ("scale", "bias-dropout-add, forward: ours is off by"),
        ("mask of backward", r"bias-dropout-add, forward \+ backward: ours is off by"),
    ],
)
def test_a_wrong_dropout_is_found(fault, sentence, run_with):
    run_with("bias-dropout-add", ops.Bias(32), Dropout(), ops.AddExtraInput())
    with pytest.raises(AssertionError, match=sentence):
        run_with("bias-dropout-add", ops.Bias(32), Dropout(fault), ops.AddExtraInput())


# --- figures


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # 12 = 3 x 4 numbers in y; x, bias, extra, y and dy, x, bias, dx, gradient of bias
        ("bias-gelu", 12 + 4 + 12, 12 + 12 + 4 + 12 + 4),
        ("bias-swiglu", 24 + 8 + 12, 12 + 24 + 8 + 24 + 8),
        ("scale-add", 12 + 12 + 12, 12 + 12),
        ("bias-dropout-add", 12 + 4 + 12 + 12, 12 + 12 + 4),
        ("bias-gelu-scale-dropout-add", 12 + 4 + 12 + 12, 12 + 12 + 4 + 12 + 4),
    ],
)
def test_numbers_moved_are_those_counted_by_hand(name, forward, backward):
    assert CHAINS[name].numbers_moved(3, 4) == (forward, backward)


def test_bytes_and_working_set():
    forward, both = compare_chain("bias-swiglu", "bf16", rows=30, features=40, rounds=1, calls=1)
    x, bias, y = 2 * 30 * 80, 2 * 80, 2 * 30 * 40
    assert forward.bytes == forward.working_set == x + bias + y
    assert both.working_set == 2 * x + bias + 2 * y
    assert both.bytes == forward.bytes + 2 * x + 2 * bias + y
    assert forward.rates["ours"] == pytest.approx(forward.bytes / forward.times["ours"].median / 1e9)


# --- the command

SMALL = ["elementwise", "--chain", "bias-swiglu", "--rows", "16", "--features", "32", "--rounds", "2", "--calls", "1"]


def test_the_command_prints_plan_and_figures_and_writes_json(tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert main([*SMALL, "--dtype", "fp32,bf16", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    for needed in ("compile is left out", "Bias  [", "bias-swiglu, bf16, forward", "which fits the cache", "% of copy"):
        assert needed in printed
    record = json.loads(path.read_text())
    assert record["benchmark"] == "elementwise" and (record["rows"], record["features"]) == (16, 32)
    assert record["environment"]["torch"] == torch.__version__
    assert [(c["dtype"], c["passes"]) for c in record["comparisons"]] == [
        (dtype, passes) for dtype in ("fp32", "bf16") for passes in PASSES
    ]
    assert record["comparisons"][0]["ratios"]["eager"] > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--chain", "bias-tanh"], "--chain bias-tanh is unknown. Take bias-gelu, bias-swiglu, scale-add,"),
        (["--dtype", "fp7"], "--dtype fp7 is unknown. Take bf16, fp32, fp16"),
        pytest.param(
            ["--device", "cuda"], "finds no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)  # fmt: skip
def test_a_wrong_call_is_a_sentence(options, sentence, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["elementwise", *options])
    assert exit_info.value.code == 2
    assert sentence in capsys.readouterr().err
