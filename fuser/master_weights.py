"""MasterWeights: float32 copies of quantized parameters, which an optimizer of torch steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from ops.runner.not_traced import not_traced
from recipes.tensors.quantized_handle import copied, held_tensors
from recipes.tensors.quantized_parameter import QuantizedParameter
from recipes.tensors.quantized_shard import QuantizedShard, local_shard, with_local

_NOT_COPIED = (
    "MasterWeights belong to the parameters that they were made of, so they are neither copied nor pickled. Copy the "
    "model, or save its state_dict and the optimizer's, and make MasterWeights and the optimizer anew."
)


class MasterWeights:
    """Float32 masters of the quantized parameters of a model, for an optimizer that knows nothing of them.

        masters = fuser.MasterWeights(model.parameters())
        optimizer = masters.attach(torch.optim.AdamW(masters.parameters(), lr=1e-3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    A master and its parameter have one gradient: `.grad` of the parameter, which `.grad` of the master reads and sets.
    So it may be unscaled, clipped and cleared over the optimizer's groups or over `model.parameters()`, and be computed
    in a closure. backward gives it the parameter's dtype. When it is first read from the master (by `step()`,
    `scaler.unscale_(optimizer)` or clipping over the groups) it is replaced by a float32 tensor, to which later
    backwards add. Where the parameter has a `main_grad`, which must be float32, the master's gradient is a view of
    that, and `.grad` of the parameter is not used; `zero_grad()` clears main_grad with `set_to_none=False` alone.

    DistributedDataParallel refuses to add to a `.grad` of another dtype than the parameter's: leave `set_to_none` of
    `zero_grad()` at True.

    After each step the parameter is quantized from its master: to nearest, once, from float32. Masters begin with the
    values before quantization, if the parameter has kept them (`preserve_high_precision_init_val=True`; they are
    cleared), else with the dequantized ones. `read()` takes these later, after a load into the model: without, a step
    is refused where torch has counted a change of the parameter that is not the master's (but for shards, delayed
    scaling and replays of a CUDA graph, where the step undoes the load). A step is refused, too, where the operation
    has another parameter in its place (but for shards), after `model.bfloat16()` for example. Copied or pickled, a
    master is an ordinary parameter.

    Of parameters that FSDP2 shards the masters are sharded alike: make them after `fully_shard`, on all ranks. Each
    rank steps and quantizes its own rows; where one scale is of all ranks' rows, `step()` is a collective.

    parameters: of a model; those that are not quantized, or frozen, go to the optimizer as they are. A quantized one
        that requires grad later needs masters that are made anew: `step()` refuses it.

    Raises ValueError if none is quantized and requires grad.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        given = list(parameters)
        self._masters: dict[int, nn.Parameter] = {}
        self._without_master: list[Tensor] = []  # quantized, but frozen
        self._versions: dict[int, int] = {}  # of the parameters, when they were last quantized or read
        for parameter in given:
            held = parameter if isinstance(parameter, QuantizedParameter) else local_shard(parameter)
            if held is not None and parameter.requires_grad:
                self._masters[id(parameter)] = _master(parameter, held)
            elif held is not None:
                self._without_master.append(parameter)
        if not self._masters:
            raise ValueError(
                "MasterWeights got no quantized parameter that requires grad. Use to_quantized(model) before."
            )
        self._given = given
        self._note_versions(self._pairs())

    def parameters(self) -> list[Tensor]:
        """What the optimizer steps: a master in place of each quantized parameter."""
        return [self._masters.get(id(parameter), parameter) for parameter in self._given]

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let `step()` of this optimizer quantize the parameters of the masters that it steps; returns it. Several
        optimizers may divide the masters.

        Raises ValueError, as `step()` does for groups that were added later, if it steps no master, a parameter that
        has one, or a quantized one that was frozen and is not any more.
        """
        self._stepped(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        return optimizer

    def quantize(self) -> None:
        """Quantize each parameter from its master."""
        self._quantize(self._pairs())

    @torch.no_grad()
    def read(self) -> None:
        """Give each master the dequantized values of its parameter: after a load into the model, which the next step
        would otherwise overwrite from the masters."""
        for parameter, master in self._pairs():
            master.copy_(parameter)
        self._note_versions(self._pairs())

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeights:
        raise TypeError(_NOT_COPIED)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(_NOT_COPIED)

    def _pairs(self) -> list[tuple[Any, nn.Parameter]]:
        return [
            (parameter, self._masters[id(parameter)]) for parameter in self._given if id(parameter) in self._masters
        ]

    def _stepped(self, optimizer: torch.optim.Optimizer) -> list[tuple[Any, nn.Parameter]]:
        """Those pairs whose masters this optimizer steps."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        pairs = [pair for pair in self._pairs() if id(pair[1]) in stepped]
        unfrozen = sum(p.requires_grad and id(p) in stepped for p in self._without_master)
        if unfrozen:
            raise ValueError(
                f"{unfrozen} quantized parameters were frozen when MasterWeights was made, and require grad now, so "
                "they would be stepped on their codes. Freeze them, or make MasterWeights and the optimizer anew."
            )
        wrong = len(stepped & self._masters.keys())
        if wrong or not pairs:
            name = type(optimizer).__name__
            found = f"{wrong} quantized parameters in place of their masters" if wrong else "no master"
            raise ValueError(
                f"{name} steps {found}. Make it of masters.parameters(), which has a master for each quantized "
                "parameter and the others as they are, in the order given: zip them with model.named_parameters() for "
                "groups by name."
            )
        return pairs

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        pairs, calls = self._stepped(optimizer), count()
        self._check_unchanged(pairs)

        def evaluate(closure: Callable[[], Any]) -> Any:
            if next(calls):  # an optimizer that calls it again (LBFGS) has moved the masters
                self._quantize(pairs)
            loss = closure()
            _show_to_guards(pairs, True)
            return loss

        _show_to_guards(pairs, True)
        if callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": partial(evaluate, kwargs["closure"])}
        elif len(args) > 1 and callable(args[1]):
            args = (args[0], partial(evaluate, args[1]), *args[2:])
        return args, kwargs

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        pairs = self._stepped(optimizer)
        _show_to_guards(pairs, False)
        self._quantize(pairs)

    @torch.no_grad()
    def _quantize(self, pairs: Sequence[tuple[Any, nn.Parameter]]) -> None:
        for parameter, master in pairs:
            parameter.copy_(master)
        self._note_versions(pairs)

    @not_traced("Versions are counted by torch, and compiled code counts them at its end.")
    def _note_versions(self, pairs: Iterable[tuple[Any, nn.Parameter]]) -> None:
        self._versions |= {id(parameter): _version(parameter) for parameter, _ in pairs}

    @not_traced("It reads versions, and on a GPU their values where one has changed.")
    @torch.no_grad()
    def _check_unchanged(self, pairs: Sequence[tuple[Any, nn.Parameter]]) -> None:
        """That the model still has the parameters, and that they were not written. What was written and put back, as
        averages of weights are for an evaluation, is no change. No values are compared in a capture, which must not
        wait for them."""
        for parameter, _ in pairs:
            if getattr(parameter, "is_replaced", False):
                raise RuntimeError(
                    f"A quantized parameter {list(parameter.shape)} was replaced in its operation by another one, as "
                    "by .to(dtype), a move to another device or load_state_dict(assign=True), so this step would not "
                    "train the model. Make MasterWeights and the optimizer anew."
                )
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        for parameter, master in pairs:
            if _version(parameter) != self._versions[id(parameter)]:
                values = parameter.dequantize()
                is_put_back = torch.equal(master, values.to(master.dtype))  # their codes may have another scale
                if not is_put_back and not torch.equal(copied(parameter).copy_(master).dequantize(), values):
                    raise RuntimeError(
                        f"A quantized parameter {list(parameter.shape)} was written since its master was, by a load or "
                        "another change in place, which this step would undo. Call masters.read() to go on from what "
                        "was written, or masters.quantize() to go on from the masters."
                    )
                self._note_versions([(parameter, master)])


