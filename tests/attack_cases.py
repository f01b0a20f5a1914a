"""The cases of `tests.attack`: what is in one, and how it is drawn from its seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from fuser import ops
from recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    HighPrecision,
    MixedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from recipes.tensors.formats import Format
from tests.attack_oracle import ACTIVATIONS, CLAMPED, GATES, SITU, UNGATED, Layer

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
    frozen: float = 0.0  # the share of parameters without a gradient
    main_grad: str | None = None  # None, "add", "overwrite", "overwrite, no flag"
    main_grad_dtype: torch.dtype = torch.float32
    zero_out_wgrad: bool = False
    delayed: bool = False
    asked: str = "all"  # "all", "grad of x", "inputs: x", "inputs: some"
    loss: str = "y"  # "y", "y and balance", "balance"
    scope: str = "forward"  # of autocast: "forward", "forward and backward", "inside"
    other_recipe: Recipe | None = None  # of every second step
    torch_autocast: bool = False  # the weights are float32, and bfloat16 is computed in
    checkpoint: str | None = None
    steps: int = 1
    microbatches: int = 1
    update: str = "none"
    evaluates: bool = False
    copies: bool = False
    magnitude: str = "1"  # of x: "1", "tiny", "large", "outliers", "rows of zeros"
    extras_layout: str = "contiguous"
    weight_layout: str = "contiguous"  # "transposed", "in one buffer"
    main_grad_layout: str = "own"  # "flat", "apart", "one bucket", "one bucket, last first"
    outputs: tuple[str, ...] = ()  # extra outputs that are part of the loss
    buffers: tuple[tuple[int, str], ...] = ()  # of the caller: layer and name
    hooked: int | None = None  # a layer that has a hook, so that it is called by itself
    retains_graph: bool = False  # and backward runs twice
    forwards_first: bool = False  # all microbatches' forwards, then their backwards
    evaluates_before: str | None = None  # "no_grad", "inference_mode"
    refreezes: bool = False
    one_by_one: bool = False  # each operation is called by itself, without a Sequential
    eval_mode: bool = False
    wide_layers: bool = False  # norms, biases and the router in float32
    x_dtype: torch.dtype | None = None  # if not that of the weights
    compares_copy: bool = True
    copied_by: str = "deepcopy"  # "state_dict", "other form": grouped weights stacked where they were not
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
    kind = rng.choices(["dense", "grouped", "layer of experts", "one product"], [4, 4, 2, 2])[0]
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    dtype = rng.choices(dtypes, [2, 2, 5, 1] if on_gpu else [5, 2, 2, 1])[0]
    recipe = _recipe(rng)
    draw = _Draw(rng, on_gpu, recipe, dtype)
    if kind == "one product":
        kind = rng.choice(["dense", "grouped"])
        choices = draw.one_product(kind)
    else:
        choices = {"dense": draw.dense, "grouped": draw.grouped, "layer of experts": draw.experts}[kind]()
    layers: list[Layer] = choices.pop("layers")
    has_groups = any(layer.kind == "GroupedLinear" for layer in layers)
    has_weights = has_groups or any(layer.kind == "Linear" for layer in layers)
    if has_weights and not isinstance(recipe, DelayedScaling) and rng.random() < 0.1:
        at = rng.choice([i for i, layer in enumerate(layers) if layer.kind in ("Linear", "GroupedLinear")])
        own = rng.choice([HighPrecision(), MXFP8BlockScaling(), Float8CurrentScaling()])
        layers[at] = layers[at]._replace(recipe=own)
    if dtype == torch.float32 and rng.random() < 0.15:
        choices["torch_autocast"] = True
    if has_groups:
        choices["path"] = rng.choices([None, "split", "grouped"], [6, 2, 1])[0]
        if choices["path"] == "grouped" and on_gpu and dtype == torch.float64:
            choices["path"] = None
    choices |= _of_training(rng, layers, recipe, has_weights, kind)
    choices["x_layout"] = rng.choice(LAYOUTS) if rng.random() < 0.5 else "contiguous"
    choices["dy_layout"] = rng.choice((*LAYOUTS, "one number")) if rng.random() < 0.5 else "contiguous"
    choices["eval_mode"] = draw.dropout > 0
    choices |= _of_memory(rng, layers, choices, dtype, recipe)
    frozen = rng.choice([0.2, 0.5, 0.9]) if rng.random() < 0.4 else 0.0
    asked, recomputes = choices.get("asked", "all"), choices.get("checkpoint", "")
    x_requires_grad = rng.random() < 0.75 or asked in ("grad of x", "inputs: x") or "reentrant" in recomputes
    if isinstance(recipe, DelayedScaling):
        # A router hands x on: behind it a pipeline computes dx, and records, though x wants none.
        x_requires_grad = x_requires_grad or kind == "layer of experts"
        if any(layer.kind == "Again" for layer in layers):
            choices["one_by_one"] = False  # each use would be a step of its own
    if choices["x_layout"] == "expanded columns" and dtype != torch.float64 and _NORMS & {y.kind for y in layers}:
        choices["x_layout"] = "contiguous"  # a row of one number has no variance: only its rounding would be scaled
    if choices["magnitude"] == "large" and any(layer.kind == "Tanh" for layer in layers):
        choices["magnitude"] = "1"  # its y rounds to 1 in 16 bits, and its gradient to 0
    return Case(
        seed, device, kind, tuple(layers), dtype=dtype, recipe=recipe, frozen=frozen, x_requires_grad=x_requires_grad,
        **choices,
    )  # fmt: skip


_NORMS = {"RMSNorm", "LayerNorm", "L2Normalization"}


def changed(case: Case, **changes: Any) -> Case:
    """The case with other values of some fields."""
    return Case(**{f.name: getattr(case, f.name) for f in fields(case)} | changes)


def _of_memory(
    rng: random.Random, layers: Sequence[Layer], choices: Mapping[str, Any], dtype: torch.dtype, recipe: Recipe
) -> dict[str, Any]:
    """What numbers x holds, where tensors lie, what else the caller hands over or asks for."""
    chosen: dict[str, Any] = {"magnitude": rng.choices(
        ["1", "outliers", "rows of zeros", "tiny", "large"], [12, 1, 1, *((0, 0) if dtype == torch.float16 else (1, 1))]
    )[0]}  # fmt: skip
    if rng.random() < 0.3:
        chosen["extras_layout"] = rng.choice(LAYOUTS)
    if rng.random() < 0.2:
        chosen["weight_layout"] = rng.choice(["transposed", "in one buffer"])
    if rng.random() < 0.5:
        chosen["main_grad_layout"] = rng.choice(["flat", "apart", "one bucket", "one bucket, last first"])
    branches = [layer.arguments["name"] for layer in layers if layer.kind == "MakeExtraOutput"]
    plain = choices.get("asked", "all") == "all" and "in_flight" not in choices
    if plain and rng.random() < 0.3:
        chosen["outputs"] = tuple(name for name in branches if rng.random() < 0.7)
    grouped = [i for i, layer in enumerate(layers) if layer.kind == "GroupedLinear"]
    if grouped and "checkpoint" not in choices and rng.random() < 0.15:
        names = [(i, name) for i in grouped for name in ("output", "grad_input")]
        chosen["buffers"] = tuple(pair for pair in names if rng.random() < 0.5)
    if rng.random() < 0.1:
        chosen["hooked"] = rng.randrange(len(layers))
    if rng.random() < 0.15:
        chosen["evaluates_before"] = rng.choice(["no_grad", "inference_mode"])
    if "weight_layout" not in chosen:  # another layout, another order of the sums
        forms = ["other form"] if choices.get("asked") != "inputs: some" else []
        chosen["copied_by"] = rng.choice(["deepcopy", "deepcopy", "state_dict", *forms])
    chosen["refreezes"] = rng.random() < 0.15
    if dtype != torch.float64 and not choices.get("torch_autocast"):
        chosen["wide_layers"] = rng.random() < 0.1
        chosen["x_dtype"] = rng.choice([torch.float32, torch.bfloat16]) if rng.random() < 0.1 else None
    if rng.random() < 0.08 and not (choices.get("path") or chosen.get("buffers")):
        chosen["one_by_one"] = True
    stateful = isinstance(recipe, DelayedScaling)
    alone = not stateful and choices["scope"] != "forward and backward" and "checkpoint" not in choices
    if plain and alone and "one_by_one" not in chosen and choices.get("main_grad") != "overwrite, no flag":
        chosen["retains_graph"] = rng.random() < 0.1 and not chosen.get("buffers")
        chosen["forwards_first"] = choices["microbatches"] > 1 and rng.random() < 0.4
    if rng.random() < 0.15 and not choices.get("delayed"):
        chosen["other_recipe"] = rng.choice([HighPrecision(), MXFP8BlockScaling(), Float8CurrentScaling()])
    return chosen


def _recipe(rng: random.Random) -> Recipe:
    kinds = {"none": 3, "delayed": 2, "current": 2, "block": 2, "rowwise": 1, "mxfp8": 2, "nvfp4": 3, "mixed": 1}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
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
    if kind == "rowwise":
        epsilon = rng.choice([0.0, 1e-3])
        return Float8RowwiseScaling(fp8_format=form, power_2_scale=rng.random() < 0.3, amax_epsilon=epsilon)
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
    four_bits = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    some = ["high_precision", "fp8_current", "fp8_rowwise", "mxfp8", "fp8_block", four_bits]
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
        twice = any(layer.kind == "Again" for layer in layers)
        chosen["main_grad"] = rng.choice(["add", "overwrite", "overwrite" if twice else "overwrite, no flag"])
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
    chosen["compares_copy"] = rng.random() < (0.5 if quantizes else 0.15)
    chosen["compares_unfused"] = rng.random() < 0.2
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
        self.dropout = rng.choice([0.0, 0.0, 0.5])  # 0.5 in eval mode alone
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
                + ["scale", "dropout", "reshape", "branch", "branch", "join", "join", "outside", "identity", "tanh"]
                + ["again"]
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
                self.add("Dropout", p=self.dropout)
            elif choice == "identity":
                self.add("Identity")
            elif choice == "reshape" and len(shape) == 2 and shape[0]:
                self.add("Reshape", shape=(-1, width))
            elif choice == "tanh":
                self.add("Tanh")
            elif choice == "again":
                again = [i for i, layer in enumerate(self.layers) if _keeps_width(layer)]
                fitting = [i for i in again if self.layers[i].arguments.get("in_features", width) == width]
                fitting = [i for i in fitting if self.layers[i].arguments.get("size", width) == width]
                if fitting:
                    self.add("Again", layer=rng.choice(fitting))
            elif choice == "branch":
                name = next(self.names)
                self.add("MakeExtraOutput", name=name, in_place=rng.random() < 0.2)
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

    def one_product(self, kind: str) -> dict[str, Any]:
        """A layer whose operands are the caller's own, so that no code can flip: its bounds are those of the sums."""
        width, out, rows = self.width(), self.width(), self.rows()
        if kind == "dense":
            self.add("Linear", in_features=width, out_features=out, bias=self.rng.random() < 0.5)
            return {"layers": self.layers, "shape": (rows, width)}
        splits = self.splits()
        self.grouped_linear(splits["groups"], width, out, scale_bias=self.rng.random() < 0.2)
        poisoned = self.rng.random() < 0.3
        tail = self.rng.choice([0, 3])
        return splits | {"layers": self.layers, "shape": (rows, width), "tail": tail, "poisoned_tail": poisoned}

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
        sigmoid = rng.random() < 0.3
        about = {"score_function": "sigmoid"} if sigmoid else {"use_pre_softmax": rng.random() < 0.5}
        self.add(
            "Router", hidden_size=width, num_experts=groups, topk=rng.randint(1, min(groups, 4)),
            normalize_probs=rng.random() < 0.3, bias=rng.random() < 0.3, scaling_factor=rng.choice([1.0, 1.0, 2.5]),
            **about,
        )  # fmt: skip
        self.add("Dispatch", num_experts=groups)
        self.mlp(groups, width, width)
        self.add("Combine")
        if residual:
            self.add("AddExtraInput", name="residual")
        return {"layers": self.layers, "shape": (self.rows(), width), "groups": groups}


