"""Random layers, recipes, splits, strides, optimizers and what else a trainer does, against an oracle in float64.

    python -m tests.attack --minutes 10                  on a CPU; --device cuda on a GPU, with larger shapes too
    python -m tests.attack --device cuda --seed 123      one case again

Each case follows from its seed. A mismatch prints the seed, the case and what differed, and the run goes on; at the end
stand the counts. The exit status is 1 if there was a mismatch. Apart from `make test`, which runs a handful of seeds.

Compared are, step by step, y, every gradient and every gradient buffer with `tests.attack_oracle`, on the parameters as
they are at that moment; and properties: a copy of the model gives the same bits (it has no quantized weights of
before), unfused gives the bits of fused on a CPU where no fusion rounds less, rows past the sum of the splits are zero,
an input is left as it was, and a gradient that nobody asked for is accumulated nowhere.
"""
# T rows, G groups, K in features, N out features

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import deterministic
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fuser import Sequential, autocast, checkpoint, ops
from ops import BasicOperation
from ops.products.main_grad import OperationWithWeights
from recipes import DelayedScaling, HighPrecision, NVFP4BlockScaling, Role
from tests.attack_cases import (
    OPTIMIZERS,
    WIDE,
    Case,
    changed,
    coarsest_dtype,
    draw_case,
    dtypes_of,
    takes_scales,
    width_behind,
)
from tests.attack_oracle import Call, DelayedState, Layer

FORWARD_ROLES = (Role.INPUT, Role.WEIGHT)

# --------------------------------------------------------------------------------------------------- updates of weights


def update(case: Case, model: Sequential, optimizer: torch.optim.Optimizer | None, generator: torch.Generator) -> None:
    """Change the parameters as the case says. What is added has a few tenths of their size."""

    def moved(p: Tensor) -> Tensor:
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
        return (p.detach().double() + 0.3 * p.detach().double().std(unbiased=False).clamp(min=0.1) * noise).to(p.dtype)

    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None and case.update in OPTIMIZERS:
        return
    if optimizer is not None:
        for p in trained:
            if p.grad is not None:  # its size must not decide how far a step goes
                p.grad.mul_(0.3 * (p.detach().norm() + 0.1) / p.grad.norm().clamp(min=1e-6))
        optimizer.step()
    elif case.update == "load_state_dict":
        parameters = {name for name, _ in model.named_parameters()}
        model.load_state_dict({n: moved(t) if n in parameters else t for n, t in model.state_dict().items()})
    for p in trained if optimizer is None else ():
        if case.update == "data.copy_":
            p.data.copy_(moved(p))
        elif case.update in ("data assigned", "data assigned twice"):
            p.data = moved(p)
            if case.update == "data assigned twice":
                p.data = moved(p)
        elif case.update == "in place without grad":
            with torch.no_grad():
                p.add_(moved(p) - p)


# ------------------------------------------------------------------------------------------------------ building, data


def _no_hook(module: nn.Module, inputs: Any) -> None:
    return None


def _lay_out_weights(case: Case, model: Sequential) -> None:
    parameters = list(model.parameters())
    if case.weight_layout == "transposed":
        for p in parameters:
            p.data = laid_out(p.data, "transposed")
    elif case.weight_layout == "in one buffer" and len({p.dtype for p in parameters}) == 1:
        buffer = torch.cat([p.data.flatten() for p in parameters])
        for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
            p.data = part.view(p.shape)