def _master(parameter: Any, held: QuantizedParameter | QuantizedShard) -> Any:
    """held: the parameter itself, or this rank's part of it."""
    values = held.get_high_precision_init_val()
    values = held.quantized.dequantize() if values is None else values.to(held.device)
    held.clear_high_precision_init_val()
    values = values.to(torch.float32, copy=True)
    master: Any = nn.Parameter(with_local(parameter, values) if isinstance(held, QuantizedShard) else values)
    kind: Any = type(master)
    master.__class__ = _master_class(kind)
    master.quantized_parameter = parameter
    parameter.grad_dtype = None  # its own from backward, and float32 from the master
    return master


def _version(parameter: Any) -> int:
    """How many writes torch has counted. None are of shards, whose scales may be of all ranks, and under delayed
    scaling, where the same values have other codes in each step: there nothing is compared."""
    is_compared = isinstance(parameter, QuantizedParameter) and not parameter.quantizer.keeps_state
    counted = held_tensors(parameter) if is_compared else ()
    return sum(0 if tensor.is_inference() else tensor._version for tensor in counted)


class _OfMaster:
    """What a master has beside an ordinary parameter: the gradient of `quantized_parameter`."""

    quantized_parameter: Any

    @property
    def grad(self: Any) -> Tensor | None:
        parameter = self.quantized_parameter
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is None:
            if parameter.grad is not None and parameter.grad.dtype != torch.float32:
                parameter.grad = parameter.grad.to(torch.float32)
            return parameter.grad
        if main_grad.dtype != torch.float32:
            raise ValueError(
                f"A quantized parameter {list(parameter.shape)} has a main_grad of {main_grad.dtype}, but its master "
                "is stepped with a gradient of float32 in the same memory. Give it a main_grad of float32."
            )
        return main_grad.view(self.shape)

    @grad.setter
    def grad(self: Any, value: Tensor | None) -> None:
        if value is not None and getattr(self.quantized_parameter, "main_grad", None) is not None:
            self.grad.copy_(value)
        else:
            self.quantized_parameter.grad = value

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._ordinary(), memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)

    def _ordinary(self: Any) -> nn.Parameter:
        return nn.Parameter(self.detach(), self.requires_grad)


@cache
def _master_class(kind: Any) -> Any:
    """kind: Parameter, or DTensor. torch's optimizers step by foreach kernels only what is exactly of a listed type."""
    made: Any = type("MasterWeight", (_OfMaster, kind), {})
    _foreach_supported_types.append(made)
    return made


def _show_to_guards(pairs: Iterable[tuple[Any, Any]], there: bool) -> None:
    """Guards of a compiled `step()` read gradients below Python, and see no property."""
    if torch.compiler.is_dynamo_compiling():
        _set_below_python(pairs, there)


@not_traced("Gradients are set below Python.")
def _set_below_python(pairs: Iterable[tuple[Any, Any]], there: bool) -> None:
    below: Any = Tensor.grad
    for _, master in pairs:
        below.__set__(master, master.grad if there else None)
