"""Whether the kernels in Gluon (modules named `*_gluon`) can be used. Their modules are imported only if so."""

from functools import lru_cache
from importlib.util import find_spec

import triton

from recipes.triton.rounding import INTERPRET


@lru_cache
def why_no_gluon(capability: tuple[int, int]) -> str | None:
    """None if they can be, on a GPU of this compute capability; else the reason why not."""
    if capability != (9, 0):
        return f"They are for compute capability 9.0 (Hopper), and this is {capability[0]}.{capability[1]}."
    if not triton.__version__.startswith("3.6.") or find_spec("triton.experimental.gluon") is None:
        return f"They are written in the Gluon of Triton 3.6, and this is Triton {triton.__version__}."
    if INTERPRET:
        return "Triton interprets, and its interpreter knows no Gluon."
    return None
