"""The recipe-switching benchmark: its checks find what is wrong, its figures add up, its command runs end to end."""

import csv
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

import fuser
from bench import controls, table
from bench.__main__ import main
from bench.bench_recipes import (
    checked_products,
    compare_recipes,
    explain_line,
    kept_weight_bytes,
    once_in,
    require_same_bits,
)
from bench.case import PASSES
from bench.controls import CONTROLS, make_control
from bench.grouped_case import expert_linear, expert_mlp
from bench.memory import peak_bytes, saved_bytes
from bench.models import EXPERT_SHAPES, SHAPES, TINY_FACTOR, TINY_SHAPES, ExpertShape
from bench.products import PRODUCTS, grouped_products
from bench.recipe_report import Outcome, draw_recipes
from bench.schedule import known_recipes, recipe_named
from bench.sqnr import Sqnr, require_sqnr, sqnr_db, sqnr_floor
from bench.table import plain_table
from bench.timing import Timing
from bench.usage import UsageError
from fuser import ops
from ops.products.paths import GroupedPath
from recipes import Role
from recipes.mxfp8 import MXFP8Quantizer
from recipes.registry import RECIPES

SHAPE = ExpertShape(64, 32, num_experts=3, topk=2, tokens=16)
CPU = torch.device("cpu")


# --- the command

