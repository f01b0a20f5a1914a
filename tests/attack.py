"""Random layers, recipes, splits, strides, optimizers and what else a trainer does, against an oracle in float64.

    python -m tests.attack --minutes 10                  on a CPU; --device cuda on a GPU, with larger shapes too
    python -m tests.attack --device cuda --seed 123      one case again

Each case follows from its seed. A mismatch prints the seed, the case and what differed, and the run goes on; at the end
stand the counts. The exit status is 1 if there was a mismatch. Apart from `make test`, which runs a handful of seeds.

Compared are, step by step, y, every gradient and every gradient buffer with `tests.attack_oracle`, on the parameters as
they are at that moment; and properties: a copy of the model gives the same bits (it has no quantized weights of
before), unfused gives the bits of fused on a CPU, rows past the sum of the splits are zero, an input is left as it was,
and a gradient that nobody asked for is computed nowhere.
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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fuser import Sequential, autocast, checkpoint, ops
from ops.main_grad import OperationWithWeights
from recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    HighPrecision,
    MixedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Role,
)
from recipes.formats import Format
from tests.attack_oracle import ACTIVATIONS, CLAMPED, GATES, SITU, UNGATED, Call, DelayedState, Layer

FORWARD_ROLES = (Role.INPUT, Role.WEIGHT)
SCALED = ("ScaledSwiGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU")
# What squares its input leaves the range of every dtype after a few layers.
MILD = tuple(kind for kind in ACTIVATIONS if "SRe" not in kind)
LAYOUTS = ("contiguous", "transposed", "wide", "every second row", "offset", "expanded rows", "expanded columns")


@dataclass(frozen=True)
class Case:
    """All that a case does. Printed, it is the report's second line."""

    seed: int
    device: str
    kind: str
    layers: tuple[Layer, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    recipe: Recipe
    groups: int = 0
    splits: str = "random"
    tail: int = 0
    sizes_as: str = "int64"
    path: str | None = None
    x_layout: str = "contiguous"
    dy_layout: str = "contiguous"
    poisoned_tail: bool = False
    x_requires_grad: bool = True
    extras_require_grad: bool = True
    outside: tuple[tuple[str, int], ...] = ()  # extra inputs of the caller's: name and the layer that takes it
    frozen: tuple[str, ...] = ()
    main_grad: str | None = None  # None, "add", "overwrite", "overwrite, no flag"
    main_grad_dtype: torch.dtype = torch.float32
    zero_out_wgrad: bool = False
    delayed: bool = False
    asked: str = "all"  # "all", "grad of x", "inputs: x", "inputs: some"
    loss: str = "y"  # "y", "y and balance", "balance"
    scope: str = "forward"  # of autocast: "forward", "forward and backward", "inside"
    checkpoint: str | None = None
    steps: int = 1
    microbatches: int = 1
    update: str = "none"
    evaluates: bool = False
    copies: bool = False
    compares_copy: bool = True
    compares_unfused: bool = False
    in_flight: str | None = None

    def __str__(self) -> str:
        defaults = {f.name: f.default for f in fields(self)}
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = {name: value for name, value in given.items() if name != "layers" and value != defaults[name]}
        layers = " -> ".join(
            f"{kind}({', '.join(f'{k}={v}' for k, v in arguments.items())})" + (f" under {own}" if own else "")
            for kind, arguments, own in self.layers
        )
        return ", ".join(f"{name}={value}" for name, value in shown.items()) + f"\n    layers: {layers}"


# ------------------------------------------------------------------------------------------------------------- drawing


def draw_case(seed: int, device: str = "cpu") -> Case:
    """The case of this seed on this kind of device."""
    rng = random.Random(seed)
    on_gpu = device.startswith("cuda")
    kind = rng.choices(["dense", "grouped", "layer of experts"], [4, 4, 2])[0]
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    dtype = rng.choices(dtypes, [2, 2, 5, 1] if on_gpu else [5, 2, 2, 1])[0]
    recipe = _recipe(rng)
    draw = _Draw(rng, on_gpu, recipe, dtype)
    choices: dict[str, Any] = getattr(draw, {"dense": "dense", "grouped": "grouped"}.get(kind, "experts"))()
    layers = choices.pop("layers")
    has_groups = any(layer.kind == "GroupedLinear" for layer in layers)
    has_weights = has_groups or any(layer.kind == "Linear" for layer in layers)
    if has_weights and not isinstance(recipe, DelayedScaling) and rng.random() < 0.1:
        at = rng.choice([i for i, layer in enumerate(layers) if layer.kind in ("Linear", "GroupedLinear")])
        own = rng.choice([HighPrecision(), MXFP8BlockScaling(), Float8CurrentScaling()])
        layers[at] = layers[at]._replace(recipe=own)
    if has_groups:
        choices["path"] = rng.choices([None, "split", "grouped"], [6, 2, 1])[0]
        if choices["path"] == "grouped" and on_gpu and dtype == torch.float64:
            choices["path"] = None
    choices |= _of_training(rng, layers, recipe, has_weights, kind)
    choices["x_layout"] = rng.choice(LAYOUTS) if rng.random() < 0.5 else "contiguous"
    choices["dy_layout"] = rng.choice((*LAYOUTS, "one number")) if rng.random() < 0.5 else "contiguous"
    case = Case(seed, device, kind, tuple(layers), dtype=dtype, recipe=recipe, **choices)
    names = [name for name, _ in build(case).named_parameters()]
    frozen: tuple[str, ...] = ()
    if rng.random() < 0.4:
        share = rng.choice([0.2, 0.5, 0.9])
        frozen = tuple(name for name in names if rng.random() < share)
    x_requires_grad = rng.random() < 0.75 or "x" in case.asked or "reentrant" in str(case.checkpoint)
    return _with(case, frozen=frozen, x_requires_grad=x_requires_grad)


def _with(case: Case, **changes: Any) -> Case:
    return Case(**{f.name: getattr(case, f.name) for f in fields(case)} | changes)


def _recipe(rng: random.Random) -> Recipe:
    kind = rng.choices(["none", "delayed", "current", "block", "mxfp8", "nvfp4", "mixed"], [3, 2, 2, 2, 2, 3, 1])[0]
    form = rng.choice([Format.HYBRID, Format.E4M3])
    if kind == "none":
        return HighPrecision()
    if kind == "delayed":
        return DelayedScaling(
            margin=rng.choice([0, 0, 1]), fp8_format=form, amax_history_len=rng.choice([1, 2, 3, 16]),
            amax_compute_algo=rng.choice(["max", "most_recent"]),
        )  # fmt: skip
    if kind == "current":
        epsilon = rng.choice([0.0, 0.0, 1e-3])
        return Float8CurrentScaling(fp8_format=form, power_2_scale=rng.random() < 0.3, amax_epsilon=epsilon)
    if kind == "block":
        dims = rng.choices([(1, 2, 1), (1, 1, 1), (2, 1, 1), (1, 1, 2)], [5, 1, 1, 1])[0]
        return Float8BlockScaling(
            fp8_format=form, use_f32_scales=rng.random() < 0.3, x_block_scaling_dim=dims[0],
            w_block_scaling_dim=dims[1], grad_block_scaling_dim=dims[2],
        )  # fmt: skip
    if kind == "mxfp8":
        floor = rng.random() < 0.2
        return MXFP8BlockScaling(
            fp8_format=form, scaling="floor" if floor else "round_up", enable_2d_quantization=rng.random() < 0.2
        )
    if kind == "nvfp4":
        return NVFP4BlockScaling(
            disable_rht=rng.random() < 0.5, disable_stochastic_rounding=rng.random() < 0.7,
            disable_2d_quantization=rng.random() < 0.3, row_scaled_activation=rng.random() < 0.2,
        )  # fmt: skip
    some = ["high_precision", "fp8_current", "mxfp8", "fp8_block", NVFP4BlockScaling(True, True)]
    return MixedScaling(
        input=rng.choice(some), weight=rng.choice(some), grad_output=rng.choice(some),
        input_for_wgrad=rng.choice([None, *some]), weight_for_dgrad=rng.choice([None, *some]),
        grad_output_for_wgrad=rng.choice([None, *some]),
    )  # fmt: skip


def _of_training(
    rng: random.Random, layers: Sequence[Layer], recipe: Recipe, has_weights: bool, kind: str
) -> dict[str, Any]:
    """What the trainer does."""
    chosen: dict[str, Any] = {"steps": rng.choice([1, 2, 2, 3]), "microbatches": rng.choices([1, 2, 3], [6, 2, 1])[0]}
    quantizes = not isinstance(recipe, HighPrecision)
    stateful = isinstance(recipe, DelayedScaling)
    if chosen["steps"] > 1:
        chosen["update"] = rng.choice(UPDATES)
        chosen["evaluates"] = rng.random() < 0.3
        chosen["copies"] = rng.random() < 0.1
    if has_weights and rng.random() < 0.35:
        chosen["main_grad"] = rng.choice(["add", "overwrite", "overwrite, no flag"])
        chosen["main_grad_dtype"] = rng.choice([torch.float32, torch.float32, None])
        chosen["zero_out_wgrad"] = rng.random() < 0.2
    if has_weights and rng.random() < 0.25:
        chosen["delayed"] = True
    if kind == "layer of experts":
        chosen["loss"] = rng.choices(["y", "y and balance", "balance"], [3, 3, 1])[0]
    if rng.random() < 0.2:
        chosen["checkpoint"] = rng.choice(["fuser", "fuser, reentrant", "torch, reentrant", "torch"])
    if "reentrant" in str(chosen.get("checkpoint")) and chosen.get("loss") == "balance":
        chosen["loss"] = "y and balance"  # torch gives such a segment zeros where nothing came
    scopes = ["forward", "forward", "forward and backward", "inside"]
    if stateful and str(chosen.get("checkpoint")).startswith("torch"):
        scopes = ["forward and backward"]
    chosen["scope"] = rng.choice(scopes)
    if "reentrant" not in str(chosen.get("checkpoint")) and chosen.get("loss", "y") == "y":
        chosen["asked"] = rng.choices(["all", "grad of x", "inputs: x", "inputs: some"], [8, 1, 1, 1])[0]
        if chosen["asked"] != "all" and stateful:
            chosen |= {"steps": 1, "microbatches": 1}  # whether an amax is recorded then is not promised
    chosen["compares_copy"] = rng.random() < (0.6 if quantizes else 0.2)
    chosen["compares_unfused"] = rng.random() < 0.25
    plain = chosen.get("asked") == "all" and not chosen.get("checkpoint") and not chosen.get("delayed")
    if has_weights and plain and rng.random() < 0.08:
        chosen["in_flight"] = rng.choice(["in place", "data twice"])
    return chosen


class _Draw:
    """Draws the layers, the shape of x and the splits."""

    def __init__(self, rng: random.Random, on_gpu: bool, recipe: Recipe, dtype: torch.dtype) -> None:
        self.rng, self.on_gpu = rng, on_gpu
        self.large = on_gpu and rng.random() < 0.4
        self.mild = MILD if rng.random() < 0.9 else ACTIVATIONS
        self.names = (f"branch{i}" for i in itertools.count())
        self.layers: list[Layer] = []

    def width(self) -> int:
        if self.large:
            return 64 * self.rng.randint(1, 8)
        if self.rng.random() < 0.15:
            return self.rng.choice([5, 7, 9, 20, 33, 130])
        return self.rng.choice([16, 16, 32, 32, 48, 64, 128, 144])

    def rows(self) -> int:
        if self.large:
            return self.rng.choice([1, 100, 512, 1000, 2048, 3001])
        return self.rng.choice([0, 1, 1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 40])

    def add(self, kind: str, **arguments: Any) -> None:
        self.layers.append(Layer(kind, arguments))

    def activation(self, kinds: Sequence[str], width: int) -> int:
        """Add one that fits the width; returns the features behind it."""
        fitting = [kind for kind in kinds if kind in UNGATED or width % 2 == 0]
        if not fitting:
            fitting = ["GELU"]
        kind = self.rng.choice(fitting)
        given: dict[str, Any] = {}
        gated = kind not in UNGATED
        if gated and "glu_interleave_size" in _arguments(kind) and self.rng.random() < 0.3:
            runs = [size for size in (1, 2, 4, 8, 32) if width % (2 * size) == 0]
            given["glu_interleave_size"] = self.rng.choice(runs)
        if kind in CLAMPED and self.rng.random() < 0.3:
            given |= {"limit": 0.7, "alpha": 1.1, "glu_linear_offset": 0.5}
        if kind in SITU and self.rng.random() < 0.3:
            given |= {"beta1": 1.5, "beta2": 3.0}
        if "cache_quantized_input" in _arguments(kind) and self.rng.random() < 0.1:
            given["cache_quantized_input"] = True
        self.add(kind, **given)
        return width // 2 if gated else width

    def norm(self, width: int) -> None:
        kind = self.rng.choice(["RMSNorm", "RMSNorm", "LayerNorm", "L2Normalization"])
        if kind == "L2Normalization":
            self.add(kind)
        else:
            self.add(kind, normalized_shape=width, zero_centered_gamma=self.rng.random() < 0.3)

    def chain(self, width: int, length: int, shape: tuple[int, ...]) -> tuple[int, list[tuple[str, int]]]:
        """Dense operations; returns the features behind them, and the extra inputs that the caller gives."""
        rng, open_branches, outside = self.rng, [], []
        for _ in range(length):
            choice = rng.choice(
                ["linear"] * 5 + ["bias"] * 2 + ["norm"] * 2 + ["activation"] * 3
                + ["scale", "dropout", "reshape", "branch", "branch", "join", "join", "outside", "identity"]
            )  # fmt: skip
            if choice == "linear":
                fitting = [w for _, w in open_branches]
                new = rng.choice(fitting) if fitting and rng.random() < 0.5 else self.width()
                self.add("Linear", in_features=width, out_features=new, bias=rng.random() < 0.6)
                width = new
            elif choice == "bias":
                self.add("Bias", size=width)
            elif choice == "norm":
                self.norm(width)
            elif choice == "activation":
                width = self.activation([kind for kind in self.mild if kind not in SCALED], width)
            elif choice == "scale":
                self.add("ConstantScale", scale=rng.choice([0.5, -1.0, 0.3, 2.0]))
            elif choice == "dropout":
                self.add("Dropout", p=0.0)
            elif choice == "identity":
                self.add("Identity")
            elif choice == "reshape" and len(shape) == 2 and shape[0]:
                self.add("Reshape", shape=(-1, width))
            elif choice == "branch":
                name = next(self.names)
                self.add("MakeExtraOutput", name=name)
                open_branches.append((name, width))
            elif choice == "join":
                fitting_names = [name for name, w in open_branches if w == width]
                if fitting_names:
                    self.add("AddExtraInput", name=rng.choice(fitting_names))
            elif choice == "outside" and rng.random() < 0.5:
                name = f"outside{len(outside)}"
                self.add("AddExtraInput", name=name)
                outside.append((name, width))
        return width, outside

    def dense(self) -> dict[str, Any]:
        width, rows = self.width(), self.rows()
        lead = self.rng.choices([(rows,), (2, rows), ()], [8, 2, 0 if self.on_gpu else 0.2])[0]
        shape = (*lead, width)
        _, outside = self.chain(width, self.rng.randint(1, 8), shape)
        if not self.layers:
            self.add("Identity")
        return {"layers": self.layers, "shape": shape, "outside": tuple(outside)}

    def splits(self) -> dict[str, Any]:
        kinds = ["random", "random", "some empty", "one takes all", "all empty", "equal"]
        how = self.rng.choice(["list", "int32", "int64", "int64", "int32 on host", "int64 on host", "every second"])
        return {
            "groups": self.rng.choice([1, 2, 3, 4, 5, *([8, 33] if self.large else [])]),
            "splits": self.rng.choice(kinds), "sizes_as": how,
        }  # fmt: skip

    def mlp(self, groups: int, width: int, out: int | None = None) -> int:
        rng = self.rng
        inner = self.width()
        scaled = rng.random() < 0.6
        kinds = [k for k in (*SCALED, "SwiGLU", "SiTUGLU", "ClampedSwiGLU") if (k in SCALED) is scaled]
        if rng.random() < 0.2:
            kinds = [kind for kind in self.mild if kind not in SCALED]
        self.grouped_linear(groups, width, inner)
        inner = self.activation(kinds, inner)
        takes_scales = self.layers[-1].kind in SCALED
        out = out or self.width()
        self.grouped_linear(groups, inner, out, scale_bias=takes_scales and rng.random() < 0.3)
        return out

    def grouped_linear(self, groups: int, width: int, out: int, scale_bias: bool = False) -> None:
        bias = scale_bias or self.rng.random() < 0.4
        self.add(
            "GroupedLinear", num_groups=groups, in_features=width, out_features=out, bias=bias, scale_bias=scale_bias,
            stacked=self.rng.random() < 0.7,
        )  # fmt: skip

    def grouped(self) -> dict[str, Any]:
        rng, width, splits = self.rng, self.width(), self.splits()
        shape, outside = (self.rows(), width), []
        if rng.random() < 0.25:
            width, outside = self.chain(width, rng.randint(1, 3), shape)
        if rng.random() < 0.2:
            out = self.width()
            self.grouped_linear(splits["groups"], width, out, scale_bias=rng.random() < 0.3)
            width = out
        else:
            width = self.mlp(splits["groups"], width)
        if rng.random() < 0.15:
            width = self.mlp(splits["groups"], width)
        if rng.random() < 0.2 and not outside:
            width, outside = self.chain(width, rng.randint(1, 3), shape)
        tail = rng.choice([0, 0, 1, 5]) if not self.large else rng.choice([0, 1, 200])
        whole = [layer.kind == "GroupedLinear" for layer in (self.layers[0], self.layers[-1])]
        poisoned = all(whole) and rng.random() < 0.3
        return splits | {
            "layers": self.layers, "shape": shape, "tail": tail, "outside": tuple(outside), "poisoned_tail": poisoned,
        }  # fmt: skip

    def experts(self) -> dict[str, Any]:
        rng, width = self.rng, self.width()
        groups = rng.choice([1, 2, 4, 5, *([16, 64] if self.large else [])])
        residual = rng.random() < 0.6
        if residual:
            self.add("MakeExtraOutput", name="residual")
        if rng.random() < 0.6:
            self.norm(width)
        self.add(
            "Router", hidden_size=width, num_experts=groups, topk=rng.randint(1, min(groups, 4)),
            use_pre_softmax=rng.random() < 0.5, normalize_probs=rng.random() < 0.3,
        )  # fmt: skip
        self.add("Dispatch", num_experts=groups)
        self.mlp(groups, width, width)
        self.add("Combine")
        if residual:
            self.add("AddExtraInput", name="residual")
        return {"layers": self.layers, "shape": (self.rows(), width), "groups": groups}


def _arguments(kind: str) -> Sequence[str]:
    code = getattr(ops, kind).__init__.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


# --------------------------------------------------------------------------------------------------- updates of weights


class Optimizer(NamedTuple):
    """An optimizer of torch with its arguments; `gpu`: on a GPU only."""

    kind: str
    arguments: Mapping[str, Any]
    gpu: bool = False


def _optimizers() -> Iterator[Optimizer]:
    plain: Mapping[str, Mapping[str, Any]] = {
        "SGD": {"lr": 1.0, "momentum": 0.5}, "Adam": {"lr": 0.1}, "AdamW": {"lr": 0.1}, "NAdam": {"lr": 0.1},
        "RAdam": {"lr": 0.1}, "Adamax": {"lr": 0.1}, "Adagrad": {"lr": 0.1}, "Adadelta": {"lr": 5.0},
        "RMSprop": {"lr": 0.05}, "Rprop": {"lr": 0.1}, "ASGD": {"lr": 1.0},
    }  # fmt: skip
    for kind, arguments in plain.items():
        yield Optimizer(kind, arguments)
        yield Optimizer(kind, {**arguments, "foreach": True})
        if kind in ("SGD", "Adam", "AdamW", "Adagrad"):
            yield Optimizer(kind, {**arguments, "fused": True})
        if kind not in ("SGD", "Adagrad"):
            yield Optimizer(kind, {**arguments, "capturable": True}, gpu=True)
    if hasattr(torch.optim, "Adafactor"):
        yield Optimizer("Adafactor", {"lr": 0.1})


OPTIMIZERS = {f"{o.kind}({', '.join(f'{k}={v}' for k, v in o.arguments.items())})": o for o in _optimizers()}
UPDATES = (
    *OPTIMIZERS, *(["data.copy_"] * 4), *(["data assigned", "data assigned twice"] * 3), "load_state_dict",
    "in place without grad", "in place without grad",
)  # fmt: skip


def update(case: Case, model: Sequential, optimizer: torch.optim.Optimizer | None, generator: torch.Generator) -> None:
    """Change the parameters as the case says. What is added has a few tenths of their size."""

    def changed(p: Tensor) -> Tensor:
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
        return (p.detach().double() + 0.3 * p.detach().double().std(unbiased=False).clamp(min=0.1) * noise).to(p.dtype)

    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer is not None:
        for p in trained:
            if p.grad is not None:  # its size must not decide how far a step goes
                p.grad.mul_(0.3 * (p.detach().norm() + 0.1) / p.grad.norm().clamp(min=1e-6))
        optimizer.step()
    elif case.update == "load_state_dict":
        parameters = {name for name, _ in model.named_parameters()}
        model.load_state_dict({n: changed(t) if n in parameters else t for n, t in model.state_dict().items()})
    for p in trained if optimizer is None else ():
        if case.update == "data.copy_":
            p.data.copy_(changed(p))
        elif case.update in ("data assigned", "data assigned twice"):
            p.data = changed(p)
            if case.update == "data assigned twice":
                p.data = changed(p)
        elif case.update == "in place without grad":
            with torch.no_grad():
                p.add_(changed(p) - p)


# ------------------------------------------------------------------------------------------------------ building, data


def build(case: Case, **settings: Any) -> Sequential:
    """The model, its parameters drawn from the seed."""
    modules = []
    for layer in case.layers:
        arguments = dict(layer.arguments)
        if layer.kind in ("Linear", "GroupedLinear"):
            arguments |= {"accumulate_into_main_grad": case.main_grad is not None, "delay_wgrad_compute": case.delayed}
        modules.append(getattr(ops, layer.kind)(**arguments))
    generator = torch.Generator().manual_seed(case.seed)
    for layer, module in zip(case.layers, modules, strict=True):
        for name, p in module.named_parameters():
            matrix = layer.kind in ("Linear", "GroupedLinear", "Router") and name.startswith("weight")
            scale = p.shape[-1] ** -0.5 if matrix else 0.2
            one = layer.kind in ("RMSNorm", "LayerNorm") and name == "weight"
            start = float(one and not layer.arguments["zero_centered_gamma"])
            p.data = (start + scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(case.dtype)
    model = Sequential(*modules, path=case.path, **settings).to(case.device)
    for layer, module in zip(case.layers, modules, strict=True):
        if layer.recipe is not None:
            module.set_recipe(layer.recipe)
    for name, p in model.named_parameters():
        p.requires_grad_(name not in case.frozen)
    return model


def owned_weights(model: Sequential) -> dict[str, Tensor]:
    """The weights whose gradients `ops.main_grad` accumulates, by their names."""
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
    theirs: Any = {} if like is None else owned_weights(like)
    for name, weight in owned_weights(model).items():
        w: Any = weight
        dtype = case.main_grad_dtype or w.dtype
        if w.dtype == torch.float64 and case.main_grad_dtype is None:
            dtype = torch.float64
        w.main_grad = torch.full(w.shape, 0.25 if case.main_grad == "add" else math.nan, dtype=dtype, device=w.device)
        w.overwrite_main_grad = case.main_grad != "add"
        if case.main_grad != "overwrite, no flag":
            w.grad_added_to_main_grad = False
        if case.zero_out_wgrad:
            w.zero_out_wgrad = True
        if theirs:
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
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype).to(case.device)

    values = random_tensor(shape)
    if case.poisoned_tail and case.tail and "expanded" not in case.x_layout:
        values[-case.tail :] = math.nan
    x = laid_out(values, case.x_layout).detach().requires_grad_(case.x_requires_grad)
    extras = {}
    if case.kind == "grouped" and any(_takes_scales(layer) for layer in case.layers):
        scales = (torch.rand(shape[0], generator=generator, dtype=torch.float64) + 0.2).to(case.dtype).to(case.device)
        extras["scales"] = scales.requires_grad_(case.extras_require_grad)
    for name, width in case.outside:
        extras[name] = random_tensor((*shape[:-1], width)).requires_grad_(case.extras_require_grad)
    return Batch(x, extras, sizes, generator)


def _takes_scales(layer: Layer) -> bool:
    return layer.kind in SCALED or bool(layer.arguments.get("scale_bias"))


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
    return ("indices", "load_balancing_loss") if case.kind == "layer of experts" else ()


def run_pass(
    case: Case, model: Sequential, batch: Batch, slopes: Mapping[str, Tensor], *,
    between: Callable[[], None] | None = None,
) -> Outcome:
    """Forward and backward of the model on leaves with the batch's values and strides."""
    x = batch.x.detach().requires_grad_(batch.x.requires_grad)
    extras = {name: t.detach().requires_grad_(t.requires_grad) for name, t in batch.extras.items()}
    sizes = batch.split_sizes(case)
    names = outputs_of(case)

    def scope(of: str) -> AbstractContextManager[Any]:
        return autocast(case.recipe) if case.scope == of else nullcontext()

    def function(x: Tensor, *tensors: Tensor) -> Any:
        given: dict[str, Any] = dict(zip(extras, tensors, strict=True))
        if sizes is not None:
            given["split_sizes"] = sizes
        with scope("inside"):
            result = model(x, outputs=names, **given)
        return (result[0], *result[1].values()) if names else (result,)

    with scope("forward and backward"):
        with scope("forward"):
            inputs = (x, *extras.values())
            if case.checkpoint is None:
                values = function(*inputs)
            elif case.checkpoint.startswith("fuser"):
                values = checkpoint(function, *inputs, use_reentrant="reentrant" in case.checkpoint)
            else:
                values = torch_checkpoint(function, *inputs, use_reentrant="reentrant" in case.checkpoint)
        outcome = Outcome(dict(zip(("y", *names), values, strict=True)))
        if between is not None:
            between()
        heads = {n: v for n, v in outcome.values.items() if n in slopes and v.requires_grad}
        if heads:
            roots, dys = list(heads.values()), [slopes[name] for name in heads]
            if case.asked == "grad of x":
                (outcome.grads["x"],) = torch.autograd.grad(roots, x, dys)
            else:
                leaves = {"x": x} | extras | dict(model.named_parameters())
                asked = [leaves[name] for name in asked_names(case, model, batch)]
                torch.autograd.backward(roots, dys, inputs=None if case.asked == "all" else asked)
                outcome.grads |= {"x": x.grad} | {name: t.grad for name, t in extras.items()}
    return outcome


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
    width = case.shape[-1]
    for layer in case.layers:
        width = _width_behind(layer, width)
    shape = (*batch.x.shape[:-1], width)
    values = torch.randn(shape, generator=batch.generator, dtype=torch.float64).to(case.dtype).to(case.device)
    if case.poisoned_tail and case.tail and "expanded" not in case.dy_layout and case.dy_layout != "one number":
        values[-case.tail :] = math.nan
    slopes = {"y": laid_out(values, case.dy_layout)} if "y" in case.loss else {}
    if "balance" in case.loss:
        dtype = torch.promote_types(case.dtype, torch.float32)
        slopes["load_balancing_loss"] = torch.tensor(0.5, dtype=dtype, device=case.device)
    return slopes


def _width_behind(layer: Layer, width: int) -> int:
    if layer.kind in ("Linear", "GroupedLinear"):
        return int(layer.arguments["out_features"])
    return width // 2 if layer.kind in (*GATES, *CLAMPED, *SITU) else width


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
    recipes = [case.recipe, *(layer.recipe for layer in case.layers if layer.recipe is not None)]
    text = str(recipes)
    four_bits = "NVFP4" in text
    stochastic = any(isinstance(r, NVFP4BlockScaling) and not r.disable_stochastic_rounding for r in recipes)
    row_scaled = "row_scaled_activation=True" in text
    cached = any(layer.arguments.get("cache_quantized_input") for layer in case.layers)
    quantizes = any(not isinstance(r, HighPrecision) for r in recipes) or cached
    if stochastic and gradient:
        return Bound(None, STOCHASTIC)
    if case.dtype == torch.float64 and not row_scaled:
        return Bound(1e-9)
    if four_bits:
        return Bound(None, 0.35, 2.0)
    if quantizes:
        return Bound(None, 0.05 if case.dtype == torch.float32 else 0.1, 0.8)
    if case.dtype == torch.float32:
        return Bound(1e-4)
    return Bound(None, 0.06 if case.dtype == torch.bfloat16 else 0.01, 0.5)


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
    got, want = got.detach().double(), want.detach().double()
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
    scale = max(want.square().mean().sqrt().item(), bound.floor)
    rms = error.square().mean().sqrt().item()
    if bound.rms == STOCHASTIC and error.numel() < 1000:
        scale *= 4  # few numbers, each off by up to a spacing
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
    return f"{name}: {int(differ.sum())} of {differ.numel()} elements differ, by up to {largest:.3e}"


def memory_bytes(tensor: Tensor) -> Tensor:
    """A copy of all that the tensor's storage holds."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


# ------------------------------------------------------------------------------------------------------------- the case


class Trial:
    """One case as it runs. `problems` are the mismatches."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.problems: list[str] = []
        self.where = ""
        self.model = build(case)
        give_main_grads(case, self.model)
        self.state = DelayedState(case.recipe) if isinstance(case.recipe, DelayedScaling) else None
        self.batches = itertools.count()
        self.generator = torch.Generator().manual_seed(case.seed + 7)
        self.expected: dict[str, Tensor | None] = {}  # what autograd's .grad should hold
        self.expected_main: dict[str, Tensor] = {}
        self.left: list[dict[str, Tensor]] = []  # of weights, to be accumulated by backward_dw
        self.optimizer = self._make_optimizer()

    def report(self, problem: str | None) -> None:
        if problem is not None:
            self.problems.append(f"{self.where}: {problem}")

    def run(self) -> None:
        case = self.case
        for step in range(case.steps):
            self._begin_step()
            for microbatch in range(case.microbatches):
                self.where = f"step {step}, microbatch {microbatch}"
                last = (step, microbatch) == (case.steps - 1, case.microbatches - 1)
                self._train(in_flight=case.in_flight if last else None)
                if self.problems:
                    return
            if case.evaluates:
                self.where = f"evaluation after step {step}"
                self._evaluate()
            if step < case.steps - 1:
                self._update()
                if case.copies:
                    self._copy()
            if not all(p.isfinite().all() and p.abs().max() < 100 for p in self.model.parameters()):
                return

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        chosen = OPTIMIZERS.get(self.case.update)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if chosen is None or not trained:
            return None
        arguments = {k: v for k, v in chosen.arguments.items() if k != "capturable" or self.case.device != "cpu"}
        optimizer: torch.optim.Optimizer = getattr(torch.optim, chosen.kind)(trained, **arguments)
        return optimizer

    def _begin_step(self) -> None:
        self.expected = dict.fromkeys(dict(self.model.named_parameters()))
        for p in self.model.parameters():
            p.grad = None
        for weight in owned_weights(self.model).values() if self.case.main_grad else ():
            w: Any = weight
            if hasattr(w, "grad_added_to_main_grad"):
                w.grad_added_to_main_grad = False

    def _train(self, in_flight: str | None) -> None:
        case, model = self.case, self.model
        batch = make_batch(case, next(self.batches))
        slopes = slopes_of(case, batch)
        given = {"x": batch.x, **batch.extras, **{f"gradient of {n}": t for n, t in slopes.items()}}
        before = {name: memory_bytes(t) for name, t in given.items()}
        values = {name: p.detach().double() for name, p in model.named_parameters()}
        buffers = {n: p.main_grad.clone() for n, p in owned_weights(model).items()} if case.main_grad else {}  # type: ignore[attr-defined]
        fresh = copy.deepcopy(model) if case.compares_copy else None
        if fresh is not None:
            give_main_grads(case, fresh, model)
        unfused = self._unfused() if case.compares_unfused else None
        seed = random.Random(case.seed + self.generator.initial_seed()).randrange(2**31)
        torch.manual_seed(seed)
        if in_flight is not None and self._expects_refusal():
            self._change_in_flight(batch, slopes, in_flight)
            return
        had_none = all(p.grad is None for p in model.parameters())
        try:
            outcome = run_pass(case, model, batch, slopes)
        except RuntimeError as error:
            if self._may_refuse_checkpoint() and ("autocast" in str(error) or "recipe" in str(error)):
                return
            raise
        for name, t in given.items():
            if not torch.equal(memory_bytes(t), before[name]):
                self.report(f"{name} was changed")
        call, leaves = self._oracle(values, batch, outcome, slopes)
        self._check_outcome(batch, outcome, call, leaves)
        self._account(batch, leaves, buffers)
        self._check_gradients()
        self._check_state()
        for kind, other in (("a copy of the model", fresh), ("unfused", unfused)):
            if other is not None and not self.problems:
                torch.manual_seed(seed)
                self._check_other(kind, other, batch, slopes, outcome, had_none and case.main_grad is None)

    def _may_refuse_checkpoint(self) -> bool:
        """torch's checkpoint with the recipe around forward alone: refused, or right."""
        return str(self.case.checkpoint).startswith("torch") and self.case.scope == "forward"

    def _unfused(self) -> Sequential:
        model = Sequential(*copy.deepcopy(list(self.model)), fusions=(), path=self.case.path)
        give_main_grads(self.case, model, self.model)
        return model

    def _oracle(
        self, values: Mapping[str, Tensor], batch: Batch, outcome: Outcome, slopes: Mapping[str, Tensor],
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
        call = Call(case.layers, parameters, extras, case.dtype, case.recipe, self.state, records, indices)
        y = call.run(x)
        call.outputs["y"] = y
        if self.state is not None and records and case.scope != "forward and backward":
            self.state.end_step(FORWARD_ROLES)
        heads = {n: call.outputs[n] for n in slopes if call.outputs[n].requires_grad} if records else {}
        if heads:
            roots, dys = list(heads.values()), [slopes[n].double() for n in heads]
            if "y" in heads and batch.sizes is not None and case.poisoned_tail:
                dys[0] = dys[0].nan_to_num(nan=0.0)
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

    def _account(self, batch: Batch, leaves: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """What the parameters' gradients should be by now, by the oracle's."""
        case, owned = self.case, owned_weights(self.model)
        asked = asked_names(case, self.model, batch)
        found = {n: leaves[n].grad for n in self.expected if n in asked}
        reached = {n: g for n, g in found.items() if g is not None}
        late = {n: g for n, g in reached.items() if n in owned and case.delayed}
        self.expected_main = {n: t.double() for n, t in buffers.items()}
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
            main, want = held.main_grad, self.expected_main[name]
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
            module = self.model[layer]
            scale = module._buffers.get(f"quantizer_{role.value}_scale")
            amaxes = module._buffers.get(f"quantizer_{role.value}_amax_history")
            name = f"scale of the {role.value} of layer {layer}"
            if scale is None or amaxes is None:
                self.report(f"{name} does not exist")
                continue
            error = ((scale.double() - history.scales).abs() / history.scales).max().item()
            if error > (1e-6 if self.case.dtype == torch.float64 else 0.3):
                self.report(f"{name} is {scale.tolist()}, expected {history.scales.tolist()}")
            history.scales, history.amaxes = scale.double(), amaxes.double()

    def _check_other(
        self, kind: str, other: Sequential, batch: Batch, slopes: Mapping[str, Tensor], outcome: Outcome, grads: bool
    ) -> None:
        """Another model with the same parameters and states: the same bits; of fused ones on a GPU nearly so."""
        case = self.case
        again = run_pass(case, other, batch, slopes)
        if case.delayed and other.need_backward_dw():
            other.backward_dw()
        stochastic = bound_of(case, True).rms == STOCHASTIC
        exact = kind != "unfused" or case.device == "cpu"
        found = {n: (outcome.values[n], again.values[n], False) for n in outcome.values}
        if not (stochastic and kind == "unfused"):
            found |= {f"d{n}": (outcome.grads[n], again.grads[n], True) for n in outcome.grads}
            if grads:
                theirs = dict(other.named_parameters())
                found |= {
                    f"gradient of {n}": (p.grad, theirs[n].grad, True) for n, p in self.model.named_parameters()
                }
        for name, (got, want, gradient) in found.items():
            # Fused operations add the two shares of the scales' gradient before the others.
            bits = exact and not (name == "dscales" and kind == "unfused")
            problem = differing_bits(name, got, want) if bits else difference(name, got, want, bound_of(case, gradient))
            self.report(None if problem is None else f"not the same as {kind}: {problem}")

    def _evaluate(self) -> None:
        """y without gradients, which leaves no trace; the next step shows it."""
        case, batch = self.case, make_batch(self.case, next(self.batches))
        values = {name: p.detach().double() for name, p in self.model.named_parameters()}
        self.model.eval()
        with torch.no_grad():
            outcome = run_pass(_with(case, checkpoint=None), self.model, batch, {})
        self.model.train()
        call, leaves = self._oracle(values, batch, outcome, {}, records=False)
        self._check_outcome(batch, outcome, call, leaves, evaluating=True)

    def _update(self) -> None:
        for weight in owned_weights(self.model).values() if self.case.main_grad else ():
            w: Any = weight
            if not w.main_grad.isnan().any():
                w.grad = w.main_grad.to(w.dtype)
        update(self.case, self.model, self.optimizer, self.generator)

    def _copy(self) -> None:
        model = copy.deepcopy(self.model)
        give_main_grads(self.case, model, self.model)
        self.model = model
        self.optimizer = self._make_optimizer()

    def _expects_refusal(self) -> bool:
        """Whether a product's dgrad reads a weight that can be changed between forward and backward."""
        return self._changed_weight() is not None

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

        try:
            run_pass(self.case, self.model, batch, slopes, between=change)
        except RuntimeError as error:
            if "between forward and backward" not in str(error):
                self.report(f"a weight changed between forward and backward gives {error}")
            return
        self.report(f"a weight changed between forward and backward ({how}) is not noticed")


def run_case(case: Case) -> list[str]:
    """The mismatches of a case, a sentence each. An exception is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trial = Trial(case)
            trial.run()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rsplit('/', 2)[-2]}/{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            return [f"{type(error).__name__} at {place}: {error}"]
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
