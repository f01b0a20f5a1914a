"""Measured tiles: a table's way to a file and back, what it holds for, what is refused, and that launchers obey it."""

import json
from dataclasses import replace

import pytest
import torch

from fuser import Sequential, load_tiles, ops
from ops.kernels.grouped_gemm import high_precision as gg
from ops.kernels.grouped_gemm import measured_tiles as tiles
from ops.kernels.grouped_gemm import tile_rules as grouped_gemm_tiles
from ops.kernels.grouped_gemm.measured_tiles import (
    Gemm,
    GroupedGemmConfig,
    MeasuredTile,
    TileTable,
    read_tiles,
    tiles_in_use,
    use_tiles,
)
from ops.kernels.grouped_gemm.tile_rules import k_grouped_config
from recipes.mixed import MixedScaling
from recipes.tensors.splits import Splits

HERE = torch.cuda.get_device_name() if torch.cuda.is_available() else "NVIDIA H200"
HOPPER = (9, 0)
FPROP = Gemm("TN", torch.bfloat16, torch.bfloat16, False, 8, 64, 32)
WGRAD = FPROP._replace(product="NT", out_dtype=torch.float32, accumulate=True)
SMALL = GroupedGemmConfig(16, 32, 16, num_warps=4, num_stages=2)
LARGE = GroupedGemmConfig(128, 128, 64, num_warps=8, num_stages=4, programs=1)


def table(*found: MeasuredTile) -> TileTable:
    return TileTable({"date": "2026-11-21", "device": HERE, "triton": "3.6.0"}, HOPPER, found)


def entry(gemm: Gemm = FPROP, rows: int = 4096, config: GroupedGemmConfig = SMALL) -> MeasuredTile:
    return MeasuredTile(gemm, rows, config, microseconds=90.0, built_in_microseconds=100.0)


def written(path, record) -> str:
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return str(path)


@pytest.fixture(autouse=True)
def no_table():
    yield
    use_tiles(None)


# --- the file


def test_a_table_survives_its_file(tmp_path):
    before = table(entry(), entry(WGRAD, 100, LARGE))
    after = load_tiles(written(tmp_path / "tiles.json", before.record()))
    assert after is tiles_in_use() and after is not None
    assert (after.environment, after.capability, after.tiles) == (before.environment, before.capability, before.tiles)


def test_no_table_is_in_use_before_one_is_loaded_and_after_none_is(tmp_path):
    assert tiles_in_use() is None
    load_tiles(written(tmp_path / "tiles.json", table().record()))
    assert tiles_in_use() is not None
    assert load_tiles(None) is None and tiles_in_use() is None


def _edited(**config):
    record = table(entry(config=LARGE)).record()
    record["tiles"][0]["config"] |= config
    return record


