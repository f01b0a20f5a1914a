"""Compare a fusion, built-in or user-defined, with the operations that it replaces."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import deterministic

from fuser.layout import Layout
from fuser.plan import Fusion, check_fusion_class, fusions_version
from fuser.sequential import Sequential
from ops.runner.operation import BasicOperation
from ops.runner.run import Pipeline
from recipes.arguments import positive_integers
from recipes.autocast import autocast
from recipes.recipe import Recipe
from recipes.registry import as_recipe
from recipes.request import PlanRequest
from recipes.tensors.splits import Splits

# Relative to the largest magnitude of the expected tensor. Under a recipe, codes may flip: allow twice their spacing.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


_IN_PART = 1, 3  # draws of 8 in which y alone, and the extra outputs alone, have a gradient


class Difference(NamedTuple):
    """The difference of one tensor between the fused and the unfused run."""

    name: str
    largest: float
    rms: float
    worst_index: tuple[int, ...]
    scale: float


def check_fusion(
    fusion: Fusion,
    make_operations: Callable[[], Sequence[BasicOperation]],
    x_shape: Sequence[int],
    *,
    extras: Mapping[str, Sequence[int] | Tensor] | None = None,
    num_groups: int | None = None,
    recipe: Recipe | str | None = None,
    path: str | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    draws: int = 8,
    seed: int = 0,
    tolerance: float | None = None,
) -> list[Difference]:
    """Run the operations fused and unfused on the same random numbers, and compare all outputs and gradients.

    Each run begins with the same seed of torch's generators of the CPU and of `device`, and leaves them as they were.

    Compared: y, every differentiable extra output, and the gradients of x, of every parameter and of every extra input;
    in 8 draws also with x, one parameter or one extra input frozen, with gradients of y alone, of the extra outputs
    alone, and such that lie as those of a sum or a slice, and without grad mode. Splits are drawn for each run: with
    empty groups, all rows in one group, all groups empty, and fewer rows than x has. Uninitialised memory is filled
    with NaN. x, the extra inputs, and the gradients that are handed in must be what they were, but for what an
    operation writes into in place.

    fusion:          the class. It is the only fusion tried, and must match the operations.
    make_operations: returns new operations; both runs use copies of the same parameters
    x_shape:         shape of x; its first dimension counts rows
    extras:          shapes of the extra inputs, by name, or tensors that each draw takes as they are, such as indices;
                     split sizes need only num_groups
    draws:           how many times, with other numbers; at least one
    tolerance:       largest difference, relative to the largest magnitude of the expected tensor; with the gradients of
                     some outputs alone, to that of the first draw if it is larger

    What the passes of a fusion with `rounds_less` compute is held to the unfused run in float64 instead, from the same
    numbers: within half a last place of each number in `dtype`, and beyond that `tolerance`, by default that of float32
    (in which it is summed). Quantized from other numbers than unfused, as a factor later, it needs a wider one; and in
    float64 an operation that draws numbers in the dtype of x draws others.

    Returns the differences of the last draw. Raises AssertionError if the fusion does not match, or if a tensor differs
    by more than the tolerance; the message names the tensor and the worst index. Raises TypeError for what is no fusion
    and for a dtype that is not in `TOLERANCES`, ValueError for draws below 1, for extras that are missing or not taken,
    and for a shape where random numbers will not do.
    """
    check_fusion_class(fusion)
    if dtype not in TOLERANCES:
        raise TypeError(f"dtype is {dtype!r}, but must be one of {', '.join(map(str, TOLERANCES))}.")
    (draws,) = positive_integers("check_fusion", draws=draws)
    device = torch.device(device)
    chosen = as_recipe(recipe)
    if tolerance is None:
        tolerance = TOLERANCES[torch.promote_types(dtype, torch.float32) if fusion.rounds_less else dtype]
    generator = torch.Generator().manual_seed(seed)
    operations = [operation.to(device=device, dtype=dtype) for operation in make_operations()]
    fused = Sequential(*operations, fusions=(fusion,), path=path)
    unfused = Sequential(*copy.deepcopy(operations), fusions=(), path=path)
    exact = Sequential(*copy.deepcopy(operations), fusions=(), path=path).double() if fusion.rounds_less else None
    layout = fused.layout()
    if not _is_used(layout, chosen, device, dtype):
        plan = fused.explain(recipe=chosen, device=device, dtype=dtype)
        raise AssertionError(f"{fusion.__name__} was not used:\n{plan}")
    kinds = {o.extra_name(n): kind for o in operations for n, kind in o.extra_inputs.items()}
    shapes = extras or {}
    _check_known(shapes, [name for name in layout.consumed if kinds[name] is not Splits])
    outputs = [o.extra_name(n) for o in operations for n, kind in o.extra_outputs.items() if kind is Tensor]
    written = [o.extra_name(o.in_place_input) for o in operations if o.in_place_input is not None]
    differences: list[Difference] = []
    scales: dict[str, float] = {}  # of the first draw, with all gradients
    for draw in range(draws):
        x = _random(x_shape, dtype, device, generator)
        given: dict[str, Any] = {}
        for name in layout.consumed:
            if kinds[name] is Splits:
                if num_groups is None:
                    raise ValueError(f"The operations ask for {name!r}. Give num_groups.")
                given[name] = random_splits(num_groups, x_shape[0], generator, kind=draw).to(device)
            else:
                given[name] = _filled(name, kinds[name], shapes.get(name), dtype, device, generator)
        frozen = _frozen([name for name, _ in fused.named_parameters()], draw, draw % 2 == 1)
        floats = [name for name, value in given.items() if value.is_floating_point()]
        frozen |= _frozen(floats, draw, draw % 8 in (4, 6))
        where = f"{fusion.__name__}, draw {draw}"
        results: list[_Result] = []
        for sequential in (unfused, fused, exact):
            if sequential is None:
                continue
            own = torch.float64 if sequential is exact else dtype
            for name, parameter in sequential.named_parameters():
                parameter.requires_grad_(name not in frozen)
            inputs = {n: _leaf(v, own, n in floats and n not in frozen) for n, v in given.items()}
            own_x = _leaf(x, own, draw % 8 not in (2, 7))
            with poisoned_memory(), _seeded(device, seed + draw), autocast(recipe=chosen):
                alike = results[0] if sequential is fused else None
                results.append(_run(sequential, own_x, inputs, outputs, draw, dtype, where, alike))
            if sequential is fused:
                left = {"x": (own_x, x)} | {n: (inputs[n], v) for n, v in given.items() if n not in written}
                _check_left(where, left)
        differences = _compare(*results) if exact is None else _compare_rounded(fusion, dtype, *results)
        splits = {name: value.tolist() for name, value in given.items() if kinds[name] is Splits}
        for difference in differences:
            # Where some gradients are left out, what is left may be the rounding errors of zeros.
            of_all = scales.get(difference.name, 0.0) if draw % 8 in _IN_PART else 0.0
            scale = max(difference.scale, of_all)
            if not difference.largest <= tolerance * scale:
                raise AssertionError(
                    f"{where}: {difference.name} is off by {difference.largest:.3e} at "
                    f"{difference.worst_index} (RMS {difference.rms:.3e}); allowed {tolerance:.1e} of "
                    f"{scale:.3e}. Split sizes: {splits}"
                )
        scales = scales or {difference.name: difference.scale for difference in differences}
    return differences


def _is_used(layout: Layout, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether any plan for this recipe, device and dtype contains a fused step, in grad mode or without."""
    pipelines = [stage.runner for stage in layout.stages if isinstance(stage.runner, Pipeline)]
    for pipeline, grad_mode in itertools.product(pipelines, (True, False)):
        path = pipeline.path or recipe.path
        with torch.set_grad_enabled(grad_mode):
            needs = pipeline.needs_now(True)
        request = PlanRequest(recipe, device, dtype, needs, True, path, fusions_version())
        plan = pipeline.planner(pipeline.operations, request)
        if any(step.fused for step in (*plan.forward, *plan.backward)):
            return True
    return False