TINY = ["recipes", "--model", "tiny-olmoe-1b-7b", "--tokens", "16", "--steps", "2"]


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_json_csv_and_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paths = {"--json": tmp_path / "r.json", "--csv": tmp_path / "r.csv", "--plot": tmp_path / "plots"}
    options = [str(part) for option in paths.items() for part in option]
    assert main([*TINY, "--recipes", "fp8_current,mxfp8", *options]) == 0
    printed = capsys.readouterr().out
    for needed in (
        "mxfp8: emulated on cpu; path: grouped", "GroupedMLP = ", "not measured", "SQNR in dB", "same bits again after",
    ):  # fmt: skip
        assert needed in printed

    record = json.loads(paths["--json"].read_text())
    assert record["benchmark"] == "recipes" and record["model"] == TINY[2]
    assert record["rows"] == 16 * TINY_SHAPES[TINY[2]].topk and record["steps"] == 2
    assert {"date", "device", "torch", "triton"} <= record["environment"].keys()
    ways = {way["way"]: way for way in record["ways"]}
    assert list(ways) == ["bf16", "fp8_current", "mxfp8", "torch"], "bf16 is always compared with"
    for way in ways.values():
        assert way["sqnr"].keys() == {"y", "dx", "dscales", "dw1", "dw2"}
        assert way["times"].keys() == {*PASSES, once_in(8), PRODUCTS} and way["peak_bytes"] is None
        for timing in way["times"].values():
            assert 0 < timing["low_s"] <= timing["median_s"] <= timing["high_s"]
            assert timing["tflop_per_s"] > 0
    assert [way["same_bits_after"] for way in ways.values()] == ["fp8_current", "mxfp8", "bf16", None]
    assert ways["bf16"]["times"]["forward"]["over_bf16"] == ways["torch"]["times"]["forward"]["over_torch"] == 1
    assert ways["mxfp8"]["saved_bytes_per_row"] < ways["bf16"]["saved_bytes_per_row"]

    rows = list(csv.DictReader(paths["--csv"].read_text().splitlines()))
    timed = (*PASSES, once_in(8), PRODUCTS)
    assert [(row["way"], row["pass"]) for row in rows] == [(way, passes) for way in ways for passes in timed]
    assert float(rows[-1]["sqnr_dw2"]) == pytest.approx(ways["torch"]["sqnr"]["dw2"])
    for name in ("speed", "saved_bytes", "sqnr"):
        assert (paths["--plot"] / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_recipes_alone_are_compared_with_bf16(tmp_path, capsys):
    path = tmp_path / "r.json"
    assert main([*TINY, "--recipes", "fp8_rowwise", "--no-peers", "--json", str(path)]) == 0
    ways = {way["way"]: way for way in json.loads(path.read_text())["ways"]}
    assert list(ways) == ["bf16", "fp8_rowwise"]
    assert all("over_bf16" in timing and "over_torch" not in timing for timing in ways["bf16"]["times"].values())
    assert "/ torch" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_layer_is_compared_under_recipes(tmp_path, capsys):
    path = tmp_path / "r.json"
    assert main([*TINY, "--layer", "--recipes", "fp8_current", "--routing", "skewed", "--json", str(path)]) == 0
    assert f"recipes on the layer of {TINY[2]}" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["layer"] and record["rows"] == 16 * TINY_SHAPES[TINY[2]].topk
    for way in record["ways"]:
        assert way["sqnr"].keys() == {"y", "dx", "drouter", "dw1", "dw2"}
        assert way["times"].keys() == {*PASSES, once_in(8)}
    assert [way["same_bits_after"] for way in record["ways"]] == ["fp8_current", "bf16", None]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--layer", "--routing", "uniform"], "--layer routes by its own Router, not --routing uniform"),
        (["--model", "mixtral"], "--model mixtral is unknown. Take qwen3-30b-a3b,"),
        (["--recipes", "bf16,bf17"], "there is no recipe named 'bf17'"),
        (["--recipes", "fp32"], "--recipes fp32: the model of this benchmark is bf16. Take bf16, fp8_delayed"),
        (["--tokens", "0"], "--tokens is 0, but must be at least 1"),
        (["--steps", "-1"], "--steps is -1, but must be at least 1"),
        pytest.param(
            ["--device", "cuda"], "finds no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)  # fmt: skip
def test_a_wrong_call_is_a_sentence(options, sentence, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["recipes", *options])
    assert exit_info.value.code == 2
    assert sentence in capsys.readouterr().err


def test_plots_without_matplotlib_are_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bench.plots.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main([*TINY, "--plot", str(tmp_path)])
    assert "--plot: matplotlib is not installed" in capsys.readouterr().err


# --- what is wrong is found


@pytest.mark.parametrize("make", [expert_mlp, expert_linear])
@pytest.mark.parametrize("label", ["torch", "bf16", "mxfp8"])
def test_every_way_agrees_with_the_formula_in_fp32(label, make):
    case = make(SHAPE)
    found = case.step(case.torchs() if label == "torch" else case.ours(label), PASSES[1])()
    assert len(found) == len(case.names)
    require_sqnr(label, case.sqnr(found), sqnr_floor("bf16" if label == "torch" else label))


@pytest.mark.parametrize("index", range(5))
def test_a_wrong_tensor_is_found(index):
    case = expert_mlp(SHAPE)
    found = [tensor.clone() for tensor in case.step(case.ours("bf16"), PASSES[1])()]
    found[index][-1] += found[index].abs().max()  # a row, or the weights of one expert
    with pytest.raises(AssertionError, match=f"bf16: {case.names[index]} has .* dB against fp32, but must have"):
        require_sqnr("bf16", case.sqnr(found), sqnr_floor("bf16"))


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
def test_a_wrong_product_is_found(product, monkeypatch):
    case = expert_mlp(SHAPE)
    right = getattr(GroupedPath, product)
    monkeypatch.setattr(GroupedPath, product, lambda *args, **kwargs: right(*args, **kwargs).roll(1, 0))
    with pytest.raises(AssertionError, match=f"mxfp8: {product}1 has .* dB against fp32, but must have"):
        checked_products(case, ["mxfp8"])


def test_a_product_is_held_to_the_floor_of_an_output():
    names = grouped_products(expert_mlp(SHAPE)).outputs
    assert names == ["fprop1", "fprop2"]
    require_sqnr("mxfp8", {"dgrad1": 15.0}, 20, names)
    with pytest.raises(AssertionError, match="mxfp8: fprop2 has 19.0 dB against fp32, but must have 20"):
        require_sqnr("mxfp8", {"fprop1": 21.0, "fprop2": 19.0}, 20, names)


def test_products_are_those_of_every_grouped_linear_under_every_recipe():
    case = expert_mlp(SHAPE)
    steps = checked_products(case, known_recipes())
    assert list(steps) == [*known_recipes(), "torch"]
    assert grouped_products(case).names == ["fprop1", "dgrad1", "wgrad1", "fprop2", "dgrad2", "wgrad2"]
    for step in steps.values():
        shapes = [list(tensor.shape) for tensor in step()]
        rows, (w1, w2) = case.rows, ([list(w.shape) for w in case.weights])
        assert shapes == [[rows, 64], [rows, 64], w1, [rows, 64], [rows, 32], w2]


def test_each_timed_step_casts_the_weights_whatever_ran_before(monkeypatch):
    casts = {}
    cast = MXFP8Quantizer.quantize_stacked
    monkeypatch.setattr(MXFP8Quantizer, "quantize_stacked", lambda *a, **k: (casts["now"].append(a), cast(*a, **k))[1])

    def in_turn(candidates, **options):
        casts["now"] = []
        for _ in range(3):
            candidates["mxfp8"]()
        casts[len(casts)] = len(casts["now"])
        return {way: Timing(1.0, 1.0, 1.0) for way in candidates}

    casts["now"] = []
    monkeypatch.setattr("bench.bench_recipes.time_interleaved", in_turn)
    compare_recipes(expert_mlp(SHAPE), ["bf16", "mxfp8"], steps=1)
    # Two weights: forward, forward + backward, 8 of these in one scope, products, whose operands are quantized before.
    assert list(casts.values())[1:] == [6, 6, 6, 0]


def test_a_wrong_operation_stops_the_comparison(monkeypatch):
    case = expert_mlp(SHAPE)
    case.layer[1] = ops.ScaledClampedQGeGLU()
    with pytest.raises(AssertionError, match="bf16: y has .* dB against fp32, but must have 40"):
        compare_recipes(case, ["bf16"], steps=1)


class Forgetful(ops.ScaledSwiGLU):
    """Gives other numbers at each call."""

    calls = 0

    def fuser_forward(self, ctx, x, extras):
        self.calls += 1
        y, made = super().fuser_forward(ctx, x, extras)
        return y * (1 + 0.01 * self.calls), made


def test_other_bits_after_another_recipe_are_found():
    case = expert_mlp(SHAPE)
    require_same_bits(case, "mxfp8", "fp8_current")
    case.layer[1] = Forgetful()
    with pytest.raises(AssertionError, match="mxfp8, bf16, mxfp8: y has other bits than before"):
        require_same_bits(case, "mxfp8", "bf16")


def test_nan_never_reaches_a_floor():
    with pytest.raises(AssertionError, match="y has nan dB"):
        require_sqnr("mxfp8", {"y": sqnr_db(torch.tensor([math.nan]), torch.ones(1))}, 20)


def test_sqnr_by_hand():
    exact, got = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert sqnr_db(got, exact) == pytest.approx(20)  # 25 / 0.25
    assert sqnr_db(exact, exact) == math.inf and sqnr_db(got, torch.zeros(2)) == -math.inf
    parts = Sqnr()
    for part in (slice(0, 1), slice(1, 2)):
        parts.add(got[part], exact[part])
    assert parts.db == sqnr_db(got, exact)


@pytest.mark.parametrize("label", known_recipes())
def test_every_known_recipe_has_a_floor_and_runs(label):
    assert sqnr_floor(label) == {"bf16": 40, "nvfp4": 9}.get(label, 20)
    (found, _) = compare_recipes(expert_mlp(SHAPE), [label], steps=1)
    assert found.way == label and found.same_bits_after is None


def test_known_recipes_are_bf16_and_all_that_quantize():
    assert known_recipes()[0] == "bf16"
    assert {"fp8_current", "mxfp8"} <= set(known_recipes())
    assert len(known_recipes()) == len(RECIPES)
    assert all(recipe_named(label).quantizer(Role.INPUT) is not None for label in known_recipes()[1:])


# --- figures


def test_saved_bytes_are_those_counted_by_hand():
    case = expert_mlp(SHAPE)
    rows, x, h = case.rows, 2 * 64, 2 * 64
    offsets, scales = 8 * (SHAPE.num_experts + 1), 4
    ends = 4 * SHAPE.num_experts if case.device.type == "cpu" else 0  # int32, for torch's own grouped product
    assert saved_bytes(case.ours("bf16"), but=case.weights) == rows * (x + h + scales) + offsets + ends
    everything = sum(weight.nbytes for weight in case.weights)
    tensor = torch.ones(4, requires_grad=True)
    assert saved_bytes(lambda: (tensor * tensor).exp()) == 16 + 16  # tensor once, and the exponential
    with_weights = saved_bytes(case.torchs())
    assert with_weights - saved_bytes(case.torchs(), but=case.weights) == everything


def test_bytes_of_kept_weights_are_those_counted_by_hand():
    """Values in bf16: both copies of MXFP8, the one that NVFP4 has for both, with a factor for each expert."""
    case = expert_mlp(SHAPE)
    one_copy = sum(weight.nbytes for weight in case.weights)
    factors = 2 * 4 * SHAPE.num_experts
    kept = {way: kept_weight_bytes(case, case.step(case.ours(way), PASSES[-1])) for way in ("bf16", "mxfp8", "nvfp4")}
    assert kept == {"bf16": 0, "mxfp8": 2 * one_copy, "nvfp4": one_copy + factors}


def test_peak_memory_is_not_measured_on_a_cpu():
    assert peak_bytes(lambda: None, CPU) is None


@pytest.mark.gpu
def test_peak_memory_is_what_a_step_allocates_on_top():
    device = torch.device("cuda")
    kept = torch.ones(1 << 20, device=device)
    assert peak_bytes(lambda: kept + 1, device) == 4 << 20


@pytest.mark.parametrize("make", [expert_mlp, expert_linear])
def test_bytes_and_flop_of_a_case(make):
    case = make(SHAPE)
    forward, both = PASSES
    y = case.rows * case.dy.shape[1] * 2
    given = sum(tensor.nbytes for tensor in (*case.inputs.values(), *case.weights))
    assert case.bytes_of(forward) == given + y
    assert case.bytes_of(both) == 2 * given + 2 * y
    weights = sum(weight[0].numel() for weight in case.weights)
    assert case.flop_of(forward) == 2 * case.rows * weights and case.flop_of(both) == 3 * case.flop_of(forward)
    assert sum(case.sizes) == case.rows == 32


@pytest.mark.parametrize("name", EXPERT_SHAPES)
def test_tiny_shapes_are_the_models_scaled_down(name):
    shape, tiny = EXPERT_SHAPES[name], TINY_SHAPES[f"tiny-{name}"]
    for width in ("hidden", "intermediate"):
        assert getattr(tiny, width) % 32 == 0
        assert 0 <= getattr(tiny, width) - getattr(shape, width) / TINY_FACTOR < 32
    assert tiny.num_experts == max(2, shape.num_experts // TINY_FACTOR) and tiny.topk <= tiny.num_experts
    assert str(TINY_FACTOR) in tiny.note


def test_a_shape_of_ones_own_is_named_by_its_numbers(tmp_path):
    path = tmp_path / "own.json"
    arguments = ["--model", "6x96x64x2", "--tokens", "16", "--recipes", "fp8_current", "--steps", "1", "--no-peers"]
    assert main(["recipes", *arguments, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["model"] == "6x96x64x2" and record["rows"] == 32
    assert SHAPES["6x96x64x2"] == ExpertShape(hidden=96, intermediate=64, num_experts=6, topk=2)
    for name in ("6x96x64", "6x96x64x7", "0x96x64x1", "6x96x64x2x1", "x", 6):  # 7 of 6 experts
        assert name not in SHAPES
        with pytest.raises(KeyError):
            SHAPES[name]


def test_casts_are_counted_where_the_library_counts_them(monkeypatch):
    class Counter:
        counts = {
            "GroupedLinear.input": SimpleNamespace(elements=torch.tensor(8), saturated=1, flushed=2, non_finite=0)
        }

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(fuser, "count_casts", Counter, raising=False)
    found, torchs = compare_recipes(expert_mlp(SHAPE), ["bf16"], steps=1)
    assert found.counts == {"GroupedLinear.input": dict(elements=8, saturated=1, flushed=2, non_finite=0)}
    assert torchs.counts is None


def test_explain_line_says_path_and_reason():
    case = expert_mlp(SHAPE)
    case.layer.path = "split"
    assert "mxfp8: emulated on cpu; path: split, as asked for" in explain_line(case, "mxfp8")


# --- tables and pictures


def test_a_table_is_plain_text_off_a_terminal(monkeypatch, capsys):
    expected = "title\n        a    b\n  long  1  2.5"
    assert plain_table("title", ["", "a", "b"], [["long", "1", "2.5"]]) == expected
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(table, "Table", None)
    table.print_table("title", ["", "a", "b"], [["long", "1", "2.5"]])
    assert capsys.readouterr().out == expected + "\n"


def test_a_table_on_a_terminal_is_drawn_by_rich(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    table.print_table("title", ["", "a"], [["long", "1"]])
    printed = capsys.readouterr().out
    assert "title" in printed and "long" in printed and printed.count("\n") > 3


def test_pictures_can_be_drawn_of_controls_too(tmp_path):
    pytest.importorskip("matplotlib")
    times = {passes: Timing(1.0, 0.5, 2.0) for passes in PASSES}
    ways = [Outcome(way, "emulated", {"y": 20.0}, 10.0, times=times) for way in ("bf16", next(iter(CONTROLS)))]
    assert all(path.exists() for path in draw_recipes(tmp_path, "model", ways))


# --- negative controls


@pytest.mark.parametrize("label", CONTROLS)
def test_a_control_is_a_recipe_or_says_what_is_missing(label):
    try:
        recipe = recipe_named(label)
    except UsageError as error:
        assert str(error).startswith(f"{label}: this build has no ")
        missing = str(error).split("has no ")[1].split(".")[0]
        assert missing not in fuser.recipes.__all__
    else:
        assert recipe is recipe_named(label), "its state and its plans are found again"
        assert recipe.quantizer(Role.INPUT) is not None


def test_a_control_without_its_class_is_a_sentence(monkeypatch):
    monkeypatch.setitem(CONTROLS, "fp3", lambda: controls._recipe_class("FP3Scaling")())
    with pytest.raises(UsageError, match="fp3: this build has no FP3Scaling. Leave it out; the other controls are nv"):
        make_control("fp3")
