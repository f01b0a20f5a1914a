"""The kernels of `cast_float8`: bit for bit what the references give, for every layout and every odd size."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from recipes.casts import cast_float8 as kernels
from recipes.casts.cast import cast_ref, dequantize_ref
from recipes.casts.layout import Copies
from recipes.casts.scale_rules import Float32Scale, GivenScale
from recipes.current_scaling import per_tensor
from recipes.tensors.formats import E4M3, E5M2, Float8Format
from recipes.tensors.splits import Splits
from recipes.triton.meeting import empty_meetings
from tests.cast_cases import EACH_DEVICE, INF, NAN, assert_same, assert_same_copies, poisoned

FORMS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
# None: from the amax of x
SCALES = pytest.mark.parametrize("given", [False, True], ids=["current", "given"])
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",  # the interpreter of triton 3.6 with numpy 2
    "ignore:overflow encountered:RuntimeWarning",  # the quotient of the smallest amaxes is Inf, as it should be
    "ignore:invalid value encountered:RuntimeWarning",  # signalling NaNs
)


def check(device, x, form=E4M3, *, given=False, sizes=None, rule=None, **options):
    """Copies and amaxes of the kernels and of the references."""
    options = {"rowwise": True, "columnwise": True} | options
    splits = [None if sizes is None else Splits.make(sizes, rows=len(x), device=place) for place in ("cpu", device)]
    count = len(sizes) if sizes is not None else len(x) if options.get("stacked") else 1
    scale, amaxes = None, [None, None]
    if given:
        scale = torch.rand(count) * 8 + 2.0**-9
        before = torch.zeros(count)
        before[::2] = 3.5
        amaxes = [before.clone(), before.to(device)]
    spec = per_tensor(form, GivenScale() if given else rule or Float32Scale())
    run = [cast_ref, kernels.cast_float8_on_triton]
    expected, found = (
        cast(x.to(place), spec, splits=s, scale=None if scale is None else scale.to(place), amax_out=a, **options)
        for cast, place, s, a in zip(run, ("cpu", device), splits, amaxes, strict=True)
    )
    assert_same_copies(found, expected)
    if given:
        assert torch.equal(amaxes[1].cpu(), amaxes[0])


def wide_range(*shape, dtype=torch.bfloat16, inf=False):
    """`poisoned` without Infs and the largest number, which would be the scale of all; with one Inf if `inf`."""
    extremes = {3: NAN, 7: -INF if inf else 2.5, 11: 1000.0, 13: torch.finfo(dtype).tiny}
    return poisoned(*shape, dtype=dtype, extremes=extremes)


@pytest.mark.launches("amax_kernel", "cast_float8_kernel")
@EACH_DEVICE
@FORMS
@SCALES
@pytest.mark.parametrize("inf", [False, True], ids=["finite", "inf"])
def test_both_copies_of_a_matrix(device, form, given, inf):
    check(device, wide_range(150, 136, inf=inf), form, given=given)


@EACH_DEVICE
@SCALES
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (3, 129), (257, 5), (2, 70, 40), (40,), (0, 8), (8, 0)], ids=str)
def test_shapes(device, given, shape):
    check(device, wide_range(*shape), given=given)


@EACH_DEVICE
@SCALES
@pytest.mark.parametrize("rows", [1, 40, 48, 49, 72, 257])
def test_places_without_rows_are_zero(device, given, rows):
    """Up to a multiple of 32, in memory that held other codes before."""
    empty = kernels.empty_copies

    def stale(*about, **options):
        copies = empty(*about, **options)
        for codes in (copies.row_codes, copies.column_codes):
            codes.view(torch.uint8).fill_(0x7F)
        return copies

    with patch.object(kernels, "empty_copies", stale):
        check(device, wide_range(rows, 272), given=given)


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes(device, dtype):
    check(device, wide_range(20, 140, dtype=dtype))


@EACH_DEVICE
@SCALES
@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "columnwise"])
def test_one_copy_alone(device, given, rowwise):
    check(device, wide_range(30, 130), given=given, rowwise=rowwise, columnwise=not rowwise)


@EACH_DEVICE
@SCALES
@pytest.mark.parametrize("shape", [(2, 132, 20), (3, 5, 130), (2, 6, 7), (0, 4, 4), (2, 0, 4)], ids=str)
def test_stacked_weights(device, given, shape):
    check(device, wide_range(*shape), given=given, stacked=True)


@EACH_DEVICE
@SCALES
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        pytest.param(200, [3, 0, 150, 40], id="tail"),
        pytest.param(128, [1], id="one-row"),
        pytest.param(256, [128, 0, 0, 128], id="whole-tiles"),
        pytest.param(130, [0, 0], id="nobody"),
        pytest.param(0, [0, 0, 0], id="no-rows"),
        pytest.param(30, [1, 1, 28], id="much-padding"),
    ],
)
def test_grouped_rows(device, given, rows, sizes):
    x = wide_range(rows, 24)
    x[sum(sizes) :] = NAN
    check(device, x, given=given, sizes=sizes)


@pytest.mark.pairwise(first=1)
@pytest.mark.launches("cast_large_groups_kernel")
@EACH_DEVICE
@pytest.mark.parametrize("most", [0, 3, 40, 1000])
@pytest.mark.parametrize("copies", [(True, True), (True, False), (False, True)], ids=["both", "row", "column"])
@pytest.mark.slow
def test_groups_that_are_too_large_to_meet(device, copies, most):
    """Their amaxes are found, and they are cast, by launches that leave the others alone."""
    sizes = [3, 0, 150, 40, 41]
    x = wide_range(250, 48).to(device)
    x[sum(sizes) :] = NAN
    splits, spec = Splits.make(sizes, rows=250, device=device), per_tensor(E4M3, Float32Scale())
    about = {"rowwise": copies[0], "columnwise": copies[1]}
    expected = kernels.cast_float8_on_triton(x, spec, splits=splits, **about)
    found = [c if c is None else c.clone().view(torch.uint8).fill_(7).view(c.dtype) for c in expected]
    found[3] = found[3] if found[1] is None else found[1]  # it is of both copies
    meetings = empty_meetings(5, torch.device(device))
    kernels.amax_triton(x[None], meetings, splits.offsets, most)
    kernels.cast_from_meetings(x, Copies(*found), spec, meetings, splits, most)
    begins, places = splits.offsets.tolist(), splits.aligned(kernels.BLOCK).tolist()
    for group, size in enumerate(sizes):
        rows, columns = slice(begins[group], begins[group + 1]), slice(places[group], places[group + 1])
        parts = [(0, rows), (1, slice(group, group + 1)), (2, (slice(None), columns)), (3, slice(group, group + 1))]
        for mine, other in ((found[i][at], expected[i][at]) for i, at in parts if expected[i] is not None):
            mine, other = (part.contiguous().view(torch.uint8) for part in (mine, other))
            assert torch.equal(mine, other if size > most else torch.full_like(other, 7)), group
    tails = [c[begins[-1] :] if c is found[0] else c[:, places[-1] :] for c in (found[0], found[2]) if c is not None]
    assert all((tail.view(torch.uint8) == 7).all() for tail in tails)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("copies", [(True, True), (True, False), (False, True)], ids=["both", "row", "column"])
@pytest.mark.parametrize("columns", [256, 208, 4112])
def test_groups_meet_beside_larger_ones(monkeypatch, copies, columns, dtype):
    """Up to 64 rows meet, in the kernel in Triton; the mean of the groups is smaller."""
    monkeypatch.setattr(kernels, "most_rows", lambda *about: 64)
    monkeypatch.setattr(kernels, "meets_in_gluon", lambda *about: False)
    for sizes in ([3, 0, 150, 64, 65, *[9] * 20], [64] * 9, [0] * 7, [0, 600, *[0] * 20]):
        rows = sum(sizes) + 5
        x = wide_range(rows, columns, dtype=dtype)
        x[sum(sizes) :] = NAN
        usual = kernels.usual_rows(rows, len(sizes))
        meet = kernels.rows_that_meet(x.cuda(), columns, kernels.meeting_tile(columns), usual)
        assert meet == 64 or usual > 64
        for rule in (Float32Scale(), Float32Scale(power_2=True, amax_epsilon=0.5)):
            check("cuda", x, sizes=sizes, rule=rule, rowwise=copies[0], columnwise=copies[1])


def check_met(x, **about):
    """Bits of the kernel in Gluon, in which groups meet, and of those in Triton, which references check."""
    cast = partial(kernels.cast_float8_on_triton, x, **about)
    with patch.object(kernels, "meets_in_gluon", lambda *about: False):
        expected = cast()
    with patch.object(kernels, "_cast_float8_gluon", wraps=kernels._cast_float8_gluon) as met:
        for _ in range(3):
            for mine, other in zip(cast(), expected, strict=True):
                assert mine is other or torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), x.shape
    assert met.call_count == 3


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [(True, True), (True, False), (False, True)], ids=["both", "row", "column"])
@pytest.mark.parametrize("programs", [1, 3, 40])
def test_programs_share_the_tiles_of_large_groups(monkeypatch, copies, programs):
    """So many at most have a group; those read all but one of their tiles twice."""
    monkeypatch.setattr(kernels, "most_programs", lambda *about: programs)
    monkeypatch.setattr(kernels, "MOST_TILES", 10**6)
    about = {"rowwise": copies[0], "columnwise": copies[1]}
    rules = Float32Scale(), Float32Scale(power_2=True, amax_epsilon=0.5)
    for columns in (16, 208, 528, 4112):
        at_random = torch.randint(0, 900, (30,)).tolist()
        for sizes in (at_random, [3, 0, 150, 64, 65, *[9] * 20], [64] * 9, [0] * 7, [0, 1000, *[0] * 20]):
            x = wide_range(sum(sizes) + 100, columns).cuda()
            x[sum(sizes) :] = NAN
            splits = Splits.make(sizes, rows=len(x), device="cuda")
            for rule in rules:
                check_met(x, spec=per_tensor(E4M3, rule), splits=splits, **about)
        w = wide_range(5, 384, columns).cuda()
        check_met(w, spec=per_tensor(E5M2, rules[0]), stacked=True, **about)


@pytest.mark.gpu
def test_more_programs_meet_than_a_gpu_holds():
    """Weights and rows of a model's size: groups that meet one after the other, and shared ones."""
    at_random = torch.randint(0, 1536, (64,)).tolist()
    skewed = [12000, 9000, 5000, *torch.randint(0, 700, (61,)).tolist()]
    about = {"spec": per_tensor(E4M3, Float32Scale()), "rowwise": True, "columnwise": True}
    for shape in ((64, 2816, 2048), (8, 3072, 7168)):
        check_met(torch.randn(shape, device="cuda").bfloat16(), stacked=True, **about)
    for sizes in (at_random, skewed):
        rows = sum(sizes) + 50
        splits = Splits.make(sizes, rows=rows, device="cuda")
        for columns in (1408, 2048, 7168):
            check_met(torch.randn(rows, columns, device="cuda").bfloat16(), splits=splits, **about)


