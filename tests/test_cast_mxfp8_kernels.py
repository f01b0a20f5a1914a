"""`cast_blocks` with E8M0 scales: bit for bit what its references give, for every layout and every odd size."""

import pytest
import torch

from recipes.casts.cast import cast_ref, cast_to_values, casts_to_values, dequantize_ref
from recipes.casts.cast_blocks import cast_blocks_on_triton, dequantize_blocks_on_triton
from recipes.casts.layout import Copies
from recipes.mxfp8 import MXFP8Quantizer
from recipes.tensors.formats import E4M3, E5M2, Float8Format
from recipes.tensors.splits import Splits
from tests.cast_cases import EACH_DEVICE, INF, NAN, assert_same_copies, check_blocks, poisoned
from tests.pairwise import rest

RULES = [
    pytest.param(MXFP8Quantizer(E4M3), id="E4M3"),
    pytest.param(MXFP8Quantizer(E5M2), id="E5M2"),
    pytest.param(MXFP8Quantizer(E4M3, "floor"), id="E4M3-floor"),
    pytest.param(MXFP8Quantizer(E5M2, "floor"), id="E5M2-floor"),
    pytest.param(MXFP8Quantizer(E4M3, square=True), id="square"),
    pytest.param(MXFP8Quantizer(Float8Format("own", torch.float8_e4m3fn, 240.0)), id="E4M3-240"),
    pytest.param(MXFP8Quantizer(Float8Format("own", torch.float8_e5m2, 5000.0), "floor"), id="E5M2-5000-floor"),
]
EACH_RULE = pytest.mark.parametrize("quantizer", RULES)
EACH_FORMAT = pytest.mark.parametrize(
    "quantizer", [*RULES[:2], *(rest(*rule.values, id=rule.id) for rule in RULES[2:])]
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",  # the interpreter of triton 3.6 with numpy 2
    "ignore:overflow encountered:RuntimeWarning",  # the reciprocals of tiny scales are large, as they should be
    "ignore:invalid value encountered:RuntimeWarning",  # signalling NaNs
)


@pytest.mark.launches("cast_mxfp8_kernel")
@EACH_DEVICE
@EACH_RULE
def test_both_copies_of_a_matrix(device, quantizer):
    check_blocks(device, poisoned(70, 136), quantizer)
    check_blocks(device, torch.randn(64, 128), quantizer)


@EACH_DEVICE
@EACH_RULE
@pytest.mark.parametrize("shape", [(1, 1), (3, 129), (257, 5), (2, 35, 40), (40,), (0, 8), (8, 0)], ids=str)
def test_shapes(device, quantizer, shape):
    check_blocks(device, poisoned(*shape), quantizer)


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes(device, dtype):
    check_blocks(device, poisoned(20, 140, dtype=dtype), MXFP8Quantizer(E4M3))


@EACH_DEVICE
@EACH_RULE
@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "columnwise"])
def test_one_copy_alone(device, quantizer, rowwise):
    check_blocks(device, poisoned(40, 70), quantizer, rowwise=rowwise, columnwise=not rowwise)


@EACH_DEVICE
@EACH_RULE
@pytest.mark.parametrize("shape", [(2, 40, 70), (3, 5, 130), (0, 4, 4), (2, 0, 4)], ids=str)
def test_stacked_weights(device, quantizer, shape):
    check_blocks(device, poisoned(*shape), quantizer, stacked=True)


SPLITS = pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        pytest.param(120, [3, 0, 65, 40], id="tail"),
        pytest.param(64, [1], id="one-row"),
        pytest.param(96, [32, 0, 0, 64], id="whole-blocks"),
        pytest.param(70, [0, 0], id="nobody"),
        pytest.param(0, [0, 0, 0], id="no-rows"),
    ],
)


@EACH_DEVICE
@EACH_RULE
@SPLITS
def test_grouped_rows(device, quantizer, rows, sizes):
    x = poisoned(rows, 40)
    x[sum(sizes) :] = NAN
    check_blocks(device, x, quantizer, sizes=sizes)


@EACH_DEVICE
@pytest.mark.slow
def test_more_groups_than_are_looked_up_at_a_time(device):
    check_blocks(device, poisoned(140, 8), MXFP8Quantizer(E4M3), sizes=[1] * 139)


