"""Functions repeated: what is launched is what the function would have launched, and nothing else is repeated.

Run as a program, this file repeats functions with a driver that compiles and launches nothing, and prints by name which
of its checks hold. Under the interpreter, which the other tests use, Triton compiles nothing.
"""

import json
import subprocess
import sys
import threading
import traceback
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from weakref import ref

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import LazyDict
from triton.tools.tensor_descriptor import TensorDescriptor

from fuser import Sequential, ops
from recipes.casts import amax_history
from recipes.casts.amax_history import EndOfStep, end_steps
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.splits import Splits
from recipes.triton import repeated as actions
from recipes.triton import replay, tape
from recipes.triton.gates import why_not_repeated
from recipes.triton.launch import Launch, launcher, replayed
from recipes.triton.replay import Replays, forget
from tests.compiling import ROOT, compiling
from tests.reference import assert_same_bits


@triton.jit
def any_kernel(box, a, n, pair, FLAG: tl.constexpr):
    if FLAG:
        tl.store(pair[0] + n, tl.load(pair[0]))
    tl.store(a + n, tl.load(a))
    box.store([0, n], box.load([n, 0]))


_any_kernel = Launch(any_kernel)
runs: list[str] = []  # of the functions, which repeating spares


class Made(NamedTuple):
    first: Tensor
    nothing: None
    second: Tensor


@launcher("fuser_tests::launched_once", mutates=["out"])
def launch_once(x: Tensor, out: Tensor, n: int, third: Tensor | None = None) -> None:
    runs.append("launch_once")
    box = TensorDescriptor(x, list(x.shape), list(x.stride()), [4, 8])
    _any_kernel(x, (x.shape[0], 2, n), box, out, n, (out, third), FLAG=third is None)


@replayed
def chain(x: Tensor, out: Tensor | None = None) -> Made:
    """Two launches, one of them on memory that is freed; a sum; and out, or new memory."""
    runs.append("chain")
    between = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_once(x, between, 3)
    total = between.sum(0)
    between = between.new_empty(x.shape)
    last = torch.empty_like(x) if out is None else out
    launch_once(between, last, 5, total)
    return Made(last, None, total)


IS_3_6 = triton.__version__.startswith("3.6.")
BEFORE = 13 if IS_3_6 else 15  # arguments of Triton's C function before those of the kernel


def launch(*args) -> None:
    """In place of that function, which takes the kernel's arguments as a sequence since 3.7, behind the others."""
    *before, of_kernel = args
    got.append(tuple(map(plain, args if IS_3_6 else (*before, *of_kernel))))


class Driver:
    """Compiles, and in place of a launch keeps what it would have been. The launcher is Triton's own."""

    launcher_cls = nvidia.CudaLauncher
    utils = property(lambda self: self)
    launch = partial(launch)

    def build_signature_metadata(self, signature):
        return f"signature {signature}"

    def fill_tma_descriptor(self, *args):
        filled.append(args)
        return f"descriptor of {[list(arg) if isinstance(arg, (list, tuple)) else arg for arg in args]}"

    fill_tma_descriptor_tiled = fill_tma_descriptor

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return device

    def get_current_stream(self, device: int) -> int:
        return stream

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, *args):
        return 1, next(functions), 32, 0, 1024


got: list[tuple] = []
filled: list[tuple] = []
functions = iter(range(10**6))
device, stream = -1, 7  # that of CPU tensors


def plain(arg):
    """Tensors as their addresses; hooks and what is for them as None."""
    if isinstance(arg, Tensor):
        return arg.data_ptr()
    if isinstance(arg, tuple):
        return tuple(map(plain, arg))
    return None if isinstance(arg, (triton.knobs.HookChain, LazyDict)) else arg


def launches_of(function, *args, **kwargs) -> list[tuple]:
    got.clear()
    function(*args, **kwargs)
    return list(got)