def random_splits(num_groups: int, rows: int, generator: torch.Generator, *, kind: int = 0) -> Tensor:
    """Split sizes of at most `rows` rows, [num_groups] int64 on the host.

    kind % 5: 0 random with empty groups, 1 all rows in one group, 2 all empty, 3 random with rows left over,
    4 one row in some groups.
    """
    weights = torch.rand(num_groups, generator=generator) * (torch.rand(num_groups, generator=generator) > 0.4)
    total = rows if kind % 5 != 3 else int(torch.randint(0, rows + 1, (), generator=generator))
    if kind % 5 == 1:
        weights = torch.zeros(num_groups)
        weights[int(torch.randint(0, num_groups, (), generator=generator))] = 1
    if kind % 5 == 4:
        return torch.tensor([1 if group < rows and weights[group] > 0 else 0 for group in range(num_groups)])
    if kind % 5 == 2 or not weights.any():
        return torch.zeros(num_groups, dtype=torch.int64)
    chosen = (
        torch.multinomial(weights, total, replacement=True, generator=generator) if total else torch.empty(0).long()
    )
    return torch.bincount(chosen, minlength=num_groups)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, new memory is filled with NaN (or the largest integer), so that elements never written are visible."""
    settings: Any = deterministic
    fill = settings.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill


def _check_alike(name: str, actual: Tensor, expected: Tensor | None) -> None:
    """Raise AssertionError if they differ in shape or dtype."""
    if expected is not None and (actual.shape != expected.shape or actual.dtype != expected.dtype):
        raise AssertionError(
            f"{name} is {list(actual.shape)} {actual.dtype}, expected {list(expected.shape)} {expected.dtype}."
        )


def compare(name: str, actual: Tensor | None, expected: Tensor | None) -> Difference:
    """The largest difference and its index, and the RMS difference. NaN against a number counts as infinity."""
    if actual is None or expected is None:
        same = actual is expected
        return Difference(name, 0.0 if same else float("inf"), 0.0, (), 1.0)
    _check_alike(name, actual, expected)
    a, b = actual.detach().double().cpu(), expected.detach().double().cpu()
    if a.numel() == 0:
        return Difference(name, 0.0, 0.0, (), 1.0)
    agree = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(agree, 0.0, (a - b).abs()).nan_to_num(float("inf"))
    index = torch.unravel_index(error.argmax(), error.shape)
    scale = max(b.abs().nan_to_num(0.0, posinf=0.0).max().item(), torch.finfo(torch.float32).tiny)
    return Difference(name, error.max().item(), error.square().mean().sqrt().item(), tuple(map(int, index)), scale)


def _leaf(value: Tensor, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    """The same numbers in dtype, integers as they are, in memory of their own."""
    value = value.detach().clone()
    return (value.to(dtype) if value.is_floating_point() else value).requires_grad_(requires_grad)


def _check_known(extras: Iterable[str], known: Sequence[str]) -> None:
    if unknown := [name for name in extras if name not in known]:
        asked = ", ".join(map(repr, known)) or "none"
        raise ValueError(f"extras has {unknown[0]!r}, but the operations ask for: {asked}. Leave it out.")


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the generators of the CPU and of the device begin at this seed; then they are as they were."""
    on_device = device.type == "cuda"
    with torch.random.fork_rng([device] if on_device else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices too
        if on_device:
            torch.cuda.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), device)
        yield