def _keeps_width(layer: Layer) -> bool:
    given = layer.arguments
    return layer.kind == "Bias" or (layer.kind == "Linear" and given["in_features"] == given["out_features"])


def _arguments(kind: str) -> Sequence[str]:
    code = getattr(ops, kind).__init__.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


class Optimizer(NamedTuple):
    """An optimizer of torch with its arguments; `gpu`: on a GPU only."""

    kind: str
    arguments: Mapping[str, Any]
    devices: tuple[str, ...] = ("cpu", "cuda")


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
            yield Optimizer(kind, {**arguments, "fused": True}, ("cpu",) if kind == "Adagrad" else ("cpu", "cuda"))
        if kind not in ("SGD", "Adagrad"):
            yield Optimizer(kind, {**arguments, "capturable": True}, ("cuda",))
    if hasattr(torch.optim, "Adafactor"):
        yield Optimizer("Adafactor", {"lr": 0.1})


OPTIMIZERS = {f"{o.kind}({', '.join(f'{k}={v}' for k, v in o.arguments.items())})": o for o in _optimizers()}
UPDATES = (
    *OPTIMIZERS, *(["data.copy_"] * 4), *(["data assigned", "data assigned twice"] * 3), "load_state_dict",
    "in place without grad", "in place without grad",
)  # fmt: skip