def check_what_is_launched_is_what_the_function_launches():
    """Whatever changes between two calls: address, shape, strides, dtype, offset, number, what is there at all."""
    memory = [torch.zeros(1 << 14) for _ in range(3)]
    calls = []
    for base in memory:
        square = base[:256].view(16, 16)
        others = [base[64:320].view(16, 16), square.view(torch.int32), square.bfloat16()]
        for x in (square, square.view(8, 32), base[:512].view(16, 32)[:, :16], *others):
            for out in (memory[0], memory[1], memory[2][1:], memory[2][4:]):
                calls += [(x, out, 2, None), (x, out, 3, None), (x, out, 16, memory[1]), (x, out, 2, memory[0][2:])]
    spared = 0
    for _ in range(4):
        for call in calls:
            runs.clear()
            repeated = launches_of(launch_once, *call)
            spared += not runs
            once = launches_of(launch_once_plainly, *call)
            assert repeated == once, f"{repeated} is not {once}"
    assert spared > len(calls), spared


def launch_once_plainly(*args):
    replays = next(replays for replays in replay._all if replays.function.__name__ == "launch_once")
    replays.function(*args)


def check_descriptors_are_made_once_an_address():
    x, out = torch.zeros(16, 16), torch.zeros(64)
    for _ in range(3):
        launch_once(x, out, 2)
    filled.clear()
    for _ in range(5):
        launch_once(x, out, 2)
    assert not filled
    for y in [torch.zeros(16, 16) for _ in range(5)]:
        launch_once(y, out, 2)
        launch_once(y, out, 2)
    assert len(filled) == len({args[0] for args in filled}) <= 5


def check_full_descriptors_are_made_anew():
    actions.MOST_ADDRESSES = 2
    kept = [torch.zeros(16, 16) for _ in range(5)]
    for x in kept * 4:
        assert f"descriptor of [{x.data_ptr()}, " in launches_of(launch_once, x, kept[0], 2)[0][BEFORE]


def check_a_chain_gives_what_it_gave_and_frees_what_it_freed():
    x = torch.randn(16, 16)
    for _ in range(3):
        expected = launches_of(chain, x)
    runs.clear()
    made = []
    for _ in range(3):
        repeated = launches_of(lambda: made.append(chain(x)))
        assert not runs
        assert type(made[-1]) is Made and made[-1].first.shape == x.shape and made[-1].second.shape == (16,)
        assert made[-1].nothing is None
        assert [len(launch) for launch in repeated] == [len(launch) for launch in expected]
        assert repeated[1][_at("out")] == made[-1].first.data_ptr()
        assert repeated[1][_at("pair")] == (made[-1].first.data_ptr(), made[-1].second.data_ptr())
    assert len({m.first.data_ptr() for m in made}) == 3, "what is returned is new memory"
    replays = (r for r in replay._all if isinstance(r, Replays) and r.function.__name__ == "chain")
    program = next(p for r in replays for p in r.kept.values() if p)
    source = program.source
    assert source.index("del t1") < source.rindex("stream"), "`between` is freed when its name is given to another"


def _at(name: str) -> int:
    """Where the C function gets this argument of the kernel: behind the 5 that a descriptor makes."""
    return BEFORE + 5 + {"out": 0, "pair": 2}[name]


def check_a_buffer_that_is_given_is_returned_and_counted():
    x, out = torch.randn(16, 16), torch.zeros(16, 16)
    versions = []
    for _ in range(4):
        before = out._version
        assert chain(x, out=out).first is out
        versions.append(out._version - before)
    assert versions == [1] * 4


def check_new_choices_are_made_after_forget():
    x, out = torch.zeros(16, 16), torch.zeros(64)
    for _ in range(3):
        launch_once(x, out, 2)
    forget()
    runs.clear()
    launch_once(x, out, 2)
    assert runs


def check_hooks_see_launches():
    x, out, seen = torch.zeros(16, 16), torch.zeros(64), []
    for _ in range(3):
        launch_once(x, out, 2)
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        runs.clear()
        launch_once(x, out, 2)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert runs


def check_the_stream_and_the_device_of_the_call_count():
    global stream, device
    x, out = torch.zeros(16, 16), torch.zeros(64)
    for _ in range(3):
        launch_once(x, out, 2)
    stream = 8
    assert launches_of(launch_once, x, out, 2)[0][3] == 8
    device, runs[:] = 1, []
    try:
        launch_once(x, out, 2)
        assert runs, "on another device than the current one the function decides"
    finally:
        device, stream = -1, 7


