"""Weights of experts from one layout of a state dict to another, tensor by tensor.

P is a name that ends in `experts`; i counts the experts. The layouts, with `linears=("fc1", "fc2")`:

    hf, per_expert   P.i.gate_proj.weight [F, H]   P.i.up_proj.weight [F, H]   P.i.down_proj.weight [H, F]
    hf, stacked      P.gate_up_proj [E, 2F, H]     P.down_proj [E, H, F]       P.gate_up_proj_bias [E, 2F]   ...
    hf, transposed   P.gate_up_proj [E, H, 2F]     P.down_proj [E, F, H]       P.gate_up_proj_bias [E, 2F]   ...
    te               P.fc1.weighti [2F, H]         P.fc2.weighti [H, F]        P.fc1.biasi [2F]   ...
    fuser            P.fc1.weight [E, 2F, H]       P.fc2.weight [E, H, F]      P.fc1.bias [E, 2F]   ...

The 2F rows are [gate | up]; in `transposed`, which is gpt-oss's, gate and up alternate; in te and fuser they are as
`glu_interleave_size` says.
"""
# E experts, H hidden size, F expert width

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from recipes.arguments import as_integer

TARGETS = ("hf", "te", "fuser")
HF_LAYOUTS = ("per_expert", "stacked", "transposed")
# Which part of which product a matrix of one expert is; Mixtral's names are w1, w3 and w2.
PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


class _Key(NamedTuple):
    """What a name says. part: gate, up, down of one expert; fc1, fc2 otherwise. expert: None where all are stacked."""

    layout: str
    part: str
    kind: str  # weight or bias
    expert: int | None


@dataclass
class _Experts:
    """The tensors of one P, by what their names say."""

    prefix: str
    layout: str
    names: dict[_Key, str] = field(default_factory=dict)

    @property
    def num_experts(self) -> int:
        """Of layouts with a name for each expert."""
        return 1 + max(key.expert for key in self.names if key.expert is not None)

    def kinds(self) -> list[str]:
        return [kind for kind in ("weight", "bias") if any(key.kind == kind for key in self.names)]

    def name(self, part: str, kind: str, expert: int | None = None) -> str:
        return self.names[_Key(self.layout, part, kind, expert)]