WIDE = ("RMSNorm", "LayerNorm", "Bias", "Router")


def dtypes_of(case: Case) -> list[torch.dtype]:
    """The dtype that each layer computes in: torch.autocast's, else that of its parameters, else that of x as it
    arrives."""
    arriving = case.x_dtype or case.dtype
    found: list[torch.dtype] = []
    for layer in case.layers:
        if layer.kind == "Again":
            layer = case.layers[layer.arguments["layer"]]
        if layer.kind in ("Linear", "GroupedLinear", *WIDE):
            arriving = torch.float32 if case.wide_layers and layer.kind in WIDE else case.dtype
        if case.torch_autocast and layer.kind != "Tanh":
            arriving = torch.bfloat16
        found.append(arriving)
    return found


def coarsest_dtype(case: Case) -> torch.dtype:
    """The dtype of the largest error in it."""
    return max((case.x_dtype or case.dtype, *dtypes_of(case)), key=lambda dtype: torch.finfo(dtype).eps)


def width_behind(layer: Layer, width: int) -> int:
    if layer.kind in ("Linear", "GroupedLinear"):
        return int(layer.arguments["out_features"])
    return width // 2 if layer.kind in (*GATES, *CLAMPED, *SITU) else width


def takes_scales(layer: Layer) -> bool:
    return layer.kind in SCALED or bool(layer.arguments.get("scale_bias"))