def build(case: Case) -> Sequential:
    """The model, its parameters drawn from the seed."""
    modules: list[nn.Module] = []
    for layer in case.layers:
        if layer.kind in ("Tanh", "Again"):
            modules.append(nn.Tanh() if layer.kind == "Tanh" else modules[layer.arguments["layer"]])
            continue
        arguments = dict(layer.arguments)
        if layer.kind in ("Linear", "GroupedLinear"):
            arguments |= {"accumulate_into_main_grad": case.main_grad is not None, "delay_wgrad_compute": case.delayed}
        modules.append(getattr(ops, layer.kind)(**arguments))
    generator = torch.Generator().manual_seed(case.seed)
    for layer, module in zip(case.layers, modules, strict=True):
        for name, p in module.named_parameters() if layer.kind != "Again" else ():
            matrix = layer.kind in ("Linear", "GroupedLinear", "Router") and name.startswith("weight")
            scale = p.shape[-1] ** -0.5 if matrix else 0.2
            one = layer.kind in ("RMSNorm", "LayerNorm") and name == "weight"
            start = float(one and not layer.arguments["zero_centered_gamma"])
            dtype = torch.float32 if case.wide_layers and layer.kind in WIDE else case.dtype
            p.data = (start + scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(dtype)
    model = Sequential(*modules, path=case.path).to(case.device)
    for layer, module in zip(case.layers, modules, strict=True):
        if layer.recipe is not None:
            module.set_recipe(layer.recipe)  # type: ignore[operator]
    _lay_out_weights(case, model)
    model.train(not case.eval_mode)
    if case.hooked is not None:
        modules[case.hooked].register_forward_pre_hook(_no_hook)
    rng = random.Random(case.seed + 9)
    for p in model.parameters():
        p.requires_grad_(rng.random() >= case.frozen)
    return model


def owned_weights(model: Sequential) -> dict[str, Tensor]:
    """The weights whose gradients `ops.products.main_grad` accumulates, by their names."""
    return {
        f"{prefix}.{name}": module.get_parameter(name)
        for prefix, module in model.named_modules()
        if isinstance(module, OperationWithWeights)
        for name in module.weight_names
        if module.get_parameter(name).requires_grad
    }


def give_main_grads(case: Case, model: Sequential, like: Sequential | None = None) -> None:
    """Put a buffer on each weight; with the values and flags of `like`'s, if that is given."""
    if case.main_grad is None:
        return
    owned: dict[str, Any] = owned_weights(model)  # type: ignore[assignment]
    for w in owned.values():
        dtype = case.main_grad_dtype or w.dtype
        if w.dtype == torch.float64 and case.main_grad_dtype is None:
            dtype = torch.float64
        w.main_grad = torch.full(w.shape, 0.25 if case.main_grad == "add" else math.nan, dtype=dtype, device=w.device)
        if case.main_grad_layout == "flat":
            w.main_grad = w.main_grad.flatten()
        elif case.main_grad_layout == "apart" and w.dim() == 3:
            wider = w.main_grad.new_full((w.shape[0], w[0].numel() + 8), 7.0)
            w.main_grad = wider[:, :-8].copy_(w.main_grad.flatten(1)).view(w.shape)
        w.overwrite_main_grad = case.main_grad != "add"
        if case.main_grad != "overwrite, no flag":
            w.grad_added_to_main_grad = False
        if case.zero_out_wgrad:
            w.zero_out_wgrad = True
    if case.main_grad_layout.startswith("one bucket") and owned:
        weights = list(owned.values())[:: -1 if "last first" in case.main_grad_layout else 1]
        bucket = torch.cat([w.main_grad.flatten() for w in weights])
        for w, part in zip(weights, bucket.split([w.numel() for w in weights]), strict=True):
            w.main_grad = part.view(w.shape)
    theirs: Any = {} if like is None else owned_weights(like)
    for name in theirs:
        w = owned[name]
        w.main_grad.copy_(theirs[name].main_grad)
        if hasattr(w, "grad_added_to_main_grad"):
            w.grad_added_to_main_grad = theirs[name].grad_added_to_main_grad


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values in memory of this layout; expanded ones repeat the first row, column or number."""
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "wide" and values.dim():
        wider = values.new_full((*values.shape[:-1], values.shape[-1] + 5), math.nan)
        wider[..., 2:-3] = values
        return wider[..., 2:-3]
    if layout == "every second row" and values.dim() > 1:
        apart = values.new_full((2 * values.shape[0], *values.shape[1:]), math.nan)
        apart[::2] = values
        return apart[::2]
    if layout == "offset":
        longer = values.new_full((values.numel() + 3,), math.nan)
        longer[3:] = values.flatten()
        return longer[3:].view(values.shape)
    if layout == "expanded rows" and values.dim() > 1 and values.shape[0]:
        return values[:1].clone().expand(values.shape)
    if layout == "expanded columns" and values.dim() > 1:
        return values[..., :1].clone().expand(values.shape)
    if layout == "one number" and values.numel():
        return values.flatten()[0].clone().expand(values.shape)
    return values.clone()


@dataclass
class Batch:
    """The inputs of one pass. sizes: of the groups; None for a model that makes them itself."""

    x: Tensor
    extras: dict[str, Tensor]
    sizes: list[int] | None
    generator: torch.Generator

    def split_sizes(self, case: Case) -> Any:
        how = case.sizes_as
        if self.sizes is None or how == "list":
            return self.sizes
        dtype = torch.int32 if "int32" in how else torch.int64
        device = "cpu" if "host" in how else case.device
        if how == "every second":
            return torch.tensor([n for size in self.sizes for n in (size, 99)], dtype=dtype, device=device)[::2]
        return torch.tensor(self.sizes, dtype=dtype, device=device)


def make_batch(case: Case, number: int) -> Batch:
    """The batch of this number, of the case's rows; its splits are its own."""
    generator = torch.Generator().manual_seed(1000 * case.seed + number)
    rng = random.Random(1000 * case.seed + number)
    sizes = None
    shape = case.shape
    if case.groups and case.kind == "grouped":
        sizes = _sizes(rng, case.groups, case.shape[0], case.splits)
        shape = (sum(sizes) + case.tail, *case.shape[1:])

    def random_tensor(shape: Sequence[int]) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(case.x_dtype or case.dtype).to(case.device)

    values = random_tensor(shape)
    if case.magnitude in ("tiny", "large"):
        values *= 2.0**-12 if case.magnitude == "tiny" else 100
    elif case.magnitude == "outliers":
        values = torch.where(values > 1.5, 8 * values, values)
    elif case.magnitude == "rows of zeros":
        values[::3] = 0
    if case.poisoned_tail and case.tail and "expanded" not in case.x_layout:
        values[-case.tail :] = math.nan
    x = laid_out(values, case.x_layout).detach().requires_grad_(case.x_requires_grad)
    extras = {}
    if case.kind == "grouped" and any(takes_scales(layer) for layer in case.layers):
        scales = (torch.rand(shape[0], generator=generator, dtype=torch.float64) + 0.2).to(case.dtype).to(case.device)
        layout = case.extras_layout if case.extras_layout in ("wide", "offset") else "contiguous"
        extras["scales"] = laid_out(scales, layout).detach().requires_grad_(case.extras_require_grad)
    for name, width in case.outside:
        extra = laid_out(random_tensor((*shape[:-1], width)), case.extras_layout)
        extras[name] = extra.detach().requires_grad_(case.extras_require_grad)
    return Batch(x, extras, sizes, generator)


def _sizes(rng: random.Random, groups: int, rows: int, how: str) -> list[int]:
    if how == "all empty":
        return [0] * groups
    if how == "one takes all":
        sizes = [0] * groups
        sizes[rng.randrange(groups)] = rows
        return sizes
    if how == "equal":
        return [rows // groups] * groups
    weights = [rng.random() * (how == "random" or rng.random() < 0.5) for _ in range(groups)]
    weights[rng.randrange(groups)] += 0.1
    counts = Counter(rng.choices(range(groups), weights, k=rows))
    return [counts[group] for group in range(groups)]


# ------------------------------------------------------------------------------------------------------------- running


@dataclass
class Outcome:
    """What a pass gave. grads: of x and the extra inputs; None where nothing came."""

    values: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)


def outputs_of(case: Case) -> tuple[str, ...]:
    return (*(("indices", "load_balancing_loss") if case.kind == "layer of experts" else ()), *case.outputs)


class Pass:
    """A forward of the model on leaves with the batch's values and strides; `finish` runs its backward."""

    def __init__(self, case: Case, model: Sequential, batch: Batch, slopes: Mapping[str, Tensor]) -> None:
        self.case, self.model, self.batch, self.slopes = case, model, batch, slopes
        self.x = batch.x.detach().requires_grad_(batch.x.requires_grad)
        self.extras = {name: t.detach().requires_grad_(t.requires_grad) for name, t in batch.extras.items()}
        self.sizes = batch.split_sizes(case)
        self.outcome = Outcome()

    def _scope(self, of: str) -> AbstractContextManager[Any]:
        return autocast(self.case.recipe) if self.case.scope == of else nullcontext()

    def run(self) -> Outcome:
        """Forward and backward."""
        with self._scope("forward and backward"):
            self.forward()
            self.finish()
        return self.outcome

    def forward(self) -> None:
        """Forward alone."""
        case, inputs = self.case, (self.x, *self.extras.values())
        with self._scope("forward"), self._torch_autocast():
            if case.checkpoint is None:
                values = self._function(*inputs)
            else:
                run = checkpoint if case.checkpoint.startswith("fuser") else torch_checkpoint
                values = run(self._function, *inputs, use_reentrant="reentrant" in case.checkpoint)
        self.outcome.values = dict(zip(("y", *outputs_of(case)), values, strict=True))

    def _torch_autocast(self) -> AbstractContextManager[Any]:
        if not self.case.torch_autocast:
            return nullcontext()
        return torch.autocast(self.case.device.split(":")[0], torch.bfloat16)

    def _function(self, x: Tensor, *tensors: Tensor) -> Any:
        names = outputs_of(self.case)
        given: dict[str, Any] = dict(zip(self.extras, tensors, strict=True))
        if self.sizes is not None:
            given["split_sizes"] = self.sizes
        with self._scope("inside"):
            if self.case.one_by_one:
                result = self._one_by_one(x, given)
            else:
                result = self.model(x, outputs=names, buffers=self._buffers(), **given)
        return (result[0], *result[1].values()) if names else (result,)

    def _one_by_one(self, x: Tensor, given: Mapping[str, Any]) -> Any:
        """y and the extra outputs that are asked for, or y; autograd puts the operations together."""
        environment = dict(given)
        for module in self.model:
            if isinstance(module, BasicOperation):
                made = tuple(module.extra_outputs)
                result = module(x, outputs=made, **{name: environment[name] for name in module.extra_inputs})
                x, produced = result if made else (result, {})
                environment |= produced
            else:
                x = module(x)
        names = outputs_of(self.case)
        return (x, {name: environment[name] for name in names}) if names else x

    def _buffers(self) -> dict[int, dict[str, Tensor]] | None:
        """Memory of the caller's, of NaN."""
        found: dict[int, dict[str, Tensor]] = {}
        rows = self.x.shape[0]
        if self.case.kind == "layer of experts":
            rows *= next(layer.arguments["topk"] for layer in self.case.layers if layer.kind == "Router")
        for index, name in self.case.buffers:
            given = self.case.layers[index].arguments
            width = given["out_features" if name == "output" else "in_features"]
            dtype = dtypes_of(self.case)[index]
            buffer = torch.full((rows, width), math.nan, dtype=dtype, device=self.case.device)
            found.setdefault(index, {})[name] = buffer
        return found or None

    def finish(self) -> None:
        """The backward that the case asks for; twice where the graph is retained."""
        case, outcome = self.case, self.outcome
        heads = {n: v for n, v in outcome.values.items() if n in self.slopes and v.requires_grad}
        if not heads:
            return
        roots, dys = list(heads.values()), [self.slopes[name] for name in heads]
        if case.asked == "grad of x":
            (outcome.grads["x"],) = torch.autograd.grad(roots, self.x, dys)
            return
        leaves = {"x": self.x} | self.extras | dict(self.model.named_parameters())
        asked = [leaves[name] for name in asked_names(case, self.model, self.batch)]
        only = {} if case.asked == "all" else {"inputs": asked}
        if case.retains_graph:
            torch.autograd.backward(roots, dys, retain_graph=True, **only)
            for leaf in leaves.values():  # behind a view torch takes the given gradient itself as .grad
                leaf.grad = None if leaf.grad is None else leaf.grad.clone()
        torch.autograd.backward(roots, dys, **only)
        outcome.grads |= {"x": self.x.grad} | {name: t.grad for name, t in self.extras.items()}


def asked_names(case: Case, model: Sequential, batch: Batch) -> list[str]:
    """The leaves whose gradients the case asks for."""
    if case.asked in ("grad of x", "inputs: x"):
        return ["x"]
    leaves = {"x": batch.x} | batch.extras | dict(model.named_parameters())
    names = [name for name, t in leaves.items() if t.requires_grad]
    if case.asked == "all" or not names:
        return names
    rng = random.Random(case.seed + 1)
    return [name for name in names if rng.random() < 0.4] or [rng.choice(names)]


def slopes_of(case: Case, batch: Batch) -> dict[str, Tensor]:
    """The gradients of the heads that the loss has. That of y has the strides of the case."""
    width, dtypes = case.shape[-1], dtypes_of(case)
    slopes_dtype = dtypes[-1]
    for layer in case.layers:
        width = width_behind(layer, width)
    shape = (*batch.x.shape[:-1], width)
    values = torch.randn(shape, generator=batch.generator, dtype=torch.float64).to(slopes_dtype).to(case.device)
    if case.poisoned_tail and case.tail and "expanded" not in case.dy_layout and case.dy_layout != "one number":
        values[-case.tail :] = math.nan
    slopes = {"y": laid_out(values, case.dy_layout)} if "y" in case.loss else {}
    for name in case.outputs:
        width = case.shape[-1]
        for layer, dtype in zip(case.layers, dtypes, strict=True):
            if layer.kind == "MakeExtraOutput" and layer.arguments["name"] == name:
                values = torch.randn((*batch.x.shape[:-1], width), generator=batch.generator, dtype=torch.float64)
                slopes[name] = values.to(dtype).to(case.device)
            width = width_behind(layer, width)
    if "balance" in case.loss:
        router = [layer.kind for layer in case.layers].index("Router")
        dtype = torch.promote_types(dtypes[router], torch.float32)
        slopes["load_balancing_loss"] = torch.tensor(0.5, dtype=dtype, device=case.device)
    return slopes


# ----------------------------------------------------------------------------------------------------------- comparing


STOCHASTIC = 1.0  # the RMS bound of gradients after stochastic rounding to four bits


class Bound(NamedTuple):
    """The largest error: of an element relative to the largest magnitude (1 at least), or as a root mean square of all
    and of each row, relative to that of all (`floor` at least)."""

    element: float | None
    rms: float = 0.0
    row: float = math.inf
    floor: float = 0.02


def bound_of(case: Case, gradient: bool) -> Bound:
    """By dtype and recipe. In float64 everything but stochastic rounding is exact, up to the order of the sums; in the
    others an error of the last place flips codes, by a spacing of the format each."""
    dtype = coarsest_dtype(case)
    recipes = [case.recipe, *(layer.recipe for layer in case.layers if layer.recipe is not None)]
    text = str(recipes)
    four_bits = "NVFP4" in text
    stochastic = any(isinstance(r, NVFP4BlockScaling) and not r.disable_stochastic_rounding for r in recipes)
    row_scaled = "row_scaled_activation=True" in text
    cached = any(layer.arguments.get("cache_quantized_input") for layer in case.layers)
    quantizes = any(not isinstance(r, HighPrecision) for r in recipes) or cached
    if stochastic and gradient:
        return Bound(None, STOCHASTIC * _outlying(case))
    if dtype == torch.float64 and not row_scaled:
        return Bound(1e-9)
    if quantizes and _is_one_product(case):
        rounding = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.01}[dtype]
        return Bound(None, rounding if case.device == "cpu" else max(rounding, 0.005), 0.1)
    if four_bits:
        return Bound(None, 0.35, 2.0, 0.1)
    if quantizes:
        return Bound(None, (0.05 if dtype == torch.float32 else 0.1) * _outlying(case), 0.8 * _outlying(case), 0.1)
    if dtype == torch.float32:  # of many numbers some lie at the kink of an activation
        return Bound(3e-4) if case.device == "cpu" else Bound(None, 1e-3, 0.5, 0.1)
    return Bound(None, 0.06 if dtype == torch.bfloat16 else 0.01, 0.5, 0.1)


