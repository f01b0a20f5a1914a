"""`bench tune`: which candidates there are, that none is timed that is wrong, what is chosen, what it writes."""

import pytest
import torch

from bench import bench_tune
from bench.__main__ import main, make_parser
from bench.bench_tune import (
    MARGIN,
    ON_DESCRIPTORS,
    ON_POINTERS,
    Tuned,
    asked_for,
    candidates,
    choose,
    gemm_case,
    gemms,
    tune,
    tune_all,
)
from bench.timing import Timing
from fuser import load_tiles
from ops.kernels.grouped_gemm.measured_tiles import tiles_in_use, why_not_tile
from ops.kernels.grouped_gemm.tile_rules import PERSISTENT_DECODE, built_in_config

HOPPER, AMPERE = (9, 0), (8, 0)
LINEAR = (4, 64, 48)
ROWS = 60


def parsed(*options):
    return make_parser().parse_args(["tune", *options])


# --- candidates


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), HOPPER, (10, 0), (12, 0)])
@pytest.mark.parametrize("weights", [(128, 1536, 2048), (8, 100, 60), (8, 72, 40), (2000, 64, 64)])
@pytest.mark.parametrize("rows", [64, 65536])
def test_every_candidate_fits_and_the_built_in_choice_comes_first(capability, weights, rows):
    for gemm in gemms(weights).values():
        found = candidates(gemm, rows, capability)
        assert found[0] == built_in_config(gemm, rows, capability)
        assert len(set(found)) == len(found)
        assert all(why_not_tile(config, gemm, capability) is None for config in found)
        assert len({config.programs > 0 for config in found}) == 1


def test_hopper_has_descriptors_where_features_allow_it():
    fprop = gemms((8, 1536, 2048))["fprop"]
    assert set(candidates(fprop, 65536, HOPPER)) == {*ON_DESCRIPTORS, PERSISTENT_DECODE}
    assert set(candidates(fprop, 65536, AMPERE)) == set(ON_POINTERS)
    odd = fprop._replace(in_features=2001)
    assert candidates(odd, 65536, HOPPER) == [built_in_config(odd, 65536, HOPPER)]


def test_of_a_result_of_twice_the_bytes_fewer_fit():
    products = gemms((8, 1536, 2048))
    few, many = (candidates(products[name], 65536, HOPPER) for name in ("wgrad to main_grad", "wgrad"))
    # Gluon's, not there where Triton interprets, has half the box.
    assert {config for config in few if not config.gluon} < set(many)


# --- the choice


def test_the_fastest_is_chosen_if_it_is_faster_by_a_margin():
    rule, other, third = ON_DESCRIPTORS[:3]
    assert choose({rule: 1.0, other: 1.1, third: 0.9}, rule) == third
    assert choose({rule: 1.0, other: 1 - MARGIN / 2, third: 1.1}, rule) == rule


def test_what_is_written_is_the_choice_and_both_times():
    rule, other = ON_DESCRIPTORS[:2]
    times = {rule: Timing(2e-3, 1e-3, 3e-3), other: Timing(1e-3, 1e-3, 1e-3)}
    gemm = gemms(LINEAR)["fprop"]
    measured = Tuned("fprop", gemm, ROWS, 1, times, [], []).measured()
    assert measured == (gemm, ROWS, other, 1000.0, 2000.0)


# --- right before fast


@pytest.mark.parametrize("name", gemms(LINEAR))
def test_a_right_product_is_within_its_bound(name):
    case = gemm_case(gemms(LINEAR)[name], ROWS, "cpu")
    assert sum(case.splits.tolist()) == ROWS
    assert case.error() <= 1


@pytest.mark.parametrize("wrong", [0.5, torch.nan])
@pytest.mark.parametrize("name", gemms(LINEAR))
def test_one_wrong_element_is_found(name, wrong, monkeypatch):
    run = bench_tune.GemmCase.run

    def spoiled(case):
        run(case)
        case.out.view(-1)[-1] += wrong

    monkeypatch.setattr(bench_tune.GemmCase, "run", spoiled)
    assert gemm_case(gemms(LINEAR)[name], ROWS, "cpu").error() > 1