def check_modes_and_gradients_meet_the_function():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x, out = torch.zeros(16, 16), torch.zeros(16, 16)
    for _ in range(3):
        chain(x, out=out)
    runs.clear()
    with Mode():
        chain(x, out=out)
    assert runs == ["chain"] + ["launch_once"] * 2
    runs.clear()
    with pytest.raises(RuntimeError):
        chain(x.requires_grad_(), out=out).first.sum().backward()
    assert runs[0] == "chain"


def check_nothing_else_is_repeated():
    constant = torch.ones(16, 16)
    ran = []

    tapes = []
    original = tape.Tape.__init__
    tape.Tape.__init__ = lambda self, tensors: tapes.append(1) or original(self, tensors)

    def run(function, *args):
        tapes.clear()
        replays = Replays(function)
        for count in range(1, 8):
            replays(*args)
            assert len(ran) == count, function.__name__
        assert len(tapes) <= 2, f"{function.__name__} or its launcher is recorded again"
        ran.clear()

    def reads(x, out):
        ran.append(1)
        launch_once(x, out, int(x[0, 0]) + 2)

    def foreign(x, out):
        ran.append(1)
        launch_once(constant, out, 2)

    def twice(x, out):
        ran.append(1)
        launch_once(x, out, 2)

    def nothing(x, out):
        ran.append(1)

    x = torch.zeros(16, 16)
    for function in (reads, foreign, nothing):
        run(function, x, torch.zeros(64))
    run(twice, torch.zeros(16, 16).as_subclass(Own), torch.zeros(64))
    tape.Tape.__init__ = original


class Own(Tensor):
    pass


def check_a_tensor_given_twice_is_another_key():
    x, out = torch.zeros(16, 16), torch.zeros(16, 16)
    for _ in range(3):
        one, two = launches_of(chain, x, out=x), launches_of(chain, x, out=out)
    runs.clear()
    for first, second in ((x, x), (x, out), (out, x), (out, out)):
        *_, last = launches_of(chain, first, out=second)
        assert last[_at("out")] == second.data_ptr() and chain(first, out=second).first is second
    assert not runs and len(one) == len(two)


def check_random_numbers_are_drawn_anew():
    replays = Replays(lambda x: launch_once(x, x[0], 2) or torch.rand(4))
    x = torch.zeros(16, 16)
    torch.manual_seed(3)
    drawn = [replays(x) for _ in range(5)]
    torch.manual_seed(3)
    assert all(torch.equal(found, torch.rand(4)) for found in drawn)


def check_views_and_small_memory_are_addresses():
    """What stands in their place, by the launches: views of arguments, of made memory that is freed before they are,
    several at once; small memory, some of it zeroed, of which the host makes one buffer, zeros first."""
    shapes = []

    def function(x):
        runs.append("function")
        first, second = x.split(8)
        launch_once(first, second[2:], 2)
        kept = torch.empty(2**15, dtype=torch.float32).view(16, -1)
        launch_once(x, kept, 2)
        row = kept[3]
        del kept
        small = [torch.empty(5), torch.zeros(7), torch.empty(3, dtype=torch.float64), x.new_zeros(2, 2)]
        for one in small:
            launch_once(x, one, 2)
        launch_once(x, row, 2)
        return Made(row.view(torch.int32), None, second)

    replays = Replays(function)
    x = torch.randn(16, 16)
    made: list[Made] = []
    allocates = {"empty_strided": torch.empty_strided, "zeros": torch.zeros}
    for name, allocate in allocates.items():
        spy = lambda shape, *rest, n=name, a=allocate, **about: shapes.append((n, shape)) or a(shape, *rest, **about)  # noqa: E731
        setattr(torch, name, spy)
    try:
        replays(x), replays(x)
        runs.clear(), shapes.clear()
        launched = launches_of(lambda: made.append(replays(x)))
    finally:
        for name, allocate in allocates.items():
            setattr(torch, name, allocate)
    assert not runs
    assert shapes == [("zeros", (1024,)), ("empty_strided", (2**15,))]
    outs = [launch[_at("out")] for launch in launched]
    assert outs[0] == x[10:].data_ptr() and made[0].second.data_ptr() == x[8:].data_ptr()
    assert outs[-1] == made[0].first.data_ptr() == outs[1] + 3 * 2**11 * 4
    assert outs[4] - outs[2] == outs[5] - outs[3] == 256 and outs[2] - outs[3] == 512
    assert made[0].first.dtype == torch.int32