def _outlying(case: Case) -> float:
    """By how much bounds are wider where few numbers decide: where one of those flips a code, all changes with it."""
    return 4.0 if case.magnitude in ("outliers", "large") else 1.0


def _is_one_product(case: Case) -> bool:
    """Whether both operands of every product are the caller's, in the dtype that they have."""
    kinds = [layer.kind for layer in case.layers]
    return len(kinds) == 1 and kinds[0] in ("Linear", "GroupedLinear") and not case.x_dtype and not case.torch_autocast


def difference(name: str, got: Tensor | None, want: Tensor | None, bound: Bound) -> str | None:
    """A sentence if the two differ by more than the bound, else None."""
    if got is None or want is None:
        if got is want or (got is not None and not got.any()):
            return None
        return f"{name} is missing" if got is None else f"{name} is there, though nothing asks for it"
    if got.shape != want.shape:
        return f"{name} has shape {list(got.shape)}, expected {list(want.shape)}"
    if not got.numel():
        return None
    largest = torch.finfo(got.dtype).max
    got, want = got.detach().double(), want.detach().double()
    overflows = got.isinf() & (want.abs() > largest / 2)  # within the errors, what the dtype cannot hold
    got = torch.where(overflows, want, got)
    if not want.isfinite().all():
        same = (got.isfinite() == want.isfinite()).float().mean().item()
        return None if same > 0.5 else f"{name} is finite where the oracle is not"
    error = (got - want).abs().nan_to_num(nan=math.inf)
    if bound.element is not None:
        scale = max(1.0, want.abs().max().item())
        worst = error.max().item()
        if worst <= bound.element * scale:
            return None
        return f"{name}: off by {worst:.3e} of {scale:.3e}, bound {bound.element:.1e}{_where(error)}"
    floor = bound.floor if want.dim() > 1 else 5 * bound.floor  # sums over rows or features may cancel
    rows_in_use = (
        want.flatten(0, -2).any(-1).float().mean().item() if want.dim() > 1 else 1.0
    )  # not of groups without rows
    scale = max((want.square().mean() / max(rows_in_use, 1e-9)).sqrt().item(), floor)
    rms = error.square().mean().sqrt().item()
    if bound.rms >= STOCHASTIC and error.numel() < 10_000:  # few numbers, each off by up to a spacing
        scale *= 4 if error.numel() >= 100 else 20
    rows = error.square().mean(-1).sqrt().max().item() if error.dim() else rms
    if rms <= bound.rms * scale and rows <= bound.row * scale:
        return None
    return (
        f"{name}: RMS error {rms:.3e}, of a row up to {rows:.3e}, of RMS {scale:.3e}; "
        f"bounds {bound.rms:.2f} and {bound.row:.2f}{_where(error)}"
    )


