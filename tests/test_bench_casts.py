"""The benchmark of casts: its command runs end to end, its figures add up, its check finds what is wrong."""

import json
from dataclasses import replace

import pytest
import torch

from bench.__main__ import main
from bench.bench_casts import CastFigures, check_cast, measure_casts, written_bytes
from bench.schedule import known_recipes, recipe_named
from bench.timing import Timing
from recipes import Role, Splits


@pytest.mark.slow
def test_the_command_times_every_cast_of_every_recipe(tmp_path, capsys):
    path = tmp_path / "casts.json"
    shape = ["--rows", "64", "--columns", "64", "--rounds", "1"]
    assert main(["casts", *shape, "--json", str(path)]) == 0
    assert "input, groups, both" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["benchmark"] == "casts" and {"date", "device", "torch", "triton"} <= record["environment"].keys()
    by_recipe = {
        label: [cast["cast"] for cast in record["casts"] if cast["recipe"] == label] for label in known_recipes()
    }
    assert by_recipe.pop("bf16") == []
    assert all(len(casts) == 10 and casts == by_recipe["mxfp8"] for casts in by_recipe.values())


def test_the_bytes_are_those_of_the_format():
    rows, columns = 256, 128
    found = {each.cast: each.bytes for each in measure_casts("mxfp8", rows, columns, rounds=1, calls=1)}
    one = rows * columns * (1 + 1 / 32)
    assert found["input, tensor, rowwise"] == rows * columns * 2 + one
    assert found["input, tensor, both"] == found["weight, weights, both"] == rows * columns * 2 + 2 * one
    assert found["back, tensor, columnwise"] == rows * columns * 2 + one
    current = {each.cast: each.bytes for each in measure_casts("fp8_current", rows, columns, rounds=1, calls=1)}
    assert current["input, tensor, rowwise"] == rows * columns * (2 * 2 + 1) + 4  # two reads, codes, one scale
    per_row = {each.cast: each.bytes for each in measure_casts("fp8_rowwise", rows, columns, rounds=1, calls=1)}
    assert per_row["input, tensor, rowwise"] == rows * columns * (2 + 1) + 4 * rows
    assert per_row["input, tensor, columnwise"] == rows * columns * (2 * 2 + 1) + 4 * columns


def test_percent_of_copy():
    times = {"cast": Timing(2e-3, 2e-3, 2e-3), "copy": Timing(1e-3, 1e-3, 1e-3)}
    figures = CastFigures("mxfp8", "input", 3_000_000, 2_000_000, times)
    assert figures.gb_per_s == pytest.approx(1.5) and figures.percent_of_copy == pytest.approx(75)


def test_a_wrong_cast_is_not_timed():
    x = torch.randn(64, 64)
    splits = Splits.make([40, 24], rows=64, device="cpu")
    quantized = recipe_named("mxfp8").quantizer(Role.INPUT).quantize_grouped(x, splits, rowwise=True, columnwise=True)
    check_cast(quantized, x, splits, "mxfp8")
    assert written_bytes(quantized, splits) >= 2 * x.numel()
    wrong = replace(quantized.rowwise, codes=quantized.rowwise.codes.flip(0))
    with pytest.raises(AssertionError, match="mxfp8: the cast has"):
        check_cast(replace(quantized, rowwise=wrong), x, splits, "mxfp8")
