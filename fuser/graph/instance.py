"""One use of a module in graphs: its sample arguments, its static buffers, and its passes on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fuser.graph.capture import ALIGNMENT
from fuser.schedule.run import delaying
from ops.products.main_grad import OperationWithWeights, placeholder
from recipes.autocast import autocast
from recipes.effects import SideEffects
from recipes.recipe import Recipe
from recipes.stack import entered

Grads = list[Tensor | None]
# What is called with a module around its passes of warm-up and capture, by name.
CaptureHooks = Mapping[str, Sequence[Callable[[nn.Module], object]]]
CAPTURE_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


@dataclass(frozen=True)
class Settings:
    """The settings under which a module is recorded: the recipe, and the current state of torch.autocast.

    keep_weights: the flag of `autocast`, or None; with_backward: whether backward is recorded
    """

    device: torch.device
    recipe: Recipe
    group: dist.ProcessGroup | None
    keep_weights: Tensor | None
    torch_autocast: tuple[bool, torch.dtype]
    with_backward: bool

    @contextmanager
    def entered(self) -> Iterator[None]:
        enabled, dtype = self.torch_autocast
        with (
            entered(()),
            torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=False),
            autocast(self.recipe, amax_reduction_group=self.group, keep_weights=self.keep_weights),
        ):
            yield


class Form(NamedTuple):
    """A tensor's metadata."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        # Only dense tensors keep their strides: a buffer has memory for its elements, not for gaps.
        like = torch.empty_like(tensor, device="meta")
        return cls(tensor.shape, like.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Sample:
    """The sample arguments of a module: tensors, which each call may replace, and constants.

    at, tensors, forms: positions, values and forms of the tensors among the arguments
    moved: positions of tensors on the host whose copies on the device the graph reads
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.names = (*map(str, range(len(args))), *kwargs)
        self.values = [*args, *kwargs.values()]
        self.num_args = len(args)
        self.at = [index for index, value in enumerate(self.values) if isinstance(value, Tensor)]
        self.tensors: list[Tensor] = [self.values[index] for index in self.at]
        self.forms = [Form.of(tensor) for tensor in self.tensors]
        self.moved: set[int] = set()

    def move(self, names: Collection[str], device: torch.device) -> None:
        """Copy the tensors of these names that are on the host to the device."""
        for number, index in enumerate(self.at):
            if self.names[index] in names and self.tensors[number].device.type == "cpu" != device.type:
                self.values[index] = self.tensors[number] = self.tensors[number].to(device)
                self.forms[number] = Form.of(self.tensors[number])
                self.moved.add(index)

    def release(self) -> None:
        """Release the tensors; keep their forms."""
        self.tensors = []
        for index in self.at:
            self.values[index] = None

    def call(self, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """module(...) with these tensors in place of the sample's."""
        values = list(self.values)
        for index, tensor in zip(self.at, tensors, strict=True):
            values[index] = tensor
        keywords = zip(self.names[self.num_args :], values[self.num_args :], strict=True)
        return module(*values[: self.num_args], **dict(keywords))


def buffer_bytes(forms: Sequence[Form]) -> int:
    """The size in bytes of a buffer for tensors of these forms."""
    return sum(-(-form.nbytes // ALIGNMENT) * ALIGNMENT for form in forms)


def placed(forms: Sequence[Form], memory: Tensor) -> list[Tensor]:
    """Tensors of these forms in `memory`, [bytes] uint8."""
    tensors, start = [], 0
    for form in forms:
        part = memory[start : start + form.nbytes].view(form.dtype)
        tensors.append(part.as_strided(form.shape, form.stride))
        start += buffer_bytes([form])
    return tensors


class Buffers(NamedTuple):
    """The static memory of an instance. input_grads: for each input that has a gradient."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    output_grads: list[Tensor]
    input_grads: Grads


class Instance:
    """A module with one set of buffers. In the first warm-up `buffers` is None, and it runs on copies of its sample.

    `forward`, `backward` and `wgrad` are the work of its segments.

    outputs, grads: the forms of the outputs and of the input gradients, known after a warm-up
    params:         the parameters that are inputs of the replay's autograd node
    """

    def __init__(
        self, module: nn.Module, sample: Sample, settings: Settings, *, unused: bool, retain: bool,
        capture_hooks: CaptureHooks,
    ) -> None:  # fmt: skip
        self.module = module
        self.sample = sample
        self.settings = settings
        self.training = module.training
        self.allow_unused = unused
        self.retain = retain
        self.capture_hooks = capture_hooks
        self.buffers: Buffers | None = None
        self.outputs: list[Form] = []
        self.grads: list[Form | None] = []
        self.spec: Any = None
        self.all_params = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.params: list[Tensor] = []
        self.param_at: list[int] = []
        self.gets_placeholder: list[bool] = []
        self.skips_clone: list[bool] = []  # parameters with skip_backward_post_hook, whose owner reads graph memory
        self.param_grads: Grads = []
        self.leaves: list[Tensor] = []
        self.dys: list[Tensor] = []  # in warm-up
        self._results: list[Tensor] = []
        self._operations = [
            m for m in module.modules() if isinstance(m, OperationWithWeights) and m.delay_wgrad_compute
        ]
        self._delayed: list[deque[Any]] = []  # for each of them, the wgrads that the last backward delayed

    @property
    def delays(self) -> bool:
        return self.settings.with_backward and any(True for _ in delaying(self.module))

    @property
    def inputs(self) -> list[Form]:
        return self.sample.forms

    def call_hooks(self, name: str) -> None:
        """Call its capture hooks of that name with the module. Raises RuntimeError if one returns a value."""
        for hook in self.capture_hooks.get(name, ()):
            if hook(self.module) is not None:
                raise RuntimeError(
                    f"A hook of capture_time_hooks[...][{name!r}] returned a value, which nothing would take. Let it "
                    "return None."
                )

    def forward(self) -> None:
        buffers, wants_grad = self.buffers, self.settings.with_backward
        given = [tensor.detach().clone() for tensor in self.sample.tensors] if buffers is None else buffers.inputs
        self.leaves = [
            tensor.detach().requires_grad_(wants_grad and form.requires_grad)
            for tensor, form in zip(given, self.inputs, strict=True)
        ]
        with self.settings.entered(), torch.set_grad_enabled(wants_grad):
            result = self.sample.call(self.module, self.leaves)
        self._results, self.spec = tree_flatten(result)
        if not all(isinstance(tensor, Tensor) for tensor in self._results):
            kinds = sorted({type(value).__name__ for value in self._results if not isinstance(value, Tensor)})
            raise TypeError(
                f"{type(self.module).__name__} returned {', '.join(kinds)} among its outputs, and a replay gives "
                "tensors alone. Return tensors, in tuples or dictionaries."
            )
        if buffers is None:
            self.outputs = [Form.of(tensor) for tensor in self._results]
        else:
            _copy(self._results, buffers.outputs)
        if not wants_grad:
            self._results = []

    def backward(self) -> None:
        buffers = self.buffers
        results = [tensor for tensor in self._results if tensor.requires_grad]
        if buffers is None:
            dys = self.dys = [torch.zeros_like(tensor) for tensor in results]
        else:
            dys = buffers.output_grads
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]
        found: Sequence[Tensor | None] = [None] * (len(leaves) + len(self.all_params))
        if results:
            with self.settings.entered(), self._delayed_kept(), _without_hooks(self.all_params):
                found = torch.autograd.grad(
                    results, [*leaves, *self.all_params], dys, allow_unused=True, retain_graph=self.retain
                )
        d_inputs = found[: len(leaves)]
        self.param_grads = list(found[len(leaves) :])
        if buffers is None:
            self.grads = [None if d is None else Form.of(d) for d in d_inputs]
            if not self.allow_unused and None in self.grads:
                inputs = zip(self.sample.at, self.leaves, strict=True)
                named = [self.sample.names[at] for at, leaf in inputs if leaf.requires_grad]
                raise RuntimeError(
                    f"{type(self.module).__name__}: no output depends on {named[self.grads.index(None)]!r}, which "
                    "requires a gradient. Let it not require one, or pass allow_unused_input=True."
                )
        else:
            _copy(d_inputs, buffers.input_grads)
        if not self.retain:
            self._results, self.leaves = [], []

    def wgrad(self) -> None:
        mine = self._delayed
        others = [o.exchange_delayed(d) for o, d in zip(self._operations, mine, strict=True)]
        try:
            with self.settings.entered():
                for module in delaying(self.module):
                    module.backward_dw()
        finally:
            for operation, left in zip(self._operations, others, strict=True):
                operation.exchange_delayed(left)
            self._delayed = []

    @contextmanager
    def _delayed_kept(self) -> Iterator[None]:
        """Collect the weight gradients delayed in the body, for this instance's `wgrad`."""
        others = [operation.exchange_delayed(deque()) for operation in self._operations]
        try:
            yield
        finally:
            self._delayed = [o.exchange_delayed(left) for o, left in zip(self._operations, others, strict=True)]

    def delayed_operands(self) -> list[Tensor]:
        """The operands of the delayed weight gradients."""
        return [operand for left in self._delayed for gradient in left for operand, _ in gradient.operands]

    @property
    def differentiable_outputs(self) -> list[Form]:
        return [form for form in self.outputs if form.requires_grad] if self.settings.with_backward else []

    def take_param_grads(self, recording: SideEffects, unowned: Callable[[Tensor], Tensor] | None) -> None:
        """After the recording of a backward, determine which parameters receive which gradients.

        unowned: maps a gradient to a view that does not keep its memory allocated; None keeps it
        """
        elsewhere = {id(weight) for weight in recording.weights}
        placeholders = {tensor.data_ptr() for tensor in recording.placeholders}
        pairs = list(zip(self.all_params, self.param_grads, strict=True))
        # A weight whose gradient bypasses autograd is still an input of the node, so that its hooks run.
        taken = [index for index, (p, d) in enumerate(pairs) if d is not None or id(p) in elsewhere]
        self.params = [pairs[index][0] for index in taken]
        self.param_at = taken
        grads = [pairs[index][1] for index in taken]
        self.gets_placeholder = [d is not None and d.data_ptr() in placeholders for d in grads]
        recording.placeholders.clear()  # each replay makes new ones
        skips = [bool(getattr(p, "skip_backward_post_hook", False)) for p, _ in pairs]
        self.skips_clone = [skips[index] for index in taken]
        if unowned is not None:
            self.param_grads = [
                d if d is None or skip else unowned(d) for d, skip in zip(self.param_grads, skips, strict=True)
            ]

    def returned_param_grads(self, owned: bool) -> Grads:
        """The gradients of `params` that a replay returns to autograd.

        owned: clone them, so that replays keep them; not those of parameters with skip_backward_post_hook
        """
        result: Grads = []
        kinds = zip(self.param_at, self.gets_placeholder, self.skips_clone, strict=True)
        for index, is_placeholder, skips in kinds:
            grad = self.param_grads[index]
            if is_placeholder:
                result.append(placeholder(self.all_params[index]))
            else:
                result.append(grad.clone() if owned and not skips and grad is not None else grad)
        return result

    def forget(self) -> None:
        """Drop the results of the last forward and backward."""
        self._results, self.leaves, self.dys, self._delayed, self.param_grads = [], [], [], [], []

    def unflattened(self, outputs: Sequence[Tensor]) -> Any:
        """The outputs in the structure that the module returns."""
        return outputs[0] if self.spec.is_leaf() else tree_unflatten(list(outputs), self.spec)

    def drop(self) -> None:
        """Release the results of the last forward, and all buffers."""
        self.forget()
        self.params, self.buffers = [], None


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Disable the tensors' hooks inside. They run at each replay, on the gradients that it returns."""
    hooks = [tensor._backward_hooks for tensor in tensors if tensor._backward_hooks]
    contents = [dict(registered) for registered in hooks]
    for registered in hooks:
        registered.clear()  # in place, because autograd refers to this dict
    try:
        yield
    finally:
        for registered, content in zip(hooks, contents, strict=True):
            registered.update(content)


@torch.no_grad()
def _copy(values: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
    for value, target in zip(values, into, strict=True):
        if value is not None and target is not None:
            target.copy_(value.detach())
