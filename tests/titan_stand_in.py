"""A stand-in for torchtitan with the interface that `fuser.titan` uses: configs that build modules, overrides by name,
routed experts. Its names and signatures are those of torchtitan's main branch after pull request 4539.

What it computes is plain torch, expert by expert, with bf16 operands, as torchtitan's grouped products have.
"""
# T tokens, R routed rows, D model dimension, F expert width, E experts

from __future__ import annotations

from dataclasses import dataclass, field, fields
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Module(nn.Module):
    @dataclass(kw_only=True)
    class Config:
        owner: ClassVar[type]
        param_init: dict[str, Any] | None = None
        sharding_config: Any = None

        def build(self) -> Any:
            return self.owner(self)

    def __init_subclass__(cls) -> None:
        if "Config" in cls.__dict__:
            cls.Config.owner = cls


class SwiGLU(Module):
    @dataclass(kw_only=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate: Tensor, up: Tensor, offsets: Tensor) -> Tensor:
        return F.silu(gate) * up


class GroupedLinear(Module):
    @dataclass(kw_only=True)
    class Config(Module.Config):
        group_size: int
        in_features: int
        out_features: int
        num_linears: int = 1

    def __init__(self, config: Any) -> None:
        super().__init__()
        several = () if config.num_linears == 1 else (config.num_linears,)
        shape = (config.group_size, *several, config.out_features, config.in_features)
        self.weight = nn.Parameter(torch.randn(shape) * config.in_features**-0.5)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        ends = offsets.tolist()
        parts = [
            x[begin:end] @ weight.flatten(0, -2).bfloat16().T
            for weight, begin, end in zip(self.weight, [0, *ends], ends, strict=False)
        ]
        y = torch.cat([*parts, x.new_zeros(len(x) - ends[-1], parts[0].shape[-1])])
        return y.unflatten(-1, self.weight.shape[1:-1])


class LocalTokenDispatcher(Module):
    """Sorts the rows by expert, with rows of padding behind them; weights and sums what the experts return."""

    @dataclass(kw_only=True)
    class Config(Module.Config):
        num_experts: int
        top_k: int
        padding: int = 0

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def init_buffer(self) -> None:
        pass

    def dispatch(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        order = ids.flatten().argsort(stable=True)
        rows = x[order // self.config.top_k]
        return torch.cat([rows, rows.new_ones(self.config.padding, x.shape[1])]), counts, (order, scores)

    def combine(self, rows: Tensor, metadata: Any, x: Tensor) -> Tensor:
        order, scores = metadata
        weighted = rows[: len(order)] * scores.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // self.config.top_k, weighted.to(x.dtype))


class RoutedExperts(Module):
    @dataclass(kw_only=True)
    class Config(Module.Config):
        w13: Any
        w2: Any
        token_dispatcher: Any
        activation_fn: Any = field(default_factory=SwiGLU.Config)
        postprocess: Any = None  # what a later torchtitan might add

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w13 = config.w13.build()
        self.w2 = config.w2.build()
        self.activation_fn = config.activation_fn.build()
        self.token_dispatcher = config.token_dispatcher.build()

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        rows, sizes, metadata = self.token_dispatcher.dispatch(x, scores, ids, counts)
        offsets = sizes.cumsum(0, dtype=torch.int32)
        gate, up = self.w13(rows.bfloat16(), offsets).unbind(-2)
        y = self.w2(self.activation_fn(gate, up, offsets=offsets), offsets)
        return self.token_dispatcher.combine(y.type_as(rows), metadata, x)


_registered: dict[str, tuple[Any, type, bool]] = {}


def override(*, target: type, fqns: Any = None, description: str = "", exact: bool = False) -> Any:
    def register(factory: Any) -> Any:
        _registered[f"{factory.__module__}.{factory.__name__}"] = (factory, target, exact)
        return factory

    return register


def derive(source: Any, kind: type, **changes: Any) -> Any:
    shared = {f.name: getattr(source, f.name) for f in fields(kind) if hasattr(source, f.name)}
    return kind(**{**shared, **changes})


def apply(name: str, config: Any, **kwargs: Any) -> Any:
    """The config that an entry of `--override.imports` puts in the place of `config`."""
    import_module(name.rpartition(".")[0])
    factory, target, exact = _registered[name]
    matches = type(config) is target if exact else isinstance(config, target)
    return factory(config, **kwargs) if matches else config


def modules() -> dict[str, ModuleType]:
    """The modules of torchtitan that are imported from, for `sys.modules`."""
    contents: dict[str, dict[str, Any]] = {
        "torchtitan": {},
        "torchtitan.config": {"derive": derive, "override": override},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.activation": {"SwiGLU": SwiGLU},
        "torchtitan.models.common.linear": {"GroupedLinear": GroupedLinear},
        "torchtitan.models.common.moe": {"RoutedExperts": RoutedExperts},
        "torchtitan.protocols": {},
        "torchtitan.protocols.module": {"Module": Module},
    }
    made = {}
    for name, values in contents.items():
        made[name] = ModuleType(name)
        made[name].__dict__.update(values)
    return made