def test_a_wrong_candidate_is_not_timed_and_fails_the_command(monkeypatch, capsys):
    wrong = ON_DESCRIPTORS[2]

    def error(case):
        (tile,) = tiles_in_use().tiles
        return 7.0 if tile.config == wrong else 0.5

    monkeypatch.setattr(bench_tune.GemmCase, "error", error)
    for tuned in tune(LINEAR, 4 * 96, device="cpu", capability=HOPPER, rounds=1):
        assert wrong not in tuned.times and len(tuned.times) > 1
        assert tuned.wrong == [
            f"{tuned.name}, 64x256x64, 4 warps, 4 stages, 1 programs: 7 times the error that is allowed"
        ]
    assert tune_all([LINEAR], [4 * 96], parsed("--rounds", "1"), "cpu", HOPPER) == 1
    assert "FAILED: fprop, 64x256x64" in capsys.readouterr().out


def test_a_candidate_that_does_not_run_is_left_out_and_a_built_in_one_is_an_error(monkeypatch):
    broken = ON_DESCRIPTORS[3]

    def error(case):
        (tile,) = tiles_in_use().tiles
        if tile.config == broken:
            raise RuntimeError("no room")
        return 0.5

    monkeypatch.setattr(bench_tune.GemmCase, "error", error)
    first = next(tune(LINEAR, 4 * 96, device="cpu", capability=HOPPER, rounds=1))
    assert first.left_out == ["fprop, 256x128x64, 8 warps, 3 stages, 1 programs: no room"]
    broken = ON_DESCRIPTORS[0]
    with pytest.raises(RuntimeError, match="the built-in tile fails: .*128x256x64.*no room"):
        next(tune(LINEAR, 4 * 96, device="cpu", capability=HOPPER, rounds=1))
    assert tiles_in_use() is None


# --- the command


def test_what_is_asked_for():
    assert asked_for(parsed()) == ([(128, 1536, 2048), (128, 2048, 768)], [65536])
    assert asked_for(parsed("--model", "mixtral-8x7b", "--rows", "64,128")) == (
        [(8, 28672, 4096), (8, 4096, 14336)], [64, 128],
    )  # fmt: skip
    own = ("--groups", "4", "--in", "48,32", "--out", "64,48", "--rows", "60")
    assert asked_for(parsed(*own)) == ([(4, 64, 48), (4, 48, 32)], [60])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--groups", "4"], "give --model, or all of"),
        (
            ["--model", "mixtral-8x7b", "--groups", "4", "--in", "4", "--out", "4", "--rows", "4"],
            "give --model, or all",
        ),
        (["--groups", "4", "--in", "4,8", "--out", "4", "--rows", "4"], "must be as many"),
        (["--groups", "0", "--in", "4", "--out", "4", "--rows", "4"], "--groups > 0"),
        (["--rows", "4,none"], "--rows 4,none must be numbers above 0"),
        (["--rounds", "0"], "--rounds is 0"),
    ],
)
def test_a_wrong_call_is_a_sentence_and_exit_code_2(options, sentence, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["tune", *options])
    assert exit_info.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["tune"])
    assert exit_info.value.code == 2
    assert "finds no CUDA device here" in capsys.readouterr().err


def test_the_table_it_writes_is_one_that_loads(tmp_path, capsys):
    """On the CPU, whose products know no tiles: the way is the same."""
    path = tmp_path / "tiles.json"
    options = parsed("--rounds", "1", "--json", str(path))
    assert tune_all([LINEAR], [ROWS], options, "cpu", HOPPER) == 0
    printed = capsys.readouterr().out
    assert printed.count("built-in") == 4 and "wgrad to main_grad of 4 groups, 48 -> 64, 60 rows" in printed
    try:
        if not torch.cuda.is_available():
            table = load_tiles(path)
            assert [tile.gemm for tile in table.tiles] == list(gemms(LINEAR).values())
    finally:
        load_tiles(None)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_gpu_is_tuned_and_obeys_the_table(tmp_path, capsys):
    path = tmp_path / "tiles.json"
    options = ["--groups", "4", "--in", "128,256", "--out", "256,128", "--rows", "2048,200", "--rounds", "3"]
    assert main(["tune", *options, "--json", str(path)]) == 0
    assert tiles_in_use() is None
    try:
        table = load_tiles(path)
        assert len(table.tiles) == 16
        for tile in table.tiles:
            assert table.find(tile.gemm, tile.rows) == tile.config
            assert gemm_case(tile.gemm, tile.rows, "cuda").error() <= 1
    finally:
        load_tiles(None)