def check_a_buffer_is_freed_with_the_last_part_of_it():
    living = []

    def function(x):
        runs.append("function")
        first, second = torch.zeros(3), torch.zeros(5)
        for part in (first, second):
            launch_once(x, part, 2)
        del part, first
        tape.call_again(lambda: living.append(buffers[-1]() is not None))
        del second
        tape.call_again(lambda: living.append(buffers[-1]() is not None))
        return torch.empty(2)

    def zeros(*args, **settings):
        made = allocate(*args, **settings)
        buffers.append(ref(made))
        return made

    replays, x, buffers, allocate = Replays(function), torch.randn(16, 16), [], torch.zeros
    torch.zeros = zeros
    try:
        replays(x), replays(x)
        runs.clear(), living.clear(), buffers.clear()
        replays(x)
    finally:
        torch.zeros = allocate
    assert not runs and len(buffers) == 1 and living == [True, False]


def check_temporary_memory_is_one_block_where_it_is_allocated_and_freed_together():
    """Memory that is allocated between two frees, or behind one, would raise the peak: it stays apart. Views of what
    stays free nothing (v), and small memory (s, t) is allocated first, and freed with the last of it."""
    bytes_of = {"a": 2**17, "b": 2**18, "c": 2**17, "d": 2**17, "e": 2**25, "s": 2**10, "t": 2**10}
    shapes, outs = [], []

    def function(x, order):
        runs.append("function")
        living = {}
        for name in order.split():
            if name.startswith("-"):
                del living[name[1:]]
            elif name == "v":
                living[name] = x.view(-1)
            else:
                living[name] = torch.empty(bytes_of[name], dtype=torch.uint8)
                launch_once(x, living[name].view(torch.float32), 2)
        return torch.empty(2)

    def sizes(order: str) -> list[int]:
        replays = Replays(function)
        replays(x, order), replays(x, order)
        runs.clear(), shapes.clear()
        outs[:] = [launch[_at("out")] for launch in launches_of(replays, x, order)]
        assert not runs and len(outs) == len([name for name in order.split() if name[0] not in "-v"])
        return [shape[0] for shape in shapes[:-1]]

    x, allocate = torch.randn(16, 16), torch.empty_strided
    torch.empty_strided = lambda shape, *rest, **about: shapes.append(shape) or allocate(shape, *rest, **about)
    try:
        assert sizes("a b -a -b") == sizes("a b -b -a") == [2**17 + 2**18]
        assert outs[1] - outs[0] == 2**17
        assert sizes("a b c -b -a -c d -d") == [2**18 + 2**18, 2**17]
        assert sizes("a c b -b d -a -c -d") == [2**17 + 2**17, 2**18, 2**17]  # d comes while a and c live on
        assert sizes("a b -a c -b -c") == [2**17, 2**18, 2**17]
        assert sizes("a d -a b -b -d") == [2**17, 2**17, 2**18]
        assert sizes("a e -a -e") == [2**17, 2**25]  # too large
        assert sizes("a v -v b -a -b") == [2**17 + 2**18]
        assert sizes("a s t -s b -a -b -t") == sizes("a b -a s t -b -s -t") == [2**11, 2**17 + 2**18]
        assert sizes("a s t -s -t b -a -b") == [2**11, 2**17, 2**18]
    finally:
        torch.empty_strided = allocate


def check_memory_is_filled_where_torch_fills_it():
    """Under deterministic algorithms new memory is NaN, also where these are chosen after the recording."""

    def function(x):
        runs.append("function")
        out = torch.empty(4)
        launch_once(x, out, 2)
        return out

    replays = Replays(function)
    x = torch.randn(16, 16)
    replays(x), replays(x)
    runs.clear()
    torch.use_deterministic_algorithms(True)
    try:
        assert replays(x).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not runs