@pytest.mark.rest
@EACH_DEVICE
def test_more_groups_than_are_looked_up_at_a_time(device):
    check(device, wide_range(140, 8), sizes=[1] * 139)


@pytest.mark.slow
@EACH_DEVICE
@SCALES
def test_each_group_is_cast_as_if_alone(device, given):
    sizes, both = [33, 0, 5, 64], {"rowwise": True, "columnwise": True}
    x = wide_range(110, 40).to(device)
    splits = Splits.make(sizes, rows=110, device=device)
    scale = torch.tensor([1.0, 2.0, 0.3, 7.0], device=device) if given else None
    spec = per_tensor(E4M3, GivenScale() if given else Float32Scale())
    whole = kernels.cast_float8_on_triton(x, spec, splits=splits, scale=scale, **both)
    row = place = 0
    for group, size in enumerate(sizes):
        own = None if scale is None else scale[group : group + 1]
        alone = kernels.cast_float8_on_triton(x[row : row + size], spec, scale=own, **both)
        padded = -(-size // kernels.BLOCK) * kernels.BLOCK
        assert_same("row_codes", whole.row_codes[row : row + size], alone.row_codes.cpu())
        assert_same("column_codes", whole.column_codes[:, place : place + padded], alone.column_codes.cpu())
        assert whole.row_scale[group] == alone.row_scale
        row, place = row + size, place + padded


@EACH_DEVICE
def test_input_that_is_not_contiguous(device):
    x = wide_range(140, 60)
    check(device, x.T)
    check(device, x[::2, 3:])


@pytest.mark.slow
@EACH_DEVICE
@FORMS
@SCALES
def test_all_bf16_numbers(device, form, given):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    check(device, every.view(-1, 128), form, given=given)
    check(device, every[every.isfinite()].reshape(-1, 256), form, given=given)


@pytest.mark.rest
@EACH_DEVICE
@FORMS
def test_scales_of_all_magnitudes(device, form):
    """Each number the amax of a group, its own and a given one's; powers of two, their neighbours, subnormals."""
    powers = torch.exp2(torch.arange(-149, 128).double()).float()
    amax = torch.cat([powers, (powers * form.max).clamp(max=torch.finfo(torch.float32).max), torch.tensor([0.0, INF])])
    amax = torch.cat([amax, *(torch.nextafter(amax, torch.tensor(towards)) for towards in (0.0, INF))])
    amax = amax[:: 1 if device == "cuda" else 24]
    w = amax[:, None, None]
    for power_2, epsilon in ((False, 0.0), (True, 0.0), (False, 1e-20)):
        rule = Float32Scale(power_2, epsilon)
        _, scale_inv = rule.scales(amax, form, torch.float32)
        found = kernels.cast_float8_on_triton(
            w.to(device), per_tensor(form, rule), rowwise=True, columnwise=False, stacked=True
        )
        assert torch.equal(found.row_scale.cpu(), scale_inv)
    check(device, w, form, stacked=True)


@EACH_DEVICE
@FORMS
def test_ties_of_all_codes(device, form):
    codes = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()
    finite = codes[codes.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    around = torch.stack([ties, *(torch.nextafter(ties, torch.tensor(towards)) for towards in (-INF, INF))])
    x = torch.cat([around, torch.full((3, 1), form.max)], 1)  # a scale of 1
    check(device, x, form)


@pytest.mark.slow
@pytest.mark.launches("transpose_back_kernel")
@EACH_DEVICE
@FORMS
@pytest.mark.parametrize("kind", ["single", "stacked", "odd-stacked", "grouped", "nobody"])
def test_the_transposed_copy_comes_back(device, form, kind):
    sizes = {"grouped": [3, 0, 130, 20], "nobody": [0, 0]}.get(kind)
    x = wide_range(*{"stacked": (2, 132, 40), "odd-stacked": (2, 7, 130)}.get(kind, (170, 72)))
    splits = [None if sizes is None else Splits.make(sizes, rows=len(x), device=place) for place in ("cpu", device)]
    spec = per_tensor(form, Float32Scale())
    copies = cast_ref(x, spec, rowwise=True, columnwise=True, stacked="stacked" in kind, splits=splits[0])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for run, place, s in zip(
            (dequantize_ref, kernels.dequantize_float8_on_triton), ("cpu", device), splits, strict=True
        ):
            codes, scale = (tensor.to(place) for tensor in copies[2:])
            found = run(codes, scale, spec, dtype, columnwise=True, shape=x.shape, splits=s)
            assert found.dtype == dtype
            assert torch.equal(found.cpu().nan_to_num(1e9), copies.row_codes.to(dtype).nan_to_num(1e9))


@pytest.mark.launches("dequantize_codes_kernel")
@EACH_DEVICE
@FORMS
def test_codes_become_their_numbers(device, form):
    codes = torch.arange(3 * 4099, dtype=torch.uint8).view(form.dtype).reshape(3, 4099)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        found = kernels.dequantize_codes_on_triton(codes.to(device), dtype)
        assert found.dtype == dtype and found.shape == codes.shape
        assert torch.equal(found.cpu().nan_to_num(1e9), codes.to(dtype).nan_to_num(1e9))


OWN = [
    pytest.param(Float8Format("own E4M3", torch.float8_e4m3fn, 240.0), id="E4M3-240"),
    pytest.param(Float8Format("own E5M2", torch.float8_e5m2, 5000.0), id="E5M2-5000"),
]


@EACH_DEVICE
@pytest.mark.parametrize("form", OWN)
@SCALES
@pytest.mark.slow
def test_a_largest_number_of_ones_own(device, form, given):
    x = wide_range(70, 136, inf=True) * 64
    check(device, x, form, given=given)
    check(device, x, form, given=given, sizes=[0, 33, 30])
    spec = per_tensor(form, Float32Scale())
    codes = kernels.cast_float8_on_triton(x.to(device), spec, rowwise=True, columnwise=False).row_codes
    values = codes.float()
    assert values.nan_to_num(0).abs().max().item() == torch.tensor(form.max).to(form.dtype).float()


@EACH_DEVICE
@FORMS
def test_the_sign_of_a_zero_comes_back(device, form):
    codes = torch.tensor([0x00, 0x80, 0x00, 0x80], dtype=torch.uint8, device=device).view(form.dtype)
    for values in (kernels.dequantize_codes_on_triton(codes, torch.float32), codes.to(torch.float32)):
        assert values.signbit().tolist() == [False, True, False, True]


@EACH_DEVICE
def test_amaxes_only_grow(device):
    x = torch.tensor([[1.0, -3.0, NAN]]).bfloat16().to(device)
    amax, scale = torch.tensor([2.0], device=device), torch.ones(1, device=device)
    for factor, expected in ((1.0, 3.0), (0.5, 3.0), (2.0, 6.0), (INF, INF)):
        about = {"rowwise": True, "columnwise": False, "scale": scale, "amax_out": amax}
        kernels.cast_float8_on_triton(x * factor, per_tensor(E4M3, GivenScale()), **about)
        assert amax.item() == expected


@pytest.mark.gpu
@FORMS
@SCALES
def test_large_random_splits(form, given):
    generator = torch.Generator().manual_seed(0)
    for columns in (1024, 1000, 77):
        sizes = torch.randint(0, 400, (37,), generator=generator).tolist()
        sizes[5] = sizes[36] = 0
        x = wide_range(sum(sizes) + 333, columns)
        x[sum(sizes) :] = NAN
        check("cuda", x, form, given=given, sizes=sizes)
    check("cuda", wide_range(8, 384, 640), form, given=given, stacked=True)
    check("cuda", wide_range(4097, 2048), form, given=given)