def _where(error: Tensor) -> str:
    index = torch.unravel_index(error.argmax(), error.shape)
    return f", worst at {[int(i) for i in index]} of {list(error.shape)}"


def differing_bits(name: str, got: Tensor | None, want: Tensor | None) -> str | None:
    """A sentence if the two differ in a bit, but for the sign of zero and among NaNs."""
    if got is None or want is None:
        return None if got is want else f"{name} is there in one and missing in the other"
    differ = (got != want) & ~(got.isnan() & want.isnan())
    if not differ.any():
        return None
    largest = (got.double() - want.double())[differ].abs().max().item()
    if got.dtype == torch.float64 and largest <= 1e-14 * want.abs().nan_to_num().max().item():
        return None  # a product on a CPU depends in the last place on where its operands lie
    return f"{name}: {int(differ.sum())} of {differ.numel()} elements differ, by up to {largest:.3e}"


def memory_bytes(tensor: Tensor) -> Tensor:
    """A copy of all that the tensor's storage holds."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


# ------------------------------------------------------------------------------------------------------------- the case


class Trial:
    """One case as it runs. `problems` are the mismatches."""

    def __init__(self, case: Case) -> None:
        self.base = self.case = case
        self.problems: list[str] = []
        self.ends = False
        self.where = ""
        self.model = build(case)
        give_main_grads(case, self.model)
        self.delayed_state = DelayedState(case.recipe) if isinstance(case.recipe, DelayedScaling) else None
        self.batches = itertools.count()
        self.generator = torch.Generator().manual_seed(case.seed + 7)
        self.rng = random.Random(case.seed + 8)
        self.expected: dict[str, Tensor | None] = {}  # what autograd's .grad should hold
        self.expected_main: dict[str, Tensor] = {}
        self.optimizer = self._make_optimizer()

    @property
    def state(self) -> DelayedState | None:
        return self.delayed_state if isinstance(self.case.recipe, DelayedScaling) else None

    def report(self, problem: str | None) -> None:
        if problem is not None:
            self.problems.append(f"{self.where}: {problem}")

    def run(self) -> None:
        base = self.base
        if base.evaluates_before:
            self.where = "evaluation before step 0"
            self._evaluate(torch.inference_mode if base.evaluates_before == "inference_mode" else torch.no_grad)
        for step in range(base.steps):
            if step % 2 and base.other_recipe is not None:
                self.case = changed(base, recipe=base.other_recipe)
            else:
                self.case = base
            last_step = step == base.steps - 1
            self._begin_step()
            together = base.microbatches if base.forwards_first else 1
            for microbatch in range(0, base.microbatches, together):
                self.where = f"step {step}, microbatch {microbatch}"
                last = last_step and microbatch + together == base.microbatches
                self._train(together, base.in_flight if last else None)
                if self.problems or self.ends:
                    return
            if base.evaluates:
                self.where = f"evaluation after step {step}"
                self._evaluate(torch.no_grad)
            if not last_step:
                self._update()
            if not all(p.isfinite().all() and p.abs().max() < 100 for p in self.model.parameters()):
                return

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        chosen = OPTIMIZERS.get(self.base.update)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if chosen is None or not trained or self.base.device not in chosen.devices:
            return None
        optimizer: torch.optim.Optimizer = getattr(torch.optim, chosen.kind)(trained, **chosen.arguments)
        return optimizer

    def _begin_step(self) -> None:
        self.expected = dict.fromkeys(dict(self.model.named_parameters()))
        for p in self.model.parameters():
            p.grad = None
        for weight in owned_weights(self.model).values() if self.case.main_grad else ():
            w: Any = weight
            if hasattr(w, "grad_added_to_main_grad"):
                w.grad_added_to_main_grad = False

    def _values(self) -> dict[str, Tensor]:
        """The parameters as they are now, in float64, rounded to what torch.autocast computes in."""
        values = {}
        for name, p in self.model.named_parameters():
            index = int(name.split(".")[0])
            kept = self.case.layers[index].kind == "Router"
            values[name] = p.detach().to(p.dtype if kept else dtypes_of(self.case)[index]).double().clone()
        return values

    def _train(self, number: int, in_flight: str | None) -> None:
        """`number` microbatches: all their forwards, then all their backwards."""
        case, model = self.case, self.model
        batches = [make_batch(case, next(self.batches)) for _ in range(number)]
        slopes = [slopes_of(case, batch) for batch in batches]
        if in_flight is not None and self._changed_weight() is not None:
            self._change_in_flight(batches[0], slopes[0], in_flight)
            self.ends = True
            return
        given = [
            {"x": b.x, **b.extras, **{f"gradient of {n}": t for n, t in own.items()}}
            for b, own in zip(batches, slopes, strict=True)
        ]
        before = [{name: memory_bytes(t) for name, t in own.items()} for own in given]
        values = self._values()
        buffers = {}
        if case.main_grad:
            held: dict[str, Any] = owned_weights(model)  # type: ignore[assignment]
            buffers = {n: p.main_grad.double().clone().view(p.shape) for n, p in held.items()}
        compares = number == 1 and not case.retains_graph
        fresh = self._copied() if case.compares_copy and compares else None
        unfused = self._unfused() if case.compares_unfused and compares else None
        seed = self.rng.randrange(2**31)
        _seed(seed)
        had_none = all(p.grad is None for p in model.parameters())
        passes = [Pass(case, model, batch, own) for batch, own in zip(batches, slopes, strict=True)]
        try:
            if number == 1:
                passes[0].run()
            else:
                for one in passes:
                    one.forward()
                for one in passes:
                    one.finish()
        except RuntimeError as error:
            if self._may_refuse_checkpoint() and ("autocast" in str(error) or "recipe" in str(error)):
                return
            raise
        for tensors, memory in zip(given, before, strict=True):
            for name, t in tensors.items():
                if not torch.equal(memory_bytes(t), memory[name]):
                    self.report(f"{name} was changed")
        all_leaves = []
        for one in passes:
            call, leaves = self._oracle(values, one.batch, one.outcome, one.slopes)
            self._check_outcome(one.batch, one.outcome, call, leaves)
            all_leaves.append(leaves)
        self._account(batches[0], all_leaves, buffers)
        self._check_gradients()
        self._check_state()
        for kind, other in (("a copy of the model", fresh), ("unfused", unfused)):
            if other is not None and not self.problems:
                _seed(seed)
                same_form = kind == "unfused" or case.copied_by != "other form"
                grads = had_none and case.main_grad is None and same_form
                self._check_other(kind, other, batches[0], slopes[0], passes[0].outcome, grads)

    def _copied(self) -> Sequential:
        """Another model with the parameters and states of this one, which has quantized nothing yet."""
        case = self.case
        if case.copied_by == "deepcopy":
            model = copy.deepcopy(self.model)
        else:
            flips = case.copied_by == "other form"
            layers = tuple(_in_other_form(layer) if flips else layer for layer in case.layers)
            model = build(changed(case, layers=layers))
            model.load_state_dict(self.model.state_dict())
            trained = {n.rstrip("0123456789") for n, p in self.model.named_parameters() if p.requires_grad}
            same = dict(self.model.named_parameters())
            for name, p in model.named_parameters():
                p.requires_grad_(same[name].requires_grad if name in same else name.rstrip("0123456789") in trained)
        give_main_grads(case, model, self.model if case.copied_by != "other form" else None)
        return model

    def _may_refuse_checkpoint(self) -> bool:
        """torch's checkpoint with the recipe around forward alone: refused, or right."""
        return str(self.case.checkpoint).startswith("torch") and self.case.scope == "forward"

    def _unfused(self) -> Sequential:
        model = Sequential(*copy.deepcopy(list(self.model)), fusions=(), path=self.case.path)
        give_main_grads(self.case, model, self.model)
        return model

    def _oracle(
        self,
        values: Mapping[str, Tensor],
        batch: Batch,
        outcome: Outcome,
        slopes: Mapping[str, Tensor],
        records: bool = True,
    ) -> tuple[Call, dict[str, Tensor]]:
        """The oracle's forward and backward; returns its call and its leaves, whose .grad are set."""
        case, needs = self.case, dict(self.model.named_parameters())
        parameters = {n: v.clone().requires_grad_(records and needs[n].requires_grad) for n, v in values.items()}
        inputs = {
            n: t.detach().double().clone().requires_grad_(records and t.requires_grad)
            for n, t in {"x": batch.x, **batch.extras}.items()
        }
        x = inputs["x"]
        extras: dict[str, Any] = {n: t for n, t in inputs.items() if n != "x"}
        if batch.sizes is not None:
            extras["split_sizes"] = batch.sizes
            if case.poisoned_tail and case.tail:
                inactive = torch.arange(x.shape[0], device=x.device) >= sum(batch.sizes)
                x = torch.where(inactive[:, None], 0.0, x)
        indices = outcome.values.get("indices")
        apart = range(len(case.layers)) if case.one_by_one else () if case.hooked is None else (case.hooked,)
        call = Call(case.layers, parameters, extras, dtypes_of(case), case.recipe, self.state, records, indices, apart)
        y = call.run(x)
        call.outputs["y"] = y
        if self.state is not None and records and case.scope != "forward and backward":
            self.state.end_step(FORWARD_ROLES)
        heads = {n: call.outputs[n] for n in slopes if call.outputs[n].requires_grad} if records else {}
        if heads:
            roots, dys = list(heads.values()), [slopes[n].double() for n in heads]
            dys = [dy.nan_to_num(nan=0.0) for dy in dys]  # past the sum of the splits
            torch.autograd.backward(roots, dys, retain_graph=case.retains_graph)
            if case.retains_graph:
                torch.autograd.backward(roots, dys)
        if self.state is not None and records:
            self.state.end_step(tuple(Role))
        for problem in call.problems:
            self.report(problem)
        return call, parameters | inputs

    def _check_outcome(
        self, batch: Batch, outcome: Outcome, call: Call, leaves: Mapping[str, Tensor], evaluating: bool = False
    ) -> None:
        case = self.case
        for name, value in outcome.values.items():
            if name != "indices":
                self.report(difference(name, value, call.outputs[name], bound_of(case, False)))
        if batch.sizes is not None:
            active = sum(batch.sizes)
            if case.layers[-1].kind == "GroupedLinear" and outcome.values["y"][active:].any():
                self.report("y has rows past the sum of the splits that are not zero")
            dx = outcome.grads.get("x")
            if case.layers[0].kind == "GroupedLinear" and dx is not None and dx[active:].any():
                self.report("dx has rows past the sum of the splits that are not zero")
        if evaluating:
            return
        asked = asked_names(case, self.model, batch)
        for name in ("x", *batch.extras):
            want = leaves[name].grad if name in asked else None
            if name in outcome.grads or want is not None:
                self.report(difference(f"d{name}", outcome.grads.get(name), want, bound_of(case, True)))

    def _account(self, batch: Batch, all_leaves: Sequence[Mapping[str, Tensor]], buffers: Mapping[str, Tensor]) -> None:
        """What the parameters' gradients should be by now, by the oracle's."""
        case, owned = self.case, owned_weights(self.model)
        asked = asked_names(case, self.model, batch)
        reached: dict[str, Tensor] = {}
        for leaves in all_leaves:
            found = {n: leaves[n].grad for n in self.expected if n in asked}
            reached |= {n: g + reached.get(n, 0) for n, g in found.items() if g is not None}
        late = {n: g for n, g in reached.items() if n in owned and case.delayed}
        self.expected_main = dict(buffers)
        at_once = {n: g for n, g in reached.items() if n not in late}
        self._add({n: g for n, g in at_once.items() if n not in owned or not case.main_grad})
        self._add_main({n: g for n, g in at_once.items() if n in owned and case.main_grad})
        if case.delayed:
            self._check_gradients("before backward_dw")
            if self.model.need_backward_dw() != bool(late):
                has = "has" if self.model.need_backward_dw() else "has not"
                self.report(f"backward {has} left a gradient to backward_dw, though {sorted(late)} were asked for")
                return
            if late:
                for _ in range(len(all_leaves) * (1 + case.retains_graph)):
                    self.model.backward_dw()
                if self.model.need_backward_dw():
                    self.report("backward_dw left a gradient")
            (self._add_main if case.main_grad else self._add)(late)

    def _add(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            before = self.expected[name]
            self.expected[name] = gradient if before is None else before + gradient

    def _add_main(self, gradients: Mapping[str, Tensor]) -> None:
        weights: Any = owned_weights(self.model)
        for name, gradient in gradients.items():
            first = self.case.main_grad == "overwrite, no flag" or self.expected[name] is None
            overwrites = weights[name].overwrite_main_grad and first
            self.expected_main[name] = gradient if overwrites else self.expected_main[name] + gradient
            self.expected[name] = torch.zeros(())  # a placeholder, and the mark of the first

    def _check_gradients(self, when: str = "") -> None:
        case, weights = self.case, owned_weights(self.model)
        bound = bound_of(case, True)
        if case.main_grad and bound.element is not None and case.main_grad_dtype == torch.float32:
            bound = bound._replace(element=max(bound.element, 1e-6))
        for name, p in self.model.named_parameters():
            held: Any = p
            if name not in weights or case.main_grad is None:
                self.report(difference(f"gradient of {name} {when}".strip(), p.grad, self.expected[name], bound))
                continue
            arrived = self.expected[name] is not None
            main, want = held.main_grad.view(p.shape), self.expected_main[name]
            if not arrived and not bool((main.isnan() & want.isnan() | (main == want)).all()):
                self.report(f"{name}.main_grad was written {when}, though nothing asks for it")
            elif arrived:
                self.report(difference(f"{name}.main_grad {when}".strip(), main, want, bound))
            if hasattr(p, "grad_added_to_main_grad") and held.grad_added_to_main_grad is not arrived:
                self.report(f"{name}.grad_added_to_main_grad is {not arrived} {when}")
            if p.grad is not None:
                if not hasattr(p, "grad_added_to_main_grad"):
                    self.report(f"{name} has a .grad and a main_grad")
                elif case.zero_out_wgrad and p.grad.any():
                    self.report(f"{name} has zero_out_wgrad, but its placeholder is not zero")
                p.grad = None

    def _check_state(self) -> None:
        """Delayed scaling's scales against the oracle's, which goes on from the model's."""
        if self.state is None:
            return
        for (layer, role), history in self.state.histories.items():
            if role is Role.GRAD_OUTPUT and self.case.asked != "all":
                continue  # what no product reads is not quantized
            module = self.model[layer]
            scale = module._buffers.get(f"quantizer_{role.value}_scale")
            amaxes = module._buffers.get(f"quantizer_{role.value}_amax_history")
            name = f"scale of the {role.value} of layer {layer}"
            if scale is None or amaxes is None:
                self.report(f"{name} does not exist")
                continue
            error = ((scale.double() - history.scales).abs() / history.scales).max().item()
            if error > (1e-6 if self.case.dtype == torch.float64 else 0.3 * _outlying(self.case)):
                self.report(f"{name} is {scale.tolist()}, expected {history.scales.tolist()}")
            history.scales, history.amaxes = scale.double(), amaxes.double()

    def _check_other(
        self, kind: str, other: Sequential, batch: Batch, slopes: Mapping[str, Tensor], outcome: Outcome, grads: bool
    ) -> None:
        """Another model with the same parameters and states: the same bits; of fused ones nearly so on a GPU, and where
        a fusion rounds less."""
        case = self.case
        again = Pass(case, other, batch, slopes).run()
        if case.delayed and other.need_backward_dw():
            other.backward_dw()
        stochastic = bound_of(case, True).rms == STOCHASTIC
        exact = kind != "unfused"
        if case.device == "cpu" and not exact:
            exact = "rounds less often" not in self.model.explain(recipe=case.recipe)
        found = {n: (outcome.values[n], again.values[n], False) for n in outcome.values}
        # A fusion that scales the products of a Linear casts dy before it is scaled, unfused operations after it.
        other_casts = not exact and case.recipe.quantizer(Role.GRAD_OUTPUT) is not None
        if not (kind == "unfused" and (stochastic or other_casts)):
            found |= {f"d{n}": (outcome.grads[n], again.grads[n], True) for n in outcome.grads}
            if grads:
                theirs = dict(other.named_parameters())
                found |= {f"gradient of {n}": (p.grad, theirs[n].grad, True) for n, p in self.model.named_parameters()}
        for name, (got, want, gradient) in found.items():
            # Fused operations add the two shares of the scales' gradient before the others.
            bits = exact and not (name == "dscales" and kind == "unfused")
            bits = bits or (got is not None and not got.is_floating_point())
            problem = differing_bits(name, got, want) if bits else difference(name, got, want, bound_of(case, gradient))
            self.report(None if problem is None else f"not the same as {kind}: {problem}")

    def _evaluate(self, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        """y without gradients, which leaves no trace; the next step shows it."""
        case, batch = self.case, make_batch(self.case, next(self.batches))
        self.model.eval()
        with mode():
            one = Pass(changed(case, checkpoint=None), self.model, batch, {})
            outcome = one.run()
        self.model.train(not case.eval_mode)
        call, leaves = self._oracle(self._values(), batch, outcome, {}, records=False)
        self._check_outcome(batch, outcome, call, leaves, evaluating=True)

    def _update(self) -> None:
        for weight in owned_weights(self.model).values() if self.case.main_grad else ():
            w: Any = weight
            if not w.main_grad.isnan().any():
                w.grad = w.main_grad.view(w.shape).to(w.dtype)
        update(self.case, self.model, self.optimizer, self.generator)
        if self.case.refreezes:
            for p in self.model.parameters():
                p.requires_grad_(self.rng.random() < 0.6)
            give_main_grads(self.case, self.model)
        if self.case.copies:
            self._copy()

    def _copy(self) -> None:
        model = copy.deepcopy(self.model)
        give_main_grads(self.case, model, self.model)
        self.model = model
        self.optimizer = self._make_optimizer()

    def _changed_weight(self) -> nn.Parameter | None:
        case, needs = self.case, self.case.x_requires_grad
        if "y" not in case.loss or 0 in case.shape:
            return None
        found = None
        for index, layer in enumerate(case.layers):
            named = [(n, p) for n, p in self.model.named_parameters() if n.startswith(f"{index}.")]
            if needs and layer.kind in ("Linear", "GroupedLinear"):
                found = next((p for n, p in named if "weight" in n), None)
            needs = needs or any(p.requires_grad for _, p in named)
        return found

    def _change_in_flight(self, batch: Batch, slopes: Mapping[str, Tensor], how: str) -> None:
        weight = self._changed_weight()
        assert weight is not None

        def change() -> None:
            if how == "in place":
                with torch.no_grad():
                    weight.mul_(1.5)
            else:
                weight.data = weight.data * 1.5
                weight.data = weight.data * 1.5

        one = Pass(self.case, self.model, batch, slopes)
        try:
            one.forward()
            change()
            one.finish()
        except RuntimeError as error:
            said = str(error)  # torch says the second, of a weight that is saved as an operand
            if "between forward and backward" not in said and "modified by an inplace operation" not in said:
                self.report(f"a weight changed between forward and backward gives {error}")
            return
        self.report(f"a weight changed between forward and backward ({how}) is not noticed")


def _seed(seed: int) -> None:
    """As torch.manual_seed, which takes a millisecond where there is no GPU."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _in_other_form(layer: Layer) -> Layer:
    if layer.kind != "GroupedLinear":
        return layer
    return layer._replace(arguments={**layer.arguments, "stacked": not layer.arguments["stacked"]})


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """What torch.empty hands out is NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = filled


def run_case(case: Case) -> list[str]:
    """The mismatches of a case, a sentence each. An exception is one."""
    with warnings.catch_warnings(), _poisoned_memory():
        warnings.simplefilter("ignore")
        try:
            trial = Trial(case)
            trial.run()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rsplit('/', 2)[-2]}/{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            return [f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:400]}"]
    return trial.problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw new cases")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, help="run the case of this seed alone")
    parser.add_argument("--first", type=int, default=None, help="the first seed; by default one from the clock")
    parser.add_argument("--most", type=int, default=20, help="how many mismatches are printed in full")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        seeds: Iterator[int] = iter([given.seed])
        print(f"case: {draw_case(given.seed, given.device)}", flush=True)
    else:
        seeds = itertools.count(int(time.time()) % 10**6 * 1000 if given.first is None else given.first)
    begin = time.monotonic()
    reported = begin
    kinds: Counter[str] = Counter()
    wrong = 0
    for seed in seeds:
        if given.seed is None and time.monotonic() - begin > 60 * given.minutes:
            break
        try:
            case: Case | None = draw_case(seed, given.device)
            problems = run_case(case)
        except Exception as error:
            case, problems = None, [f"drawing it: {type(error).__name__}: {error}"]
        kinds[f"{case.kind}, {case.recipe.name}" if case else "none"] += 1
        if problems:
            wrong += 1
            if wrong <= given.most:
                print(f"MISMATCH seed {seed}\n  {case}", *problems, sep="\n    ", flush=True)
            else:
                print(f"MISMATCH seed {seed}: {problems[0]}", flush=True)
        now = time.monotonic()
        if now - reported > 30:
            reported = now
            print(f"{now - begin:.0f} s: {kinds.total()} cases, {wrong} with mismatches", flush=True)
    seconds = time.monotonic() - begin
    print(f"\n{kinds.total()} cases in {seconds:.1f} s, {kinds.total() / seconds:.1f} a second")
    for kind, count in sorted(kinds.items()):
        print(f"  {count:6d}  {kind}")
    print(f"{wrong} cases with mismatches", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