def check_containers_are_built_again():
    def function(x):
        runs.append("function")
        grouped = GroupedTensor(torch.empty_like(x), splits, None, None, x.dtype)
        launch_once(x, grouped.data, 2)
        return ("kept", grouped, [1, 2])

    splits = Splits({}, 16, 1, None)
    replays = Replays(function)
    x = torch.randn(16, 16)
    replays(x), replays(x)
    runs.clear()
    made = []
    (launch,) = launches_of(lambda: made.append(replays(x)))
    assert not runs
    name, grouped, numbers = made[0]
    assert (name, numbers) == ("kept", [1, 2]) and type(grouped) is GroupedTensor and grouped.shape == x.shape
    assert grouped.data.data_ptr() == launch[_at("out")] and grouped.splits.rows == 16


def check_an_error_is_raised_again():
    def fails(x):
        launch_once(x, x[0], 2)
        raise ValueError("no")

    replays = Replays(fails)
    for _ in range(4):
        with pytest.raises(ValueError, match="no"):
            replays(torch.zeros(16, 16))
    assert tape.taping.tape is None


def check_keys_are_bounded():
    replay.MOST_KEYS = 8
    replays = Replays(lambda x, n: launch_once(x, x[0], n))
    for n in range(100):
        replays(torch.zeros(16, 16), n)
        assert len(replays.kept) <= 8


def check_ends_of_steps_are_repeated_together():
    """By addresses, alignment, shapes, formats and algorithms; a function in place of one is called each time."""
    memory = torch.zeros(1 << 12)

    def end(at: int, largest: float = 448.0, algorithm="max", n: int = 4) -> EndOfStep:
        return EndOfStep(memory[at : at + 3 * n].view(3, n), memory[at + 64 : at + 64 + n], largest, algorithm)

    called: list[Tensor] = []

    def amax(history: Tensor) -> Tensor:
        called.append(history)
        return history.amax(0)

    steps = [[end(at), end(at + 256), end(at + 512, 57344.0)] for at in (0, 1024, 2049, 4)]
    steps += [[end(0, algorithm="most_recent"), end(256)], [end(0, n=5)], [end(at) for at in range(0, 2560, 128)]]
    steps += [[end(0), end(256, algorithm=amax)]]
    plain = [[end for end in ends if end.amax_algorithm is not amax] for ends in steps]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "is_cuda", True)
        patch.setattr(torch.cuda, "current_device", lambda: device)
        in_full = [launches_of(amax_history._end_on_gpu, ends) for ends in plain]
        for time in range(1, 5):
            assert [launches_of(end_steps, ends) for ends in steps] == in_full
            assert len(called) == time
        version = memory._version
        patch.setattr(amax_history, "end_step_triton", None)
        assert launches_of(end_steps, steps[0]) == in_full[0]
        assert memory._version == version + 2 * len(steps[0])  # one for each state's history and scale


