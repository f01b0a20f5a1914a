"""A function that torch.compile does not trace: what `torch.compiler.disable` does, without its import.

That decorator imports torch's compiler, which takes seconds, as soon as a function is decorated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Function = TypeVar("Function", bound=Callable[..., Any])


def not_traced(reason: str) -> Callable[[Function], Function]:
    """Decorate a function so that torch.compile breaks its graph at a call, and traces nothing that it calls. With
    `fullgraph=True` it raises its own error, with the reason in it."""

    def mark(function: Any) -> Any:
        # A frame that runs this code is skipped, and all frames that it calls.
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
        # The tracer inlines no function with these marks into its caller.
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = reason
        return function

    return mark
