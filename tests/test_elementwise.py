"""The element-wise kernels against their steps one by one in plain torch."""
# T rows, C columns

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kernels.elementwise import chain as kernels
from ops.kernels.elementwise.chain import (
    Cast,
    Step,
    delementwise,
    delementwise_ref,
    elementwise,
    elementwise_cast,
    elementwise_ref,
)
from ops.kernels.elementwise.chain_steps import ADD_COLUMN, ADD_ELEMENT, dropout_step, scale_step
from recipes.casts.cast import cast as cast_tensor
from recipes.casts.layout import empty_copies
from recipes.casts.scale_rules import GivenScale
from recipes.current_scaling import per_tensor
from recipes.mxfp8 import MXFP8Quantizer
from recipes.tensors.formats import E4M3, E5M2, Float8Format
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.triton.philox import new_seed
from tests.grouped_cases import DEVICES
from tests.pairwise import rest


@triton.jit
def silu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return x * tl.sigmoid(x)


@triton.jit
def dsilu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    s = tl.sigmoid(x)
    return dy * s * (1 + x * (1 - s))


@triton.jit
def glu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return tl.sigmoid(a) * b


@triton.jit
def dglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    s = tl.sigmoid(a)
    return dy * b * s * (1 - s), dy * s


@triton.jit
def multiply(x, operand, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return x * operand


@triton.jit
def dmultiply(dy, x, operand, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * operand


@triton.jit
def d_operand_of_multiply(dy, x, operand, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * x


def glu_ref(x: Tensor, _: None, interleave: float, *__: float) -> Tensor:
    size = int(interleave) or x.shape[-1] // 2
    a, b = x.unflatten(-1, (-1, 2, size)).unbind(-2)
    return (torch.sigmoid(a) * b).flatten(-2)


def gate(interleave: int = 0, operand: str = "") -> Step:
    return Step(
        glu, dglu, glu_ref, operand, constants=(float(interleave), 0.0, 0.0), gated=True, interleave=interleave
    )  # fmt: skip


def weigh(operand: str) -> Step:
    """A learnable factor a column or an element."""
    return Step(multiply, dmultiply, lambda x, o, *_: x * o, operand, d_operand=d_operand_of_multiply)


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    """CPU tensors too, which the interpreter takes."""
    monkeypatch.setattr(kernels, "runs_triton", lambda *tensors, dtypes=(): True)


SILU = Step(silu, dsilu, lambda x, *_: torch.nn.functional.silu(x))
SCALED = Step(silu, dsilu, lambda x, *_: torch.nn.functional.silu(x), "row")
CHAINS = {
    "silu": [SILU],
    "scale": [scale_step(-2.5)],
    "bias": [ADD_COLUMN],
    "add": [ADD_ELEMENT],
    "dropout": [dropout_step(0.25)],
    "scaled silu": [SCALED],
    "weigh": [weigh("column")],
    "bias silu": [ADD_COLUMN, SILU],
    "add silu": [ADD_ELEMENT, SILU],
    "silu add": [SILU, ADD_ELEMENT],
    "bias silu scale dropout add": [ADD_COLUMN, SILU, scale_step(0.3), dropout_step(0.5), ADD_ELEMENT],
    "scaled in the middle": [scale_step(2.0), SCALED, ADD_COLUMN],
    "silu bias bias": [SILU, ADD_COLUMN, ADD_COLUMN],
    "two biases": [ADD_COLUMN, SILU, ADD_COLUMN, SILU],
    "weigh weigh": [weigh("element"), SILU, weigh("column"), weigh("element")],
    "gate": [gate()],
    "interleaved gate": [gate(4)],
    "bias gate": [ADD_COLUMN, gate()],
    "bias interleaved gate bias": [ADD_COLUMN, gate(4), ADD_COLUMN],
    "scaled gate": [gate(0, "row")],
    "everything": [
        weigh("column"), ADD_ELEMENT, SILU, gate(4, "row"), ADD_COLUMN, dropout_step(0.1), SILU,
        ADD_ELEMENT,
    ],
}  # fmt: skip
SHAPES = [(5, 8), (70, 16), (64, 64), (3, 136), (1, 8), (0, 8), (2, 3, 24)]  # (64, 64) is whole tiles
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def operands_for(steps: Sequence[Step], shape: Sequence[int], dtype: torch.dtype, device: str) -> list[Tensor | None]:
    """Random operands; y has this shape."""
    made: list[Tensor | None] = []
    gate = next((i for i, step in enumerate(steps) if step.gated), -1)
    for i, step in enumerate(steps):
        columns = shape[-1] * (2 if i < gate else 1)
        shapes = {"column": (columns,), "row": tuple(shape[:-1]), "element": (*shape[:-1], columns)}
        if step.operand == "random":
            made.append(new_seed(torch.device(device)))
        elif step.operand:
            wide = torch.float32 if step.operand == "row" else dtype
            made.append(torch.randn(shapes[step.operand], device=device).to(wide))
        else:
            made.append(None)
    return made


def matrices(tensors: Sequence[Tensor | None], steps: Sequence[Step]) -> list[Tensor | None]:
    """Element operands as matrices and row operands as vectors, as the references take them."""
    return [
        t if t is None else t.flatten(0, -2) if step.operand == "element" else t.flatten()
        for t, step in zip(tensors, steps, strict=True)
    ]


def check(steps: Sequence[Step], shape: Sequence[int], dtypes: Sequence[torch.dtype], device: str) -> None:
    width = shape[-1] * (2 if any(step.gated for step in steps) else 1)
    x = torch.randn(*shape[:-1], width, device=device).to(dtypes[0])
    dy = torch.randn(shape, device=device).to(dtypes[-1])
    operands = operands_for(steps, shape, dtypes[0], device)
    flat_x, flat_dy, flat_operands = x.flatten(0, -2), dy.flatten(0, -2), matrices(operands, steps)
    want_y = elementwise_ref(flat_x, steps, flat_operands, dtypes)
    want = delementwise_ref(flat_dy, flat_x, steps, flat_operands, dtypes)
    y = elementwise(x, steps, operands, dtypes)
    linear = all(step.linear for step in steps)
    got = delementwise(
        dy, None if linear else x, steps, operands, dtypes,
        need_operands=[step.operand not in ("", "random") for step in steps],
        need_y=not linear, need_column_sums=True,
    )  # fmt: skip
    last = max((i for i, step in enumerate(steps) if not step.linear), default=-1)
    fewer = [
        operand if i <= last or step.operand in ("row", "random") else None
        for i, (step, operand) in enumerate(zip(steps, operands, strict=True))
    ]
    again = delementwise(dy, None if linear else x, steps, fewer, dtypes)
    assert torch.equal(again.dx, got.dx), "what no step needs may be absent"
    assert y.shape == shape
    # A result that lies near a tie of dtype may be rounded the other way, and what follows differs by as much.
    close(y.flatten(0, -2), want_y, dtypes)
    close(got.dx.flatten(0, -2), want.dx, dtypes)
    close(got.column_sums, want.column_sums, dtypes)
    if not linear:
        assert torch.equal(got.y, y)
    for d, want_d, step in zip(got.operands, want.operands, steps, strict=True):
        if step.operand not in ("", "random"):
            assert d.shape == (shape[:-1] if step.operand == "row" else d.shape)
            d = d.flatten(0, -2) if step.operand == "element" else d.flatten()
            close(d, want_d, dtypes)


def close(got: Tensor, want: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    places = max({torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype] for dtype in dtypes)
    assert got.shape == want.shape and not got.isnan().any()
    scale = want.abs().double().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want.double(), rtol=2 * places, atol=2 * places * max(scale, 1e-3))


@pytest.mark.launches("elementwise_kernel", "delementwise_kernel")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [rest(torch.float32), rest(torch.float16), torch.bfloat16], ids=str)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_is_its_steps_one_by_one(chain, dtype, device):
    for shape in SHAPES:
        check(CHAINS[chain], shape, [dtype] * len(CHAINS[chain]), device)


OWN = Float8Format("own", torch.float8_e4m3fn, 240.0)


def codes_like(shape: Sequence[int], form: Float8Format, device: str) -> Cast:
    made = MXFP8Quantizer(form).empty_like_quantized(torch.Size(shape), torch.float32, torch.device(device))
    return Cast(*made.copies.tensors(), MXFP8Quantizer(form).spec)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [E4M3, E5M2, OWN], ids=["E4M3", "E5M2", "E4M3-240"])
@pytest.mark.parametrize("dtype", [torch.float32, rest(torch.float16), torch.bfloat16], ids=str)
def test_what_a_chain_casts_is_what_it_would_store_cast(dtype, form, device):
    """Bit for bit, rowwise and columnwise, forward and backward, also where blocks are partial."""
    for shape in ((64, 64), (70, 136), (3, 11, 33), (1, 8)):
        steps = [ADD_COLUMN, scale_step(3.0), ADD_ELEMENT]
        operands = operands_for(steps, shape, dtype, device)
        spread = 2 if dtype == torch.float16 else 6
        x = (torch.randn(shape, device=device) * torch.randn(shape, device=device).mul(spread).exp2()).to(dtype)
        x.view(-1)[::7] = 0
        y = elementwise(x, steps, operands)
        cast = codes_like(shape, form, device)
        elementwise_cast(x, cast, steps, operands)
        same_codes(cast, MXFP8Quantizer(form).quantize(y, columnwise=True))
        dx = delementwise(x, None, steps, operands).dx
        cast = codes_like(shape, form, device)
        found = delementwise(x, None, steps, operands, need_dx=False, need_operands=[True, False, False], cast=cast)
        assert found.dx is None
        same_codes(cast, MXFP8Quantizer(form).quantize(dx, columnwise=True))


def same_codes(cast: Cast, expected: QuantizedTensor) -> None:
    for name, got, want in zip(Cast._fields, cast[:4], expected.tensors(), strict=False):
        assert got.shape == want.shape, name
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name


@pytest.mark.slow
@pytest.mark.pairwise(first=1)
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # the interpreter's
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [E4M3, E5M2, OWN], ids=["E4M3", "E5M2", "E4M3-240"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("records", [True, False], ids=["records", "records nothing"])
def test_a_chain_casts_with_a_given_scale_what_it_would_store(dtype, form, device, records):
    """Bit for bit, both copies and the amax, forward and backward, also where rows are padded."""
    spec = per_tensor(form, GivenScale())
    for shape in ((64, 64), (70, 136), (3, 11, 33), (1, 8)):
        steps = [ADD_COLUMN, scale_step(3.0), ADD_ELEMENT]
        operands = operands_for(steps, shape, dtype, device)
        x = torch.randn(shape, device=device).to(dtype)
        x.view(-1)[::7] = 0
        x.view(-1)[3] = float("nan")
        scale = torch.tensor([form.max / 8], device=device)  # some saturate

        def room(shape=shape, scale=scale):
            copies = empty_copies(torch.Size(shape), spec, torch.device(device))
            amax = torch.full((1,), 0.5, device=device) if records else None
            return Cast(*copies, spec, scale, amax)

        def check(cast, made, scale=scale):
            amax = torch.full((1,), 0.5, device=device)
            expected = cast_tensor(made, spec, rowwise=True, columnwise=True, scale=scale, amax_out=amax)
            for name in ("row_codes", "column_codes"):
                got, want = (getattr(copies, name).view(torch.uint8) for copies in (cast, expected))
                assert torch.equal(got, want), name
            assert torch.equal(cast.row_scales, expected.row_scale)
            assert cast.amax is None or torch.equal(cast.amax, amax)

        cast = room()
        elementwise_cast(x, cast, steps, operands)
        check(cast, elementwise(x, steps, operands))
        cast = room()
        delementwise(x, None, steps, operands, need_operands=[True, False, False], cast=cast)
        check(cast, delementwise(x, None, steps, operands).dx)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # NumPy's, of signalling NaNs
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["E4M3", "E5M2"])
def test_every_bfloat16_number_is_cast_as_the_reference_casts_it(form, device):
    """All 65,536, among others of its size, and NaN and Inf by class."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(device)
    shape = (256, 256)
    for x in (every.view(shape), every.view(shape).t().contiguous()):
        cast = codes_like(shape, form, device)
        elementwise_cast(x, cast, [scale_step(1.0)], [None])
        expected = MXFP8Quantizer(form).quantize(x, columnwise=True)
        for got, want in zip(cast[:4], expected.tensors(), strict=True):
            got, want = got.view(torch.uint8), want.view(torch.uint8)
            nan = (want.view(got.shape) & 0x7F) > (0x7E if form is E4M3 else 0x7C)
            if got.shape == shape:
                assert torch.equal(((got & 0x7F) > (0x7E if form is E4M3 else 0x7C)), nan)
                assert torch.equal(got[~nan], want[~nan])
            else:
                assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_each_step_has_its_own_dtype(device):
    for first, last in itertools.permutations(DTYPES, 2):
        check([ADD_COLUMN, SILU, ADD_COLUMN], (9, 24), [first, first, last], device)
