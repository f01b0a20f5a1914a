"""`bench decode`: every token takes different experts, shares are what they say, wrong bits fail."""

import json

import pytest
import torch

from bench import bench_decode
from bench.__main__ import main
from bench.bench_decode import CALLS, CANDIDATES, DecodeFigures, differing, draw_sizes, make_case, make_layer
from bench.models import EXPERT_SHAPES, TINY_SHAPES, ExpertShape
from bench.timing import Timing
from ops.kernels.grouped_gemm.measured_tiles import Gemm, why_not_tile

SHAPE = ExpertShape(64, 32, num_experts=4, topk=2)


def test_every_token_takes_topk_experts_and_calls_of_one_token_others():
    for name, shape in (EXPERT_SHAPES | TINY_SHAPES).items():
        for tokens in (1, 5):
            drawn = draw_sizes(shape, tokens)
            assert len(drawn) == CALLS, name
            for sizes in drawn:
                assert sum(sizes) == tokens * shape.topk and max(sizes) <= tokens
    first, second = (set(torch.tensor(sizes).nonzero().flatten().tolist()) for sizes in draw_sizes(SHAPE, 1, calls=2))
    assert len(first) == len(second) == 2 and not first & second


def test_a_share_is_the_time_of_a_copy_over_that_of_the_call():
    figures = DecodeFigures("m", 1, "fused", 4e6, Timing(2e-6, 1e-6, 3e-6), 4e12)
    assert figures.share == pytest.approx(0.5)


def test_bytes_are_those_of_the_active_experts():
    case = make_case(SHAPE, make_layer(SHAPE, "cpu"), 1, "cpu")
    assert case.active == 2 and case.expert_bytes == 3 * 64 * 32 * 2
    assert sum(p.numel() * p.itemsize for p in case.layer.parameters()) == 4 * case.expert_bytes


def test_wrong_bits_fail(monkeypatch, capsys):
    assert differing(make_case(SHAPE, make_layer(SHAPE, "cpu"), 3, "cpu")) == []
    monkeypatch.setattr(bench_decode, "differing", lambda case: ["fused"])
    assert main(["decode", "--device", "cpu", "--tokens", "1"]) == 1
    assert "FAILED tiny-qwen3-30b-a3b, 1 tokens: the bits of fused are not those of training" in capsys.readouterr().out


def test_the_command_compares_bits_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "decode.json"
    assert main(["decode", "--device", "cpu", "--tokens", "1,3", "--json", str(path)]) == 0
    assert capsys.readouterr().out.count("Nothing is timed") == 2
    record = json.loads(path.read_text())
    assert record["figures"] == record["wrong"] == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--models", "qwen"], "--models qwen is not known"),
        (["--tokens", "1,none"], "must be numbers above 0"),
    ],
)
def test_wrong_arguments_are_named(options, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["decode", "--device", "cpu", *options])
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def test_candidates_are_tiles_that_fit():
    gemm = Gemm("TN", torch.bfloat16, torch.bfloat16, False, 128, 2048, 768)
    assert len(set(CANDIDATES)) == len(CANDIDATES)
    assert all(why_not_tile(tile, gemm, (9, 0)) is None for tile in CANDIDATES)
