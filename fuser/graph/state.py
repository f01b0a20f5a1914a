"""The state that warm-up and capture must not change."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ops.products.main_grad import OperationWithWeights
from ops.runner.operation import BasicOperation


@contextmanager
def undisturbed(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore random generators, buffers, gradients and weights' flags on exit.

    Python's garbage collector is disabled inside: it might destroy another graph during a capture.

    main_grad is not restored, because `SideEffects` redirects writes into it. New buffers (states of quantizers) are
    kept, since graphs hold their addresses; after an exception they are removed.
    """
    inside = list(dict.fromkeys(module for outer in modules for module in outer.modules()))
    parameters = list(dict.fromkeys(p for module in inside for p in module._parameters.values() if p is not None))
    with ExitStack() as at_end:
        at_end.enter_context(_no_garbage_collection())
        at_end.enter_context(_random_numbers(device))
        at_end.enter_context(_buffers(inside))
        at_end.enter_context(_gradients(parameters))
        at_end.enter_context(_kept_by_operations(inside))
        yield


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _random_numbers(device: torch.device) -> Iterator[None]:
    on_host = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


@contextmanager
def _buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    before = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in before]
    try:
        yield
    except BaseException:
        known = {(id(module), name) for module, name, _ in before}
        for module in modules:
            for name in [name for name in module._buffers if (id(module), name) not in known]:
                del module._buffers[name]
        raise
    finally:
        with torch.no_grad():
            for (_, _, buffer), value in zip(before, values, strict=True):
                if buffer is not None and value is not None:
                    buffer.copy_(value)


@contextmanager
def _gradients(parameters: Sequence[Any]) -> Iterator[None]:
    grads = [parameter.grad for parameter in parameters]
    flags = [(p, p.grad_added_to_main_grad) for p in parameters if hasattr(p, "grad_added_to_main_grad")]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.grad_added_to_main_grad = flag
        for parameter, grad in zip(parameters, grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad


@contextmanager
def _kept_by_operations(modules: Sequence[nn.Module]) -> Iterator[None]:
    operations = [module for module in modules if isinstance(module, BasicOperation)]
    kept = [(operation, operation._captured_weights) for operation in operations]
    try:
        yield
    except BaseException:
        for operation, captured in kept:
            operation._captured_weights = captured
            if isinstance(operation, OperationWithWeights):
                operation.exchange_delayed(deque())
        raise
    finally:
        for operation in operations:
            operation.forget_quantized_weights()  # the amaxes that their warm-up recorded have been reverted


def begin_step(modules: Sequence[nn.Module]) -> None:
    """Reset the weights' flags to their values at the start of a step: no gradient is in main_grad."""
    for module in modules:
        for weight in module.parameters():
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = False
