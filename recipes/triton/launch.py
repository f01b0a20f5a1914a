"""How kernels are launched: as operations of torch where torch has to see them, and with little host launch overhead.

Every kernel of the project is launched by a `Launch`. What is cached:

    by `Launch`     compiled kernels, by the key that Triton compiles for. Never dropped; Triton keeps them too.
    by `replayed`   what a function of launches did, by the layout of its arguments, and its TMA descriptors, by
    and `launcher`  address: `recipes.triton.replay`. Bounded, and dropped when a table of tiles is loaded.

`launcher` saves torch's dispatch to the Python function of a custom operation, `Launch` Triton's look-up of compiled
kernels, and repeated hosts of products and activations most of the rest (`bench/results/tuning.md`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from recipes.tensors.abstract import is_abstract
from recipes.triton.gates import JITFunction, warn_of_release, why_no_gluon
from recipes.triton.repeated import DESCRIPTORS, Zeroes
from recipes.triton.replay import Replays, is_eager
from recipes.triton.tape import taping

P = ParamSpec("P")
R = TypeVar("R")

# Types of arguments that are what they seem: no subclass of Tensor, no number that is traced.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


def launcher(name: str, *, mutates: Sequence[str]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Make a function that launches kernels the operation `name` of torch. It writes into the arguments `mutates`,
    which have no defaults: torch 2.11 does not count the versions of those left out.

    Every buffer that it writes is an argument, so its fake does nothing. Calls that are traced or redirected
    (torch.compile, fake tensors, modes, transforms) or that need gradients go to the operation, `torch.ops.<name>`; a
    plain eager call runs the function itself and increments the versions of what it writes, as the operation does.
    Sequences of tensors are given as tuples.
    """

    def register(launch: Callable[P, None]) -> Callable[P, None]:
        operation = torch.library.custom_op(name, launch, mutates_args=mutates)
        operation.register_fake(lambda *args, **kwargs: None)
        replays = Replays(launch)
        names = list(inspect.signature(launch).parameters)
        written = [(names.index(name), name) for name in mutates]

        @wraps(launch)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            if not _is_plain((*args, *kwargs.values()) if kwargs else args):
                operation(*args, **kwargs)
                return
            replays(*args, **kwargs)
            given = _items([args[i] if i < len(args) else kwargs.get(name) for i, name in written])
            buffers = [buffer for buffer in given if isinstance(buffer, Tensor)]
            torch.autograd.graph.increment_version(buffers)
            if taping.tape is not None:
                taping.tape.written(buffers)

        return call

    return register


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of tensors that allocates and launches repeat what it did: see `recipes.triton.replay`.

    What it does follows from how its arguments lie; it changes nothing but tensors, and reads none.
    """
    replays = Replays(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        return replays(*args, **kwargs)

    return call


def _items(args: Sequence[Any]) -> Sequence[Any]:
    """The arguments, and in place of tuples what they hold."""
    if tuple not in map(type, args):
        return args
    return [item for arg in args for item in (arg if type(arg) is tuple else (arg,))]


def _is_plain(args: Sequence[Any]) -> bool:
    """Whether this is a plain eager call: nothing traces or redirects it, and none of its tensors needs a gradient."""
    args = _items(args)
    if not is_eager() or not _PLAIN.issuperset(map(type, args)):
        return False
    return not (torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args))


class Launch:
    """Launches one kernel, what it has compiled found by a key of its own.

        launch(x, programs, *args, **constants)         kernel[programs](*args, **constants) on x's GPU

    programs: how many, or how many along each of up to three axes. args: tensors, `DESCRIPTORS`, numbers, None, and
    tuples of these; all arguments of the kernel that are not `tl.constexpr`. constants: those that are, and Triton's
    options (num_warps, num_stages, ...). In eager mode products are fused with the sums that they are added to unless
    enable_fp_fusion=False says otherwise: Triton 3.9 warns where no option does, and from 3.10 on does not fuse.

    As in a key of Triton's, a tensor counts with its dtype and whether it starts at a multiple of 16 bytes, an int with
    whether it is 1 or a multiple of 16, and its width, and of a float only that it is one. Triton's hooks at a launch
    run; what its knobs say about compiling (debug, instrumentation) is read when a key is met for the first time.
    Returns what Triton has compiled, and launched; None over an x without numbers (`is_abstract`), where nothing is.

    zeroes: of a kernel that may make memory 0 besides what it does, see `Zeroes`
    """

    def __init__(self, kernel: Any, zeroes: Zeroes | None = None) -> None:
        self.kernel = kernel
        self.zeroes = zeroes
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, x: Tensor, programs: int | tuple[int, ...], *args: Any, **constants: Any) -> Any:
        if is_abstract(x):
            return None
        grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1, 1)[:3]
        if torch.compiler.is_dynamo_compiling():
            self.kernel[grid](*args, **constants)
            return None
        if not isinstance(self.kernel, JITFunction):  # interpreted
            self._check(args)
            self.kernel[grid](*args, **constants)
            return None
        device = x.get_device()
        if x.is_cuda and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(x, programs, *args, **constants)
        key = (device, *map(_kind, args), *constants, *constants.values())
        found = self._compiled.get(key)
        if found is not None:
            compiled, last = found
            compiled[grid](*args, *last)
        else:
            warn_of_release()
            self._check(args)
            compiled = self.kernel[grid](*args, **{"enable_fp_fusion": True, **constants})
            if compiled is None:
                return None
            last = tuple(constants.get(p.name, p.default) for p in self.kernel.params[len(args) :])
            self._compiled[key] = compiled, last
        if taping.tape is not None:
            taping.tape.launched(compiled, device, grid, (*args, *last), self.zeroes)
        return compiled

    def _check(self, args: tuple[Any, ...]) -> None:
        """Raise TypeError for a `tl.constexpr` among the positional arguments: by the key its value would not count."""
        for name in self.kernel.arg_names[: len(args)]:
            if "constexpr" in str(self.kernel.fn.__annotations__.get(name)):
                raise TypeError(f"{name} is a constexpr of {self.kernel.fn.__name__}. Pass it by its name.")


def _kind(arg: Any) -> Any:
    """What Triton compiles for of an argument."""
    if arg is None:
        return None
    kind = type(arg)
    if kind is int:
        if -(2**31) <= arg < 2**31:
            return 1 if arg == 1 else 2 if arg % 16 else 16
        return 64, arg % 16 == 0, arg >= 2**63
    if kind is float:
        return float
    if kind in DESCRIPTORS:
        return arg.base.dtype, *arg.block_shape
    if isinstance(arg, Tensor):
        return arg.dtype if arg.data_ptr() % 16 == 0 else (arg.dtype,)
    if isinstance(arg, tuple):
        return kind, *map(_kind, arg)
    raise TypeError(f"a kernel got a {kind.__name__}. Pass tensors, descriptors, numbers or tuples of them.")


def runs_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon run there; where torch finds no GPU, to explain plans, on one of Hopper."""
    if device.type != "cuda":
        return False
    return why_no_gluon(torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)) is None


def has_work(x: Tensor) -> bool:
    """Whether kernels over x are to be launched: it has elements, and numbers in them."""
    return not is_abstract(x) and x.numel() > 0


@cache
def properties(device: int) -> Any:
    """Of the GPU with this index: what torch says of it."""
    return torch.cuda.get_device_properties(device)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own, which kernels use too, takes 3 us on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()
