"""What Gluon names differently in the releases of Triton that are supported.

    tma_load, tma_store   a box to shared memory, and from there: `tma.async_copy_global_to_shared` and
                          `async_copy_shared_to_global` up to 3.7, `async_load` and `async_store` since 3.8
    async_load            by pointers (cp.async): `async_copy.async_copy_global_to_shared`, `async_load`
    reinterpret           shared memory as another dtype and shape: the method `_reinterpret` up to 3.8
    barrier               of a program's threads: `thread_barrier` up to 3.6

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    return _reinterpret(memory, dtype, shape, layout, _semantic=_semantic)
