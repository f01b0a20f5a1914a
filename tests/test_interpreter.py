"""What `tests.interpreter` replaces is back after a launch, and dtypes are those of Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def _largest(x):
    return tl.max(x) + 1


@triton.jit
def _largest_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    tl.store(y_ptr, _largest(tl.load(x_ptr + tl.arange(0, SIZE))))


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_the_language_is_replaced_while_a_kernel_runs():
    def language():
        return {(of, name): vars(of)[name] for of in (tl, tl.core, tl.math, tl.tensor) for name in vars(of)}

    y = torch.zeros(1)
    _largest_kernel[(1,)](torch.arange(16.0), y, SIZE=4)  # Triton itself leaves what classes inherit as their own
    before = language()
    for size in (8, 16):
        _largest_kernel[(1,)](torch.arange(16.0), y, SIZE=size)
        assert y.item() == size and language() == before
    with pytest.raises(interpreter.InterpreterError):
        _largest_kernel[(1,)](torch.arange(16.0), y, SIZE=9)
    assert language() == before
    _largest_kernel[(1,)](torch.arange(16.0) * 2, y, SIZE=8)
    assert y.item() == 15


@pytest.mark.interpreter
def test_dtypes_are_those_of_the_interpreter():
    for kind in (tl.int1, tl.int32, tl.uint8, tl.bfloat16, tl.float16, tl.float32, tl.float8e4nv):
        for of in (kind, tl.block_type(kind, [4])):
            assert interpreter._get_np_dtype(of).itemsize == max(1, kind.primitive_bitwidth // 8)
        for of in (tl.pointer_type(kind), tl.block_type(tl.pointer_type(kind), [4])):
            assert interpreter._get_np_dtype(of).itemsize == 8