def convert(
    state_dict: Mapping[str, Tensor],
    to: str,
    *,
    hf_layout: str = "per_expert",
    hf_names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    linears: Sequence[str] = ("fc1", "fc2"),
    glu_interleave_size: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of `state_dict` with the experts in another layout; `dict(convert(...))` is a state dict.

    The layout that there is follows from the names and shapes; all else is passed on as it is, in order. Values are
    only moved, so converting back gives the same bits. Tensors are read one after the other, those of one projection of
    one layer at a time: a Mapping that reads files at access is never in memory as a whole.

    to:        "hf", "te" (a GroupedLinear of TransformerEngine, of Megatron, or with stacked=False), "fuser" (stacked)
    hf_layout: of "hf": "per_expert", as in the files of most models; "stacked", as transformers 5 holds them;
               "transposed", as gpt-oss has them in both
    hf_names:  of "per_expert": the projections gate, up and down; ("w1", "w3", "w2") in files of Mixtral
    linears:   of te and fuser, in input or output: what the two GroupedLinear are called, such as ("0", "2")
    glu_interleave_size: of te and fuser, in input or output: None for rows [gate | up], S for alternating runs of S

    Raises ValueError, before the first tensor is read, for an unknown layout, names of another number, experts that are
    incomplete, quantized, in two layouts at once, or not there at all; and for shapes that do not match when they are
    read; TypeError for an interleave size that is no integer.
    """
    if to not in TARGETS or hf_layout not in HF_LAYOUTS:
        raise ValueError(
            f"to={to!r} and hf_layout={hf_layout!r} were given, but to is one of {', '.join(map(repr, TARGETS))} and "
            f"hf_layout one of {', '.join(map(repr, HF_LAYOUTS))}. Pass one of these."
        )
    for argument, names, count in (("hf_names", hf_names, 3), ("linears", linears, 2)):
        if isinstance(names, str) or len(set(names)) != count:
            raise ValueError(f"{argument} is {names!r}, but must be {count} different names. Pass a tuple of them.")
    if glu_interleave_size is not None and as_integer("glu_interleave_size", glu_interleave_size) <= 0:
        raise ValueError(f"glu_interleave_size is {glu_interleave_size}, but must be positive. Pass None for halves.")
    found = _find(state_dict, tuple(linears))
    if not found:
        raise ValueError(
            f"There are no experts among the {len(state_dict)} names. Known are names such as "
            f"'experts.0.gate_proj.weight', 'experts.gate_up_proj', 'experts.{linears[0]}.weight0' and "
            f"'experts.{linears[0]}.weight'. Rename the tensors, or pass linears=(...)."
        )
    for experts in found.values():
        _check_complete(experts)
    write = _WRITERS[hf_layout if to == "hf" else to]
    names = tuple(hf_names) if to == "hf" else tuple(linears)
    return _stream(state_dict, found, write, names, glu_interleave_size, tuple(linears))


def _stream(
    state_dict: Mapping[str, Tensor],
    found: Mapping[str, _Experts],
    write: _Writer,
    names: tuple[str, ...],
    interleave: int | None,
    linears: tuple[str, ...],
) -> Iterator[tuple[str, Tensor]]:
    done: set[str] = set()
    for name in state_dict:
        prefix = _prefix_of(name, linears)
        if prefix is None:
            yield name, state_dict[name]
        elif prefix not in done:
            done.add(prefix)
            experts = found[prefix]
            transposed = experts.layout == "hf" and _is_transposed(state_dict, experts)
            first: torch.Size | None = None
            for linear in ("fc1", "fc2"):
                for kind in experts.kinds():
                    tensor = _read(state_dict, experts, linear, kind, transposed, interleave)
                    _check_shape(prefix, linear, kind, tensor, first)
                    first = tensor.shape if first is None else first
                    yield from write(prefix, linear, kind, tensor, names, interleave)


# ------------------------------------------------------------------------------------------------------------- finding


def _parse(name: str, linears: tuple[str, ...]) -> tuple[str, _Key] | None:
    """(P, what the rest of the name says); None for a tensor that belongs to no experts."""
    match = re.fullmatch(r"((?:.*\.)?experts)\.(.+)", name)
    if match is None:
        return None
    prefix, rest = match[1], match[2]
    if one := re.fullmatch(rf"(\d+)\.({'|'.join(PARTS)})\.(weight|bias)", rest):
        return prefix, _Key("per_expert", PARTS[one[2]], one[3], int(one[1]))
    if one := re.fullmatch(r"(gate_up_proj|down_proj)(_bias)?", rest):
        return prefix, _Key("hf", "fc1" if one[1] == "gate_up_proj" else "fc2", "bias" if one[2] else "weight", None)
    if one := re.fullmatch(rf"({'|'.join(map(re.escape, linears))})\.(weight|bias)(\d*)", rest):
        expert = int(one[3]) if one[3] else None
        return prefix, _Key("te" if one[3] else "fuser", ("fc1", "fc2")[linears.index(one[1])], one[2], expert)
    if re.match(rf"(\d+\.({'|'.join(PARTS)})\.|gate_up_proj|down_proj)", rest):
        raise ValueError(
            f"{name!r} is no weight and no bias: these experts are quantized, or have adapters. Dequantize them first, "
            "for instance by loading the model with transformers in bfloat16; merge adapters, or leave them out."
        )
    return None


def _prefix_of(name: str, linears: tuple[str, ...]) -> str | None:
    parsed = _parse(name, linears)
    return None if parsed is None else parsed[0]


def _find(state_dict: Mapping[str, Tensor], linears: tuple[str, ...]) -> dict[str, _Experts]:
    found: dict[str, _Experts] = {}
    for name in state_dict:
        parsed = _parse(name, linears)
        if parsed is None:
            continue
        prefix, key = parsed
        experts = found.setdefault(prefix, _Experts(prefix, key.layout))
        if experts.layout != key.layout or key in experts.names:
            other = next(iter(experts.names.values()))
            raise ValueError(
                f"{name!r} and {other!r} are the same experts twice, or in two layouts. Leave one of them out."
            )
        experts.names[key] = name
    return found


def _check_complete(experts: _Experts) -> None:
    layout = experts.layout
    parts = ("gate", "up", "down") if layout == "per_expert" else ("fc1", "fc2")
    numbers = range(experts.num_experts) if layout in ("per_expert", "te") else (None,)
    wanted = {_Key(layout, part, kind, i) for part in parts for kind in ("weight", *experts.kinds()) for i in numbers}
    missing = sorted(str(key[1:]) for key in wanted - experts.names.keys())
    if missing:
        raise ValueError(
            f"{experts.prefix} lacks {len(missing)} of its {len(wanted)} tensors, the first being (part, kind, expert) "
            f"= {missing[0]}. Give all tensors of these experts at once, from all files of the model."
        )


def _is_transposed(state_dict: Mapping[str, Tensor], experts: _Experts) -> bool:
    """By the shapes, which never fit both: 2F is not F."""
    first, second = (state_dict[experts.name(linear, "weight")].shape for linear in ("fc1", "fc2"))
    if len(first) == len(second) == 3 and first[0] == second[0]:
        if first[1] == 2 * second[2] and first[2] == second[1]:
            return False
        if first[2] == 2 * second[1] and first[1] == second[2]:
            return True
    raise ValueError(
        f"{experts.prefix}.gate_up_proj has shape {list(first)} and down_proj {list(second)}, but [E, 2F, H] and "
        "[E, H, F], or [E, H, 2F] and [E, F, H] are needed. Give the weights of one module, with a gate."
    )


# ------------------------------------------------------------------------------------------------- reading and writing


def _read(
    state_dict: Mapping[str, Tensor],
    experts: _Experts,
    linear: str,
    kind: str,
    transposed: bool,
    interleave: int | None,
) -> Tensor:
    """[E, N, K], or [E, N] of biases, with rows [gate | up]."""
    layout = experts.layout
    if layout == "per_expert":
        parts = ("gate", "up") if linear == "fc1" else ("down",)
        return _stack(
            [[state_dict[experts.name(part, kind, i)] for part in parts] for i in range(experts.num_experts)],
            experts.prefix,
        )
    if layout == "te":
        matrices = [[state_dict[experts.name(linear, kind, i)]] for i in range(experts.num_experts)]
        return _halves(_stack(matrices, experts.prefix), linear, interleave)
    tensor = state_dict[experts.name(linear, kind)]
    if layout == "fuser":
        return _halves(tensor, linear, interleave)
    if transposed:
        return _halves(tensor.mT if kind == "weight" else tensor, linear, 1)
    return tensor


def _check_shape(prefix: str, linear: str, kind: str, tensor: Tensor, first: torch.Size | None) -> None:
    """first: of the weight of fc1, [E, 2F, H]; None of this one"""
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise ValueError(
            f"{prefix} has an {linear} {kind} of {tensor.dtype}: these experts are quantized. Dequantize them first, "
            "for instance by loading the model with transformers in bfloat16."
        )
    shape = list(tensor.shape)
    if first is None:
        if len(shape) != 3 or shape[1] % 2:
            raise ValueError(
                f"{prefix} has an fc1 weight of shape {shape}, but [E, 2F, H] is needed. Give the weights of all "
                "experts, with a gate."
            )
        return
    experts, rows, hidden = first
    wanted = [experts, rows if linear == "fc1" else hidden]
    if kind == "weight":
        wanted.append(rows // 2)
    if shape != wanted:
        raise ValueError(
            f"{prefix} has an {linear} {kind} of shape {shape}, but {wanted} is needed beside an fc1 weight of "
            f"{list(first)}, [E, 2F, H]. Give those of one layer."
        )


def _stack(matrices: list[list[Tensor]], prefix: str) -> Tensor:
    shapes = {part.shape for parts in matrices for part in parts}
    if len(shapes) > 1:
        found = ", ".join(sorted(str(list(shape)) for shape in shapes))
        raise ValueError(f"The experts of {prefix} have different shapes: {found}. Give those of one layer.")
    return torch.stack([torch.cat(parts) for parts in matrices])


def _halves(tensor: Tensor, linear: str, interleave: int | None) -> Tensor:
    """Rows [gate | up] of those that alternate in runs."""
    if linear != "fc1" or interleave is None:
        return tensor
    _check_runs(tensor, interleave)
    return rearrange(tensor, "e (runs two s) ... -> e (two runs s) ...", two=2, s=interleave)


def _runs(tensor: Tensor, linear: str, interleave: int | None) -> Tensor:
    """Rows that alternate in runs, of [gate | up]."""
    if linear != "fc1" or interleave is None:
        return tensor
    _check_runs(tensor, interleave)
    return rearrange(tensor, "e (two runs s) ... -> e (runs two s) ...", two=2, s=interleave)


def _check_runs(tensor: Tensor, interleave: int) -> None:
    if tensor.shape[1] % (2 * interleave):
        raise ValueError(
            f"{tensor.shape[1]} rows of gate and up do not divide into pairs of runs of {interleave}. Pass another "
            "glu_interleave_size."
        )


def _write_per_expert(
    prefix: str, linear: str, kind: str, tensor: Tensor, names: tuple[str, ...], interleave: int | None
) -> Iterator[tuple[str, Tensor]]:
    gate, up, down = names
    for i, matrix in enumerate(tensor):
        parts = zip((gate, up), matrix.chunk(2), strict=True) if linear == "fc1" else ((down, matrix),)
        for name, part in parts:
            yield f"{prefix}.{i}.{name}.{kind}", part.clone(memory_format=torch.contiguous_format)


def _write_stacked(
    prefix: str, linear: str, kind: str, tensor: Tensor, names: tuple[str, ...], interleave: int | None
) -> Iterator[tuple[str, Tensor]]:
    yield _stacked_name(prefix, linear, kind), tensor.contiguous()


def _write_transposed(
    prefix: str, linear: str, kind: str, tensor: Tensor, names: tuple[str, ...], interleave: int | None
) -> Iterator[tuple[str, Tensor]]:
    rows = _runs(tensor, linear, 1)
    yield _stacked_name(prefix, linear, kind), (rows.mT if kind == "weight" else rows).contiguous()


def _write_te(
    prefix: str, linear: str, kind: str, tensor: Tensor, names: tuple[str, ...], interleave: int | None
) -> Iterator[tuple[str, Tensor]]:
    for i, matrix in enumerate(_runs(tensor, linear, interleave)):
        yield f"{_linear_name(prefix, linear, names)}.{kind}{i}", matrix.clone(memory_format=torch.contiguous_format)


def _write_fuser(
    prefix: str, linear: str, kind: str, tensor: Tensor, names: tuple[str, ...], interleave: int | None
) -> Iterator[tuple[str, Tensor]]:
    yield f"{_linear_name(prefix, linear, names)}.{kind}", _runs(tensor, linear, interleave).contiguous()


def _stacked_name(prefix: str, linear: str, kind: str) -> str:
    return f"{prefix}.{'gate_up_proj' if linear == 'fc1' else 'down_proj'}{'_bias' if kind == 'bias' else ''}"


def _linear_name(prefix: str, linear: str, names: tuple[str, ...]) -> str:
    return f"{prefix}.{names[('fc1', 'fc2').index(linear)]}"


_Writer = Callable[[str, str, str, Tensor, tuple[str, ...], int | None], Iterator[tuple[str, Tensor]]]
_WRITERS: Mapping[str, _Writer] = {
    "per_expert": _write_per_expert,
    "stacked": _write_stacked,
    "transposed": _write_transposed,
    "te": _write_te,
    "fuser": _write_fuser,
}