def _filled(
    name: str,
    kind: type,
    asked: Sequence[int] | Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> Tensor:
    """The tensor that is given for an extra input, or random numbers of the shape that is given."""
    if isinstance(asked, Tensor):
        return asked.to(device)
    if kind is not Tensor:
        raise ValueError(
            f"The operations ask for {name!r} of kind {kind.__name__}, which random numbers cannot fill. "
            "Give the tensor itself in extras."
        )
    if asked is None:
        raise ValueError(f"The operations ask for {name!r}. Give its shape in extras.")
    return _random(asked, dtype, device, generator)


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator).to(device=device, dtype=dtype)


def _frozen(names: Sequence[str], draw: int, freezes: bool) -> set[str]:
    """The one of these that is frozen in this draw, if one is; they are taken in turn."""
    return {names[(draw // 2) % len(names)]} if names and freezes else set()


def _check_left(where: str, now_and_before: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise AssertionError if one of these tensors is not what it was."""
    for name, (now, before) in now_and_before.items():
        if compare(name, now, before.to(now.dtype)).largest:
            raise AssertionError(f"{where}: {name} was changed in place. Others read it too: write into new memory.")


def _laid_out(gradient: Tensor, draw: int) -> Tensor:
    """It, one number of it in each place as of a sum, or it as a slice of something larger."""
    if draw % 8 == 5 and gradient.numel():
        return gradient.flatten()[0].expand(gradient.shape)
    return torch.stack([gradient, gradient], -1)[..., 0] if draw % 8 == 6 else gradient


class _Result(NamedTuple):
    """What the forward and what the backward pass gave, by name."""

    forward: dict[str, Tensor | None]
    backward: dict[str, Tensor | None]

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {**self.forward, **self.backward}


def _run(
    sequential: Sequential,
    x: Tensor,
    extras: Mapping[str, Any],
    outputs: Sequence[str],
    draw: int,
    dtype: torch.dtype,
    where: str,
    alike: _Result | None,
) -> _Result:
    """The outputs, and the gradients for random gradients of them that dtype holds.

    Raises AssertionError for outputs of other shapes or dtypes than those of `alike`, and for gradients of them that
    were changed in place.
    """
    sequential.zero_grad()
    with torch.no_grad():
        without_grad = sequential(x, **extras)
    y = sequential(x, outputs=outputs, **extras)
    y, made = y if outputs else (y, {})
    generator = torch.Generator().manual_seed(draw)
    heads = {"y": y, **made}
    if alike is not None:
        for name, head in heads.items():
            _check_alike(name, head, alike.forward[name])
    weights = {n: _random(head.shape, dtype, head.device, generator).to(head.dtype) for n, head in heads.items()}
    of_y, of_extras = _IN_PART
    used = {of_y: ["y"], of_extras: list(made)}.get(draw % 8) or list(heads)
    roots = [name for name in used if heads[name].requires_grad]
    given = {f"the gradient of {name}": _laid_out(weights[name], draw) for name in roots}
    before = {name: gradient.clone() for name, gradient in given.items()}
    torch.autograd.backward([heads[name] for name in roots], list(given.values()))
    if alike is not None:
        _check_left(where, {name: (gradient, before[name]) for name, gradient in given.items()})
    made_forward: dict[str, Tensor | None] = {**heads, "y without grad mode": without_grad}
    made_backward = {"gradient of x": x.grad}
    made_backward |= {f"gradient of {n}": p.grad for n, p in sequential.named_parameters()}
    made_backward |= {f"gradient of {n}": v.grad for n, v in extras.items() if v.is_floating_point()}
    return _Result(made_forward, made_backward)


def _compare(unfused: _Result, fused: _Result) -> list[Difference]:
    return [compare(name, tensor, unfused.tensors[name]) for name, tensor in fused.tensors.items()]


def _compare_rounded(
    fusion: Fusion, dtype: torch.dtype, unfused: _Result, fused: _Result, exact: _Result
) -> list[Difference]:
    """What the fusion's passes compute against the exact results, all else against the unfused ones."""
    passes = {"forward": fused.forward, "backward": fused.backward}
    differences = []
    for name, tensor in fused.tensors.items():
        expected = unfused.tensors[name]
        if name in passes.get(fusion.passes, fused.tensors):
            expected = exact.tensors[name]
            tensor = tensor if tensor is None or expected is None else _nearer(tensor, expected, dtype)
        differences.append(compare(name, tensor, expected))
    return differences


def _nearer(tensor: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in float64, each number nearer to the exact one by half a last place in dtype."""
    limits = torch.finfo(dtype)
    half_a_place = exact.abs().clamp(min=limits.smallest_normal) * (limits.eps / 2)
    wide = tensor.double()
    return wide + (exact - wide).clamp(-half_a_place, half_a_place)
