"""Compare a fusion, built-in or user-defined, with the operations that it replaces."""

from __future__ import annotations

import copy
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
    also with x or one parameter frozen, and without grad mode. Splits are drawn for each run: with empty groups, all
    rows in one group, all groups empty, and fewer rows than x has. Uninitialised memory is filled with NaN.

    fusion:          the class. It is the only fusion tried, and must match the operations.
    make_operations: returns new operations; both runs use copies of the same parameters
    x_shape:         shape of x; its first dimension counts rows
    extras:          shapes of the extra inputs, by name, or tensors that each draw takes as they are, such as indices;
                     split sizes need only num_groups
    draws:           how many times, with other numbers; at least one
    tolerance:       largest difference, relative to the largest magnitude of the expected tensor

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
    differences: list[Difference] = []
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
        frozen = _frozen(fused, draw)
        results: list[_Result] = []
        for sequential in (unfused, fused, exact):
            if sequential is None:
                continue
            own = torch.float64 if sequential is exact else dtype
            for name, parameter in sequential.named_parameters():
                parameter.requires_grad_(name not in frozen)
            inputs = {n: _leaf(v, own, v.is_floating_point()) for n, v in given.items()}
            with poisoned_memory(), _seeded(device, seed + draw), autocast(recipe=chosen):
                alike = results[0] if sequential is fused else None
                results.append(_run(sequential, _leaf(x, own, draw % 4 != 3), inputs, outputs, draw, dtype, alike))
        differences = _compare(*results) if exact is None else _compare_rounded(fusion, dtype, *results)
        splits = {name: value.tolist() for name, value in given.items() if kinds[name] is Splits}
        for difference in differences:
            if not difference.largest <= tolerance * difference.scale:
                raise AssertionError(
                    f"{fusion.__name__}, draw {draw}: {difference.name} is off by {difference.largest:.3e} at "
                    f"{difference.worst_index} (RMS {difference.rms:.3e}); allowed {tolerance:.1e} of "
                    f"{difference.scale:.3e}. Split sizes: {splits}"
                )
    return differences


def _is_used(layout: Layout, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether any plan for this recipe, device and dtype contains a fused step."""
    for stage in layout.stages:
        if isinstance(stage.runner, Pipeline):
            pipeline = stage.runner
            path = pipeline.path or recipe.path
            request = PlanRequest(recipe, device, dtype, pipeline.all_needs(True), True, path, fusions_version())
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


def _frozen(sequential: Sequential, draw: int) -> set[str]:
    """The parameters frozen in this draw: none in even draws, one in odd ones, taken in turn."""
    names = [name for name, _ in sequential.named_parameters()]
    return {names[(draw // 2) % len(names)]} if names and draw % 2 else set()


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
    alike: _Result | None,
) -> _Result:
    """The outputs, and the gradients for random gradients of them that dtype holds.

    Raises AssertionError for outputs of other shapes or dtypes than those of `alike`.
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
    roots = [head for head in heads.values() if head.requires_grad]
    torch.autograd.backward(roots, [weights[name] for name, head in heads.items() if head.requires_grad])
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
