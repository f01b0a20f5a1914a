"""Launchers as operations of torch, and kernels found again: what was compiled for other arguments is never launched.

Run as a program, this file launches a kernel in many ways with a driver that has a target but no device, once through
`Launch` and once through Triton, and prints which of the two's compiled kernels are not the same. Under the
interpreter, which the other tests use, Triton compiles nothing.
"""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.tools.tensor_descriptor import TensorDescriptor

from recipes.triton.launch import Launch, cdiv, launcher, next_power_of_2
from tests.compiling import ROOT, compiling

calls: list[Tensor] = []


@launcher("fuser_tests::doubled", mutates=["out", "second"])
def doubled(x: Tensor, out: Tensor, second: Tensor | None, factor: int = 2) -> None:
    """out = factor * x, and so is second."""
    calls.append(x)
    for buffer in (out, second):
        if buffer is not None:
            torch.mul(x.detach(), factor, out=buffer.detach().data)


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


class Seen(TorchDispatchMode):
    """What the dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_eager_call_counts_versions_as_the_operation_does():
    x = torch.ones(3)
    for call in (doubled, torch.ops.fuser_tests.doubled):
        out, second = torch.empty(3), torch.empty(3)
        call(x, out, second=second, factor=3)
        call(x, out, None)
        assert (x._version, out._version, second._version) == (0, 2, 1), call
        assert out.tolist() == [2.0] * 3 and second.tolist() == [3.0] * 3


def test_eager_call_runs_the_function_on_the_callers_tensors():
    x, out = torch.ones(3), torch.empty(3)
    with torch.profiler.profile(acc_events=True) as profile:
        doubled(x, out, None)
    assert calls[0] is x
    assert "fuser_tests::doubled" not in [event.name for event in profile.events()]


def test_a_changed_buffer_is_found_by_autograd():
    x, out = torch.ones(3, requires_grad=True), torch.ones(3)
    y = x * out
    with torch.no_grad():
        doubled(x, out, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tensors_of_inference_mode_are_written():
    with torch.inference_mode():
        out = torch.empty(3)
        doubled(torch.ones(3), out, None)
    assert out.tolist() == [2.0] * 3


def test_modes_see_the_operation():
    with Seen() as seen:
        doubled(torch.ones(3), torch.empty(3), None)
    assert "fuser_tests::doubled" in seen.names


def test_fake_tensors_run_nothing():
    with FakeTensorMode() as mode:
        x, out = torch.ones(3), torch.empty(3)
        doubled(x, out, None)
    doubled(x, mode.from_tensor(torch.empty(3)), None)  # the mode is left, the tensors are still fake
    assert not calls


def test_what_wants_a_gradient_meets_the_operation():
    """Which has none, and says so; the function alone would lose the gradient in silence."""
    x, out = torch.ones(3, requires_grad=True), torch.empty(3)
    with Seen() as seen:
        doubled(x, out, None)
    assert "fuser_tests::doubled" in seen.names
    with torch.no_grad():
        doubled(x, out, None)


def test_transforms_meet_the_operation():
    with pytest.raises(RuntimeError, match="fuser_tests::doubled"):
        torch.vmap(lambda x: doubled(x, torch.empty(3), None))(torch.ones(2, 3))


def test_compiled_graph_is_whole_and_holds_the_operation():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def run(x):
        out = torch.empty_like(x)
        doubled(x, out, None, factor=3)
        return out + 1

    assert torch.compile(run, fullgraph=True, backend=keep)(torch.ones(3)).tolist() == [4.0] * 3
    assert "fuser_tests.doubled" in graphs[0].code


@pytest.mark.parametrize("n", [*range(1, 70), 2**31, 2**31 + 1])
def test_arithmetic_is_that_of_triton(n):
    assert next_power_of_2(n) == triton.next_power_of_2(n)
    assert [cdiv(n, block) for block in (1, 3, 64)] == [triton.cdiv(n, block) for block in (1, 3, 64)]


# ---------------------------------------------------------------------------------------------- kernels found again


@triton.jit
def any_kernel(a, n, pair, b, FLAG: tl.constexpr, BLOCK: tl.constexpr = 16):
    if FLAG:
        tl.store(pair[0] + n, tl.load(pair[0]))
    if b is not None:
        tl.store(b + n + tl.arange(0, BLOCK), 0)


def arguments() -> list[tuple[tuple, dict]]:
    """Pairs of calls that Triton compiles alike, and pairs that it does not."""
    x, y = torch.empty(64), torch.empty(64, dtype=torch.int64)
    boxes = [TensorDescriptor.from_tensor(x.view(8, 8), box) for box in ([4, 4], [8, 4])]
    boxes.append(TensorDescriptor.from_tensor(y.view(8, 8), [4, 4]))
    made = [((a, n, (x, None), None), {"FLAG": True}) for a in (x, x[1:], x[4:], y, None, *boxes) for n in (2, 3)]
    made += [((x, n, (x, None), None), {"FLAG": True}) for n in (0, 1, 5, 16, 32, 2**31 - 1, 2**31, -(2**31), 2**40)]
    made += [((x, n, (x, None), None), {"FLAG": False}) for n in (0.0, 1.0, 2.5, 1e300)]
    made += [((x, 2, pair, None), {"FLAG": True}) for pair in ((x, x), (x[1:], x), (y, None), (x, 1), (x, 3))]
    made += [((x, 2, (x, None), x), {"FLAG": flag, "num_warps": warps}) for flag in (True, False) for warps in (4, 8)]
    made += [((x, 2, (x, None), x), {"FLAG": False, "BLOCK": block}) for block in (16, 32)]
    return made


class RecordingDriver:
    """Compiles, and in place of a launch keeps what would have been launched."""

    class Launcher:
        def __init__(self, source, metadata) -> None:
            arguments = dict(source.signature)
            self.name = metadata
            self.launch = wrap_handle_tensordesc(lambda *args: None, arguments, metadata.tensordesc_meta)

        def __call__(self, *args) -> None:  # the first three are how many programs along each axis
            launched.append((self, len(args), args[:3]))

    launcher_cls = Launcher
    utils = property(lambda self: self)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, *args):
        return 1, 1, 32, 0, 1024


launched: list[tuple] = []


def compare() -> None:
    triton.runtime.driver.set_active(RecordingDriver())
    launch = Launch(any_kernel)
    for _ in range(2):  # met for the first time, and found again
        for number, (args, constants) in enumerate(arguments()):
            launched.clear()
            programs = (3, (3,), (3, 4), (3, 4, 5))[number % 4]
            launch(torch.empty(1), programs, *args, **constants)
            grid = programs if isinstance(programs, tuple) else (programs,)
            any_kernel[grid](*args, enable_fp_fusion=True, **constants)
            ours, tritons = launched
            if ours != tritons:
                print(f"call {number}: {ours} and {tritons}")
    print(f"{len(launch._compiled)} keys, {len(any_kernel.device_caches[0][0])} kernels")


@pytest.mark.slow
def test_the_kernel_that_is_launched_is_the_one_triton_would_launch(tmp_path):
    done = subprocess.run([sys.executable, __file__], env=compiling(tmp_path), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "22 keys, 22 kernels\n"


def test_a_constexpr_by_position_is_refused():
    """By its key it would be any number: what was compiled for one would be launched for another."""
    x = torch.zeros(4)
    with pytest.raises(TypeError, match="FLAG is a constexpr of any_kernel. Pass it by its name."):
        Launch(any_kernel)(x, 1, x, 2, (x, None), x, 1)


@pytest.mark.gpu
def test_kernels_found_again_write_where_they_are_told():
    launch = Launch(any_kernel)
    for _ in range(2):
        for start, n in ((0, 2), (1, 2), (0, 16), (1, 1)):
            pair = torch.arange(64.0, device="cuda"), torch.zeros(64, device="cuda")
            launch(pair[0], 1, None, n, (pair[0][start:], None), pair[1][start:], FLAG=True)
            assert pair[0][start + n] == start
    assert len(launch._compiled) == 4


if __name__ == "__main__":
    compare()