@EACH_DEVICE
@pytest.mark.parametrize("square", [False, True], ids=["row-and-column", "square"])
def test_each_group_is_cast_as_if_alone(device, square):
    spec, sizes, both = MXFP8Quantizer(E4M3, square=square).spec, [33, 0, 5, 64], {"rowwise": True, "columnwise": True}
    x = poisoned(110, 40).to(device)
    splits = Splits.make(sizes, rows=110, device=device)
    whole = cast_blocks_on_triton(x, spec, splits=splits, **both)
    row = block = 0
    for size in sizes:
        blocks = -(-size // 32)
        rows = slice(row, row + size)
        part = Copies(
            *(t[rows] for t in whole[:3]), whole.column_scale[block : block + blocks]
        )  # fmt: skip
        alone = cast_blocks_on_triton(x[rows], spec, **both)
        assert_same_copies(part, Copies(*(t.cpu() for t in alone)))
        row, block = row + size, block + blocks


@EACH_DEVICE
def test_input_that_is_not_contiguous(device):
    x = poisoned(70, 60)
    check_blocks(device, x.T, MXFP8Quantizer(E4M3))
    check_blocks(device, x[::2, 3:], MXFP8Quantizer(E4M3))


@EACH_DEVICE
@EACH_FORMAT
@pytest.mark.slow
def test_all_bf16_numbers(device, quantizer):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    check_blocks(device, every.view(-1, 64), quantizer)
    if not quantizer.square:  # each alone in its block
        alone = every[:: 1 if device == "cuda" else 16]
        check_blocks(device, torch.nn.functional.pad(alone[:, None], (0, 1)), quantizer, columnwise=False)
        check_blocks(device, torch.nn.functional.pad(alone[None], (0, 0, 0, 1)), quantizer, rowwise=False)


@pytest.mark.slow
@EACH_DEVICE
@EACH_FORMAT
def test_powers_of_two_and_their_neighbours(device, quantizer):
    powers = torch.exp2(torch.arange(-149, 128).double()).float()
    largest = (powers * quantizer.form.max).clamp(max=torch.finfo(torch.float32).max)
    every = torch.cat([powers, largest])
    every = torch.cat([every, *(torch.nextafter(every, torch.tensor(towards)) for towards in (0.0, INF))])
    check_blocks(device, torch.nn.functional.pad(every[:, None], (0, 1)), quantizer, columnwise=False)
    check_blocks(device, torch.nn.functional.pad(every[None], (0, 0, 0, 1)), quantizer, rowwise=False)


@EACH_DEVICE
@EACH_RULE
def test_ties_of_all_codes(device, quantizer):
    codes = torch.arange(256, dtype=torch.uint8).view(quantizer.form.dtype).float()
    finite = codes[codes.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    around = torch.stack([ties, *(torch.nextafter(ties, torch.tensor(towards)) for towards in (-INF, INF))])
    fixed = torch.full_like(around, quantizer.form.max)
    # the largest code beside each keeps the scale at 1
    check_blocks(device, torch.stack([around, fixed], -1).view(-1, 2), quantizer, columnwise=False)


@pytest.mark.launches("dequantize_mxfp8_kernel")
@EACH_DEVICE
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("kind", ["single", "stacked", "grouped"])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_dequantize(device, columnwise, kind, form):
    sizes = [3, 0, 50, 20] if kind == "grouped" else None
    x = poisoned(*((2, 40, 70) if kind == "stacked" else (90, 70)))
    splits = [None if sizes is None else Splits.make(sizes, rows=90, device=place) for place in ("cpu", device)]
    spec = MXFP8Quantizer(form).spec
    copies = cast_ref(
        x, spec, rowwise=not columnwise, columnwise=columnwise, stacked=kind == "stacked", splits=splits[0]
    )
    codes, scale = copies[2:] if columnwise else copies[:2]
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        about = {"columnwise": columnwise, "shape": x.shape}
        expected = dequantize_ref(codes, scale, spec, dtype, **about, splits=splits[0])
        found = dequantize_blocks_on_triton(codes.to(device), scale.to(device), spec, dtype, **about, splits=splits[1])
        assert found.dtype == dtype
        assert torch.equal(found.cpu().double().nan_to_num(1e9), expected.double().nan_to_num(1e9))


@EACH_DEVICE
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_every_code_under_every_scale_dequantizes(device, form):
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous().view(form.dtype)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    for dtype in (torch.bfloat16, torch.float32):
        spec, about = MXFP8Quantizer(form).spec, {"columnwise": False, "shape": codes.shape}
        expected = dequantize_ref(codes, scale, spec, dtype, **about)
        found = dequantize_blocks_on_triton(codes.to(device), scale.to(device), spec, dtype, **about).cpu()
        nan = expected.isnan()
        assert torch.equal(found.isnan(), nan)
        assert torch.equal(found.masked_fill(nan, 0), expected.masked_fill(nan, 0))


@pytest.mark.gpu
@EACH_RULE
def test_large_random_splits(quantizer):
    generator = torch.Generator().manual_seed(0)
    for columns in (1024, 1000, 77):
        sizes = torch.randint(0, 400, (37,), generator=generator).tolist()
        sizes[5] = sizes[36] = 0
        x = poisoned(sum(sizes) + 333, columns)
        x[sum(sizes) :] = NAN
        check_blocks("cuda", x, quantizer, sizes=sizes)
    check_blocks("cuda", poisoned(8, 384, 640), quantizer, stacked=True)
    check_blocks("cuda", poisoned(4097, 2048), quantizer)


@pytest.mark.slow
@pytest.mark.pairwise(rest=2)
@EACH_DEVICE
@EACH_FORMAT
@SPLITS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("column_codes", [True, False], ids=["column-codes", "column-values"])
def test_values_in_place_of_codes(device, quantizer, rows, sizes, dtype, column_codes):
    """Bit for bit what the codes are dequantized to, beside the codes of a copy that is kept."""
    if quantizer.square:
        assert not casts_to_values(quantizer.spec)
        return
    assert casts_to_values(quantizer.spec)
    x = poisoned(rows, 72, dtype=dtype).to(device)
    splits = Splits.make(sizes, rows=rows, device=device)
    wanted = {"rowwise": True, "columnwise": True, "splits": splits}
    codes = cast_blocks_on_triton(x, quantizer.spec, **wanted)
    found = cast_blocks_on_triton(
        x, quantizer.spec, **wanted, row_values=dtype, column_values=None if column_codes else dtype
    )
    row, column = (
        dequantize_blocks_on_triton(
            copy, scale, quantizer.spec, dtype, columnwise=columnwise, shape=x.shape, splits=splits
        )
        for copy, scale, columnwise in (
            (codes.row_codes, codes.row_scale, False),
            (codes.column_codes, codes.column_scale, True),
        )
    )
    active = sum(sizes)  # the rest is 0 in both, whatever stands in x
    for name, got, want in (("row", found.row_codes, row), ("column", found.column_codes, column)):
        if name == "column" and column_codes:
            got, want = found.column_codes.view(torch.uint8), codes.column_codes.view(torch.uint8)
            assert torch.equal(found.column_scale, codes.column_scale)
        assert got.dtype == want.dtype and torch.equal(got.nan_to_num(7), want.nan_to_num(7)), name
        assert not got[active:].float().any(), name
    assert found.row_scale is None


@EACH_DEVICE
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("column_codes", [True, False], ids=["column-codes", "column-values"])
def test_values_of_stacked_weights(device, form, column_codes):
    """Bit for bit what the codes are dequantized to."""
    quantizer, w = MXFP8Quantizer(form), poisoned(3, 40, 72).to(device)
    codes = quantizer.quantize_stacked(w, columnwise=True)
    found = cast_to_values(w, quantizer.spec, torch.bfloat16, rowwise=True, columnwise=True, column_codes=column_codes)
    assert torch.equal(found.row_codes.nan_to_num(7), codes.rowwise.operand(torch.bfloat16).values.nan_to_num(7))
    assert found.row_scale is None and (found.column_scale is None) == (not column_codes)
    columns = codes.columnwise
    if column_codes:
        assert torch.equal(found.column_codes.view(torch.uint8), columns.codes.view(torch.uint8))
        assert torch.equal(found.column_scale, columns.scale_inv)
    else:
        assert torch.equal(found.column_codes.nan_to_num(7), columns.operand(torch.bfloat16).values.nan_to_num(7))