REFUSED = {
    "not JSON": ("tiles", "is no table of tiles: JSONDecodeError"),
    "a list": ([1], "is no table of tiles: TypeError"),
    "no format": ({}, "is no table of tiles: KeyError: 'format'"),
    "another format": (table().record() | {"format": 2}, "has format 2, but must have 5"),
    "no capability": ({"format": 5}, "KeyError: 'capability'"),
    "no date": (table().record() | {"environment": {"device": HERE}}, "KeyError: 'date'"),
    "a field too many": (_edited(tile=1), "is no table of tiles: TypeError"),
    "half a warp": (_edited(num_warps=0.5), "something else than whole numbers"),
    "float32": (table(entry(FPROP._replace(dtype=torch.float32))).record(), "of no product of 16-bit operands"),
    "an unknown product": (table(entry(FPROP._replace(product="TT"))).record(), "of no product of 16-bit operands"),
    "no rows": (table(entry(rows=0)).record(), "of no product of 16-bit operands"),
    "three rows a tile": (_edited(block_m=48), "is not made of powers of two"),
    "a tile of one row": (_edited(block_m=1), "is not within 16 to 256 a side"),
    "no stage": (_edited(num_stages=0), "must have a stage"),
    "too large": (_edited(num_stages=8), r"needs 296448 bytes of shared memory, and there are 232448"),
    "a box of 32": (_edited(box=32), "is stored by 64 or 128 columns, not by 32"),
    "fetched in Triton": (_edited(fetches=True), "fetches what it adds to: it is for kernels in Gluon that add"),
    "no box": (_edited(box=0), "is stored by 64 or 128 columns, not by 0"),
    "descriptors on Ampere": (table(entry(config=LARGE)).record() | {"capability": [8, 0]}, "compute capability 9.0"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_fitting_table_is_refused_and_changes_nothing(record, sentence, tmp_path):
    use_tiles(before := table())
    with pytest.raises(ValueError, match=sentence):
        load_tiles(written(tmp_path / "tiles.json", record))
    assert tiles_in_use() is before


def test_a_table_of_another_gpu_is_refused(tmp_path, monkeypatch):
    path = written(
        tmp_path / "tiles.json", replace(table(), environment={"date": "", "device": "NVIDIA A100"}).record()
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    with pytest.raises(ValueError, match="was measured on NVIDIA A100, and this is NVIDIA H200"):
        read_tiles(path)


# --- the lookup


@pytest.mark.parametrize(
    ("rows", "nearest"),
    [(3000, 4096), (2897, 4096), (2896, None), (5792, 4096), (5793, None), (50000, 65536), (0, None)],
)
def test_rows_find_the_nearest_within_a_factor_of_sqrt_2(rows, nearest):
    of_rows = {4096: SMALL, 65536: LARGE}
    both = table(*(entry(rows=measured, config=config) for measured, config in of_rows.items()))
    assert both.find(FPROP, rows) == of_rows.get(nearest)


def test_of_two_that_are_near_the_nearer_one_holds():
    both = table(entry(rows=1000, config=SMALL), entry(rows=1400, config=LARGE))
    assert (both.find(FPROP, 1180), both.find(FPROP, 1190)) == (SMALL, LARGE)


@pytest.mark.parametrize("field", Gemm._fields)
def test_an_entry_holds_for_its_own_product_alone(field):
    others = {"product": "NN", "dtype": torch.float16, "out_dtype": torch.float32, "accumulate": True}
    other = FPROP._replace(**{field: others.get(field, 7)})
    assert table(entry()).find(FPROP, 4096) == SMALL
    assert table(entry()).find(other, 4096) is None


# --- what launches


KERNELS = ("_m_grouped", "_m_grouped_persistent", "_k_grouped", "_k_grouped_persistent")


@pytest.fixture
def chosen(monkeypatch):
    """The tile of each launch by the kernel's name; nothing is launched."""
    found: dict[str, GroupedGemmConfig] = {}

    def recorder(name):
        def launch(out, programs, *args, **constants):
            tile = [constants[key] for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")]
            found[name] = GroupedGemmConfig(*tile)

        return launch

    for name in KERNELS:
        monkeypatch.setattr(gg, name, recorder(name))
    return found


def launch_products(N: int = 64, K: int = 32, accumulate: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the launchers make of CPU tensors, which they take for Hopper's; and what is right."""
    rows = 64
    splits = Splits.make(torch.tensor([16, 0, 40, 8]), rows=rows, device="cpu")
    x, w, dy = (torch.randn(shape).bfloat16() for shape in ((rows, K), (4, N, K), (rows, N)))
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.zeros_like(w)
    gg.m_grouped_triton(x, w, splits.offsets, None, None, None, y, transposed=True, tf32=False)
    gg.m_grouped_triton(dy, w, splits.offsets, None, None, None, dx, transposed=False, tf32=False)
    gg.grouped_gemm_nt_triton(dy, x, splits.offsets, None, dw, tf32=False, accumulate=accumulate)
    return [
        (y, gg.grouped_gemm_tn_ref(x, w, splits)),
        (dx, gg.grouped_gemm_nn_ref(dy, w, splits)),
        (dw, gg.grouped_gemm_nt_ref(dy, x, splits)),
    ]


def all_products(config: GroupedGemmConfig, N: int = 64, K: int = 32) -> TileTable:
    gemms = [FPROP._replace(product=product, num_groups=4, out_features=N, in_features=K) for product in tiles.PRODUCTS]
    return table(*(entry(gemm, rows=64, config=config) for gemm in gemms))


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors stand for Hopper's where there is no GPU")
def test_launchers_take_the_table_before_the_rule(chosen):
    launch_products()
    rule = dict(chosen)
    assert set(rule) == {"_m_grouped_persistent", "_k_grouped_persistent"}
    chosen.clear()
    use_tiles(all_products(LARGE))
    launch_products()
    assert chosen == dict.fromkeys(rule, LARGE._replace(programs=0)) and chosen != rule
    chosen.clear()
    use_tiles(all_products(SMALL))  # on pointers
    launch_products()
    assert chosen == dict.fromkeys(("_m_grouped", "_k_grouped"), SMALL)
    for nothing in (None, all_products(LARGE, N=128), replace(all_products(LARGE), capability=(8, 0))):
        chosen.clear()
        use_tiles(nothing)
        launch_products()
        assert chosen == rule
    use_tiles(all_products(LARGE))
    launch_products(accumulate=True)
    assert chosen["_k_grouped_persistent"] == k_grouped_config(
        64, 2, torch.bfloat16, out_dtype=torch.bfloat16, tf32=False, aligned=False, descriptors=True, accumulate=True,
        capability=HOPPER, gluon=False,
    )._replace(programs=0)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors stand for Hopper's where there is no GPU")
def test_tensors_that_a_measured_kernel_cannot_read_take_the_rule(chosen):
    launch_products(N=36, K=20)
    rule = dict(chosen)
    for config in (SMALL, LARGE):
        use_tiles(all_products(config, N=36, K=20))
        launch_products(N=36, K=20)
        assert chosen == rule


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize("config", [SMALL, SMALL._replace(block_n=32, programs=1)], ids=["pointers", "descriptors"])
def test_a_measured_tile_computes_the_same_interpreted(config):
    use_tiles(all_products(config))
    for found, exact in launch_products():
        torch.testing.assert_close(found, exact, rtol=2**-7, atol=1e-3)


# --- explain


def lines(dtype=torch.bfloat16, *, recipe=None, path=None, main_grad=False) -> list[str]:
    about = {"device": "meta", "accumulate_into_main_grad": main_grad}
    linears = [ops.GroupedLinear(8, 32, 64, **about), ops.SwiGLU(), ops.GroupedLinear(8, 32, 32, **about)]
    text = Sequential(*linears, path=path).explain(device="cuda", dtype=dtype, recipe=recipe)
    return [line for line in text.splitlines() if "GroupedMLP = " in line]


@pytest.fixture
def on(monkeypatch):
    """Says that there is a GPU of this compute capability, and whether Gluon runs on it."""

    def set_capability(*capability, gluon=False, fast_memory=True):
        monkeypatch.setattr(grouped_gemm_tiles, "why_no_gluon", lambda capability: None if gluon else "No.")
        monkeypatch.setattr(grouped_gemm_tiles, "has_fast_memory", lambda: fast_memory)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return set_capability


RULE = (
    "128x256x64, 8 warps, 4 stages, fprop and dgrad below 96 rows a group 64x128x64, 4 warps, 3 stages, "
    "fprop and dgrad below 16 rows a group 64x128x64, 4 warps, 4 stages, by the built-in rule"
)


def test_explain_names_the_tiles_of_the_rule_or_of_the_table(on):
    on(*HOPPER)
    assert all(f"[grouped GEMM (Triton: {RULE}), swiglu" in line for line in lines())
    use_tiles(table(entry(), entry(FPROP._replace(product="NT")), entry(FPROP._replace(product="NN"), config=LARGE)))
    found = (
        "fprop and wgrad 16x32x16, 4 warps, 2 stages at 4096 rows, dgrad 128x128x64, 8 warps, 4 stages at 4096 rows, "
        "measured 2026-11-21; else "
    )
    assert all(f"(Triton: {found}{RULE}), then grouped GEMM (Triton: {RULE})," in line for line in lines())
    assert not any("measured" in line for line in lines(torch.float32))
    on(8, 0)
    assert not any("measured" in line for line in lines())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_explain_names_the_tiles_of_hopper_where_there_is_no_gpu():
    assert all(f"(Triton: {RULE})" in line for line in lines())


WIDE, SQUARE = "128x256x128, 8 warps, 3 stages", "128x128x128, 4 warps, 3 stages"
LOW = "64x128x128, 4 warps, 3 stages"
FEW = f"fprop and dgrad below 96 rows a group {LOW}, by the built-in rule"
NOT_IN_WGRAD = MixedScaling("fp8_block", "fp8_block", "fp8_block", input_for_wgrad="bf16", grad_output_for_wgrad="bf16")
FEWER_ADDED = "wgrad below 1280 rows a group 128x256x32, 8 warps, 6 stages in Gluon"
PLANS = {
    "main_grad": ({"main_grad": True}, "4 stages, wgrad 128x256x64, 8 warps, 3 stages, fprop and dgrad below 96 rows"),
    "dequantized": ({"recipe": "mxfp8"}, RULE),
    "float8": ({"recipe": "fp8_current"}, f"(Triton: {WIDE}, dgrad and wgrad {SQUARE}, {FEW})"),
    "float8, main_grad": ({"recipe": "fp8_delayed", "main_grad": True}, f"(Triton: {WIDE}, dgrad {SQUARE}, {FEW})"),
    "float8 blocks": ({"recipe": "fp8_block"}, f"(Triton: {SQUARE}, {FEW})"),
    "float8 blocks, main_grad": (
        {"recipe": "fp8_block", "main_grad": True},
        f"(Triton: {SQUARE}, wgrad {LOW}, {FEW})",
    ),
    "float8 but for wgrad": (
        {"recipe": NOT_IN_WGRAD},
        f"(Triton: {SQUARE}, wgrad 128x256x64, 8 warps, 4 stages, {FEW})",
    ),
    "one by one": ({"path": "split"}, "[a product a group, swiglu"),
}


def test_explain_names_gluon(on):
    on(*HOPPER, gluon=True)
    rows = "128x256x64, 8 warps, 4 stages"
    wgrad = f"{rows} in Gluon, wgrad 128x256x32, 8 warps, 8 stages in Gluon"
    for main_grad, words in ((False, wgrad), (True, f"{wgrad}, {FEWER_ADDED}")):
        found = lines(main_grad=main_grad)
        fewer = f"fprop and dgrad below 256 rows a group {rows}, fprop and dgrad below 96 rows"
        assert found and all(f"{words}, {fewer}" in line for line in found)
    on(*HOPPER, gluon=True, fast_memory=False)
    found, few = lines(), "fprop and dgrad below 96 rows"
    assert found and all(f"{rows}, wgrad 128x256x32, 8 warps, 8 stages in Gluon, {few}" in line for line in found)


@pytest.mark.parametrize(("options", "words"), PLANS.values(), ids=PLANS)
def test_explain_names_the_tiles_of_what_is_multiplied(options, words, on):
    on(*HOPPER)
    assert lines(**options) and all(words in line for line in lines(**options))


def test_explain_names_the_tiles_of_this_gpu(on):
    on(8, 0)
    words = "128x128x64, 4 warps, 3 stages, fprop and dgrad below 96 rows a group 64x128x64, 4 warps, 3 stages, by the"
    assert all(words in line for line in lines())