def check_threads_launch_their_own_addresses():
    wrong = []
    xs = [[torch.zeros(16, 16) for _ in range(20)] for _ in range(4)]
    out = torch.zeros(64)
    actions.MOST_ADDRESSES = 3
    descriptors = next(r for r in replay._all if r.function.__name__ == "launch_once")
    for _ in range(3):
        launch_once(xs[0][0], out, 2)
    program = next(program for program in descriptors.kept.values() if program)
    mine = next(c for c in program.again.__globals__.values() if isinstance(c, actions._Descriptors))

    def work(own):
        for _ in range(300):
            for x in own:
                if f"[{x.data_ptr()}, " not in mine[x.data_ptr()]:
                    wrong.append(x)

    threads = [threading.Thread(target=work, args=(own,)) for own in xs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


CHECKS = [name for name in list(globals()) if name.startswith("check_")]


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    # What is built in C: the launcher of a kernel in Triton 3.6, what describes an argument since 3.7.
    # It is no function of Python: by that Triton's own is told from one that wraps it.
    nvidia.compile_module_from_src = lambda **source: SimpleNamespace(launch=partial(launch))
    nvidia.library_dirs = list
    nvidia.PyKernelArg = dict
    found = {}
    bounds = replay.MOST_KEYS, actions.MOST_ADDRESSES
    for name in CHECKS:
        forget()
        runs.clear()
        replay.MOST_KEYS, actions.MOST_ADDRESSES = bounds
        try:
            globals()[name]()
        except BaseException:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    if why_not_repeated():
        pytest.skip(why_not_repeated())
    environment = compiling(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.triton
@pytest.mark.parametrize("name", CHECKS)
def test_repeated(name, failures):
    assert name not in failures, failures[name]


# ------------------------------------------------------------------------------------------------- on a GPU


def expert_block() -> tuple[Sequential, Sequential]:
    """The fused block, and the same operations one by one."""
    options = {"bias": False, "dtype": torch.bfloat16, "device": "cuda"}
    members = ops.GroupedLinear(4, 64, 128, **options), ops.ScaledSwiGLU(), ops.GroupedLinear(4, 64, 64, **options)
    return Sequential(*members), Sequential(*members, fusions=())


def step(block: Sequential, x: Tensor, scales: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y and all gradients."""
    sizes = torch.full((4,), len(x) // 4, device="cuda")
    x, scales = x.clone().requires_grad_(), scales.clone().requires_grad_()
    y = block(x, split_sizes=sizes, scales=scales)
    gradients = torch.autograd.grad(y, [x, scales, *block.parameters()], dy)
    return dict(zip(("y", "dx", "dscales", "dw1", "dw2"), (y, *gradients), strict=True))


def inputs(rows: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = torch.randn(2, rows, 64, device="cuda", dtype=torch.bfloat16)
    return x, torch.rand(rows, device="cuda"), dy


@pytest.mark.gpu
def test_repeated_steps_give_the_bits_of_unfused_ones():
    fused, unfused = expert_block()
    kept = []  # so that addresses change
    for rows in (256, 256, 256, 128, 256, 128, 128, 256):
        given = inputs(rows)
        kept.append((given, step(fused, *given)))
        assert_same_bits(kept[-1][1], step(unfused, *given))
    for given, results in kept:
        assert_same_bits(results, step(unfused, *given))


@pytest.mark.gpu
def test_weights_that_move_or_change_are_read_anew():
    fused, unfused = expert_block()
    for round in range(6):
        with torch.no_grad():
            for parameter in fused.parameters():
                if round % 2:
                    parameter.mul_(1.5)
                else:
                    parameter.data = parameter.data.clone() + 0.25
        given = inputs()
        assert_same_bits(step(fused, *given), step(unfused, *given))


@pytest.mark.gpu
def test_repeated_step_needs_no_more_memory():
    fused, _ = expert_block()
    given = inputs(4096)

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(fused, *given)
        return torch.cuda.max_memory_allocated() - before

    for _ in range(3):
        peak()
    repeated = [peak() for _ in range(3)]
    plain = []
    for _ in range(3):
        forget()
        plain.append(peak())
    # The counters of backward's four products, 256 bytes each, are one block, which lives until the last one has run.
    assert max(repeated) <= max(plain) + 4 * 256


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_repeated_step_runs_on_the_current_stream():
    fused, unfused = expert_block()
    given = inputs()
    for _ in range(3):
        expected = step(unfused, *given)
        step(fused, *given)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        x = given[0].clone()  # behind the sleep, as must be what reads it
        results = step(fused, x, *given[1:])
    torch.cuda.synchronize()
    assert_same_bits(results, expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_repeated_step_is_captured():
    fused, unfused = expert_block()
    x, scales, dy = inputs()
    for _ in range(3):
        step(fused, x, scales, dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(fused, x, scales, dy)  # whose graph outlives the capture
    for _ in range(3):
        for old, new in zip((x, scales, dy), inputs(), strict=True):
            old.copy_(new)
        graph.replay()
        assert_same_bits(results, step(unfused, x, scales, dy))


@pytest.mark.gpu
def test_hooks_of_profilers_see_every_launch():
    fused, _ = expert_block()
    given, seen = inputs(), []
    for _ in range(3):
        step(fused, *given)
    see = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(see)
    try:
        step(fused, *given)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(see)
    assert len(seen) == 9


if __name__ == "__main__":
    main()
