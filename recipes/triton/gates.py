"""Triton, or stand-ins where it is not installed, and which of its internals are supported.

    from recipes.triton.gates import tl, triton     in place of    import triton, import triton.language as tl

Without Triton all modules can be imported, CPU tensors are computed, and a launch raises RuntimeError with
`WHY_NO_TRITON`. Releases of Triton differ in their internals: Gluon, and the launcher through which
`recipes.triton.replay` repeats launches. Modules of kernels in Gluon, named `*_gluon`, are imported only if they can be
used.
"""

import warnings
from functools import cache

from recipes.triton.missing import WHY_NO_TRITON, MissingDescriptor, MissingKernel, MissingLanguage, MissingTriton

try:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia
    from triton.language.target_info import cuda_capability_geq
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    triton, tl, JITFunction, TensorDescriptor = MissingTriton(), MissingLanguage(), MissingKernel, MissingDescriptor
    cuda_capability_geq = knobs = nvidia = driver = None  # of kernels and launches, which there are none of

__all__ = [
    "INTERPRET", "JITFunction", "TensorDescriptor", "cuda_capability_geq", "driver", "knobs", "nvidia", "tl", "triton",
    "warn_of_release", "why_no_gluon", "why_not_repeated", "why_not_this_release",
]  # fmt: skip

# Triton reads TRITON_INTERPRET when a kernel is defined; this is its own answer, so the two cannot disagree.
INTERPRET = tl.constexpr(knobs.runtime.interpret if knobs else False)

# Whose Gluon and launcher are known.
_RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")


def why_not_repeated() -> str | None:
    """None if launches with this release of Triton are repeated; else why not."""
    if triton.__version__ is None:
        return WHY_NO_TRITON
    if not triton.__version__.startswith(_RELEASES):
        return (
            "Launches are not repeated, which takes the host longer: that is written for Triton 3.6 to 3.9, and "
            f"this is Triton {triton.__version__}."
        )
    return None


def why_not_this_release() -> str | None:
    """None if the internals of this release of Triton are supported; else what is left out, and why."""
    reason = why_not_repeated()
    if reason is None or triton.__version__ is None:
        return reason
    return f"Kernels in Gluon are not used, which takes the GPU longer. {_why_no_gluon_of_this_release()} {reason}"


def _why_no_gluon_of_this_release() -> str:
    return f"They are written in the Gluon of Triton 3.6 to 3.9, and this is Triton {triton.__version__}."


@cache
def warn_of_release() -> None:
    """Warn of a release of Triton whose internals are not supported, once in a process."""
    reason = why_not_this_release()
    if reason:
        warnings.warn(reason, RuntimeWarning, stacklevel=2)


@cache
def why_no_gluon(capability: tuple[int, int]) -> str | None:
    """None if kernels in Gluon can be used on a GPU of this compute capability; else the reason why not."""
    if capability != (9, 0):
        return f"They are for compute capability 9.0 (Hopper), and this is {capability[0]}.{capability[1]}."
    if triton.__version__ is None:
        return WHY_NO_TRITON
    if not triton.__version__.startswith(_RELEASES):
        return _why_no_gluon_of_this_release()
    if INTERPRET:
        return "Triton interprets, and its interpreter knows no Gluon."
    return None
