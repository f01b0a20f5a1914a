"""What steps launch in full, and repeated: a program that pretends to have a Hopper GPU, for tests without one.

CPU tensors pass for those of a GPU; kernels are compiled for sm_90a, and what they would be launched with is kept in
place of the launch. For each case of the recipe that it is given it prints, as JSON: how many launches a step has,
whether the repeated step launches the same kernels with the same arguments (addresses and TMA descriptors apart), how
many steps are repeated, how many calls and backwards are made again by one look-up, and how many launches of the
repeated step make memory 0 as well.
"""

import itertools
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia

import ops.runner.backward
import ops.runner.run
from fuser import Sequential, autocast, constant_weights, lora
from recipes.triton import repeated, replay
from recipes.triton.offsets import clamped_offsets_launch
from recipes.triton.zeros import zeros_launch
from tests.test_replay import BEFORE, Driver

RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_block", "fp8_rowwise", "mxfp8", "nvfp4")
KINDS = ("fused", "unfused", "main_grad", "norm", "dispatch", "router", "adapters", "adapters unfused")
EXPERTS, HIDDEN, WIDTH, ROWS = 4, 128, 128, 256

launched: list[tuple[Any, ...]] = []
zeroed: list[int] = []  # words that launches make 0 besides what they do


class Launch:
    """In place of Triton's C function. No function of Python: by that Triton's own is told from one that is wrapped."""

    def __call__(self, *args: Any) -> None:
        launched.append(args)


class HopperDriver(Driver):
    launch = Launch()

    def get_current_device(self) -> int:
        return 0


def pretend() -> None:
    """Let torch and Triton take CPU tensors for those of a Hopper GPU."""
    triton.runtime.driver.set_active(HopperDriver())
    nvidia.compile_module_from_src = lambda **source: SimpleNamespace(launch=Launch())
    nvidia.library_dirs, nvidia.PyKernelArg = list, dict
    gpu = torch.device("cuda", 0)
    Tensor.device = property(lambda self: gpu)
    Tensor.is_cuda = property(lambda self: True)
    Tensor.get_device = lambda self: 0
    for name in ("empty", "zeros", "ones", "full", "arange", "tensor", "randint"):
        make = getattr(torch, name)
        setattr(torch, name, lambda *args, make=make, device=None, **options: make(*args, **options))
    empty = torch.empty  # what kernels would have written stands as an index elsewhere
    torch.empty = lambda *args, dtype=None, **options: empty(*args, dtype=dtype, **options).fill_(0)
    torch.mm = lambda a, b, out_dtype=None: torch.matmul(a.to(out_dtype), b.to(out_dtype))
    new_empty = Tensor.new_empty
    Tensor.new_empty = lambda *args, **options: new_empty(*args, **options).fill_(0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    about = {"multi_processor_count": 132, "major": 9, "minor": 0, "shared_memory_per_block_optin": 227 << 10}
    torch.cuda.get_device_properties = lambda *device: SimpleNamespace(
        **about, L2_cache_size=50 << 20, total_memory=141 * 10**9, name="pretended"
    )
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.is_autocast_enabled = lambda *device: False


def plain(arg: Any) -> Any:
    """An argument of a launch without addresses."""
    if isinstance(arg, tuple | list):
        return tuple(map(plain, arg))
    if arg is None or isinstance(arg, bool | float):
        return arg
    if isinstance(arg, int):
        return arg if abs(arg) < 2**31 else "address"
    return "address" if isinstance(arg, Tensor) else "descriptor"


def in_full(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a launch as they are in full: without the memory that it makes 0 in a repetition."""
    offsets = clamped_offsets_launch
    if args[4] not in [compiled.function for compiled, _ in offsets._compiled.values()]:
        return args
    assert offsets.zeroes is not None
    if len(args) == BEFORE + 1:  # since Triton 3.7 those of the kernel are a tuple
        args = *args[:BEFORE], *args[BEFORE]
    plainly = [1, *args[1:]]
    for _, words in offsets.zeroes.pairs:
        at = BEFORE + words
        assert args[0] >= 1 + -(-args[at] // offsets.zeroes.of_program)
        zeroed.extend([args[at]] if args[at] else [])
        plainly[at] = 0
    return tuple(plainly)


def short_ways(model: Sequential) -> tuple[int, int]:
    """How many calls, and how many backwards, are known well enough to be made again by one look-up."""
    pipeline = model.layout().pipeline
    calls = [] if pipeline is None else [*pipeline.known.values()]
    calls += [of_copies for call in calls for of_copies in call.of_copies.values()]
    known = [call.backward for call in calls if call.repeated is not None]
    return len(known), sum(len(backward.kept) for backward in known)


def main() -> None:
    pretend()
    repeated._empty_on_gpu = torch._C._dynamo.guards._empty_strided_cpu
    may_repeat = ops.runner.run.may_repeat

    def make(kind: str) -> Sequential:
        torch.manual_seed(0)
        about = {"dtype": torch.bfloat16, "accumulate_into_main_grad": kind == "main_grad"}
        mlp = (
            ops.GroupedLinear(EXPERTS, HIDDEN, 2 * WIDTH, **about),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(EXPERTS, WIDTH, HIDDEN, **about),
        )
        norm = (ops.RMSNorm(HIDDEN, dtype=torch.bfloat16),) if kind == "norm" else ()
        if kind in ("dispatch", "router"):
            mlp = (ops.Dispatch(EXPERTS), *mlp, ops.Combine())
        if kind == "router":
            mlp = (ops.Router(HIDDEN, EXPERTS, 2, dtype=torch.bfloat16), *mlp)
        model = Sequential(*norm, *mlp, fusions=() if kind.endswith("unfused") else None)
        if kind.startswith("adapters"):
            lora.add(model, rank=16, alpha=32)
        for weight in model.parameters():
            weight.main_grad = torch.zeros(weight.shape)
        return model

    def step(model: Sequential, recipe: str) -> list[Any]:
        x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
        launched.clear(), zeroed.clear()
        with autocast(recipe=None if recipe == "bf16" else recipe):
            given = {"split_sizes": torch.tensor([ROWS // EXPERTS] * EXPERTS), "scales": torch.rand(ROWS)}
            if kind == "router":
                given = {}
            elif "indices" in model.layout().consumed:
                given = {"indices": torch.randint(0, EXPERTS, (ROWS, 2)), "probs": torch.rand(ROWS, 2)}
            y = model(x, **{name: t.requires_grad_() if t.is_floating_point() else t for name, t in given.items()})
        y.backward(torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16))
        zeros = zeros_launch(torch.device("cuda", 0), 16)
        own = zeros.compiled.function  # in place of torch.zeros
        return [plain((*args[:3], *args[4:5], *args[BEFORE:])) for args in map(in_full, launched) if args[4] != own]

    recipe, found = sys.argv[1], {}
    for kind, once in itertools.product(KINDS, (False, True)):
        launches = {}
        for repeats in (False, True):
            replay.forget()
            for module in (ops.runner.run, ops.runner.backward):
                module.may_repeat = may_repeat if repeats else lambda device, entries: False
            model = make(kind)
            scope = constant_weights(model)
            if once:
                scope.__enter__()
            for _ in range(6):
                launches[repeats] = step(model, recipe)
            scope.end()
        steps = [kept for kept in replay._all if not isinstance(kept, replay.Replays)]
        count = sum(type(kept) is repeated.Repeated for step in steps for kept in step.kept.values())
        case = f"{kind}{', weights once' if once else ''}"
        found[case] = len(launches[True]), launches[True] == launches[False], count, *short_ways(model), len(zeroed)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
