"""LoRA: adapters of low rank on the linear operations of a model, whose own weights are frozen.

    names = lora.add(model, rank=16, targets=["experts.0", "experts.2"])
    ...                                       # train: only adapters have gradients
    torch.save(lora.state_dict(model), path)  # in the names and shapes of peft
    lora.merge(model)
    lora.unload(model)                        # plain operations again

`ops.lora` computes with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from fuser.tied_parameters import tied_parameters
from ops.grouped_linear import GroupedLinear
from ops.linear import Linear
from ops.lora import ADAPTED, LowRankAdapter, as_alpha, as_dropout
from ops.runner.parameters import computed_names, held_parameter
from recipes.arguments import positive_integers

PREFIX = "base_model.model."  # of every name in peft's files


def add(
    model: nn.Module,
    rank: int,
    targets: str | Sequence[str] = "all-linear",
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
) -> tuple[str, ...]:
    """Put an adapter on each target, freeze every other parameter of the model, and return the targets' names.

        y = x W^T + b + (alpha / rank) (dropout(x) A^T) B^T

    Targets are `ops.Linear` and `ops.GroupedLinear`, which has an A and a B a group. An operation of class
    `LoRALinear` or `LoRAGroupedLinear` takes the place of each, with the same parameters: optimizers and references to
    the parameters stay good, references to the operation do not. y is that of before, since B begins with zeros.

    targets: "all-linear"; names of modules, or their ends behind a dot; or a regular expression that whole names match.
        As peft's target_modules.
    alpha: by default the rank, so that the factor is 1
    dropout: of x, for the adapters only, in training

    What is frozen and has an adapter is quantized once, and not in each forward: do not write into such weights in ways
    that torch does not count (`param.data.copy_`). Every parameter but those of adapters gets requires_grad=False; set
    it again for those that are to be trained too, a norm or a router. Adapters have autograd's gradients, also where
    accumulate_into_main_grad or delay_wgrad_compute is set.

    Call it before `fully_shard` and before the optimizer is made. Raises TypeError and ValueError for arguments of
    another kind or value, targets that name nothing, or something else than those two operations; NotImplementedError
    for operations that are divided among ranks; RuntimeError for those that have an adapter. Then nothing is changed.
    """
    (rank,) = positive_integers("lora.add", rank=rank)
    alpha, dropout = as_alpha("alpha", rank if alpha is None else alpha), as_dropout("dropout", dropout)
    chosen = _targets(model, targets)
    linear = [_checked_target(name, module) for name, module in chosen.items()]
    made: dict[nn.Module, nn.Module] = {
        operation: ADAPTED[type(operation)](operation, rank, alpha, dropout) for operation in linear
    }
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    _replace(model, made)
    return tuple(chosen)


def merge(model: nn.Module) -> None:
    """W += (alpha / rank) B A for each adapter, computed in float32 or better and rounded once to W's dtype; W that is
    held quantized is quantized once, from this sum.

    Forward then costs what it did without adapters, and a state dict of the model holds the merged weights. The weights
    as they were are kept in memory, so that `unmerge` restores their bits; `unload` gives them up. A y differs from
    that of before by the rounding of W, and under a recipe by that of the merged W's quantization.

    CUDA graphs that were captured before go on adding the adapters: capture them again.

    Raises RuntimeError if the model has no adapters, some that are merged, or one on a weight that the model holds in
    another place too, NotImplementedError for weights that `fully_shard` has sharded, or that are computed since; then
    nothing is changed.
    """
    adapters = _adapters(model)
    _check_all(adapters, merged=False, mend="Call lora.unmerge(model) before.")
    _check_whole(adapters)
    _check_registered_weights(adapters)
    _check_untied(model)
    for adapter in adapters.values():
        adapter.merge()


def unmerge(model: nn.Module) -> None:
    """Put back the weights that `merge` changed: the same bits, as they were kept.

    What has changed them since, such as an optimizer that steps them, is undone; `unload` keeps it.

    Raises RuntimeError if the model has no adapters, or some that are not merged, NotImplementedError for weights that
    are computed since; then nothing is changed.
    """
    adapters = _adapters(model)
    _check_all(adapters, merged=True, mend="Call lora.merge(model) before.")
    _check_registered_weights(adapters)
    for adapter in adapters.values():
        adapter.unmerge()


def requantize(model: nn.Module) -> None:
    """Quantize the frozen weights anew in the next forward of each adapter.

    For writes that torch does not count as changes: collectives that receive into a weight (`dist.broadcast`), `.data`,
    a flat buffer of which weights are views, numpy, another process. Raises RuntimeError if the model has no adapters.
    """
    for adapter in _adapters(model).values():
        adapter.forget_quantized_weights()


def unload(model: nn.Module) -> None:
    """Put plain operations back in the places of those with adapters, with the weights as they are: merged or not.

    The adapters are dropped. What requires grad stays as it is. Raises RuntimeError if the model has no adapters,
    ValueError if it is one, NotImplementedError for weights that `fully_shard` has sharded, or that
    `torch.nn.utils.parametrize` computes; then nothing is changed.
    """
    adapters = _adapters(model)
    _check_whole(adapters)
    for name, adapter in adapters.items():
        _check_has_place(name, adapter)
        if is_parametrized(adapter):
            _refuse_computed(name, computed_names(adapter))
    _replace(model, {adapter: adapter.plain() for adapter in adapters.values()})


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The adapters alone, by peft's names and in its shapes (0.19.1 and later): what its adapter_model files hold.

        base_model.model.<name>.lora_A.weight   [r, K]     of a GroupedLinear [G r, K], group after group
        base_model.model.<name>.lora_B.weight   [N, r]     of a GroupedLinear [N, r G], in which groups vary fastest

    Those of a GroupedLinear are what peft has for a stacked parameter [G, N, K] (target_parameters). Copies where the
    shapes differ, else the parameters' memory. Whole tensors also of a model that `fully_shard` has sharded: then it is
    a collective. Where experts are divided among ranks, each has the adapters of its own. Raises RuntimeError if the
    model has no adapters.
    """
    found: dict[str, Tensor] = {}
    for name, adapter in _adapters(model).items():
        a, b = (_whole(factor.weight.detach()) for factor in (adapter.lora_A, adapter.lora_B))
        if a.dim() == 3:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        found |= {_key(name, "A"): a, _key(name, "B"): b}
    return found


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy adapters that `state_dict` or peft gave into those of the model, each into its own dtype.

    Raises RuntimeError if the model has no adapters or if some are merged, ValueError for names that are missing or
    belong to no adapter, and for other shapes, NotImplementedError after `fully_shard`; then nothing is changed.
    """
    adapters = _adapters(model)
    _check_all(adapters, merged=False, mend="Call lora.unmerge(model) before.")
    _check_whole(adapters)
    needed = state_dict(model)
    missing, unknown = sorted(needed.keys() - state.keys()), sorted(state.keys() - needed.keys())
    if missing or unknown:
        raise ValueError(
            f"The state of adapters lacks {', '.join(missing) or 'nothing'}, and has {', '.join(unknown) or 'nothing'} "
            f"for no adapter of the model. {_mend_of_names(missing, unknown)}"
        )
    for key, tensor in needed.items():
        if state[key].is_meta or state[key].layout != torch.strided:
            raise ValueError(f"{key} is on {state[key].device}, {state[key].layout}. Give dense tensors with values.")
        if state[key].shape != tensor.shape:
            raise ValueError(
                f"{key} has shape {list(state[key].shape)}, but {list(tensor.shape)} is needed. Give lora.add the rank "
                "that it was saved with; before 0.19.1 peft exchanged A and B of stacked parameters."
            )
    with torch.no_grad():
        for name, adapter in adapters.items():
            a, b = (state[_key(name, factor)] for factor in "AB")
            own_a, own_b = adapter.lora_A.weight, adapter.lora_B.weight
            if own_b.dim() == 3:
                b = b.unflatten(1, (adapter.rank, len(own_b))).permute(2, 0, 1)
            own_a.copy_(a.view_as(own_a))
            own_b.copy_(b)


def _targets(model: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if type(module) in ADAPTED]
    if targets == "all-linear":  # those that cannot have an adapter too, which are refused
        chosen = [name for name, module in modules.items() if _is_linear(module)]
        unmatched = [] if chosen else ["all-linear"]
    elif isinstance(targets, str):
        pattern = re.compile(targets)
        chosen = [name for name in modules if pattern.fullmatch(name)]
        unmatched = [] if chosen else [targets]
    else:
        wanted = tuple(targets)
        if not all(isinstance(target, str) for target in wanted):
            raise TypeError(f"targets is {targets!r}, but must be names of modules. Pass strings.")
        matching = {target: [n for n in modules if n == target or n.endswith(f".{target}")] for target in wanted}
        chosen = [name for name in modules if any(name in names for names in matching.values())]
        unmatched = [target for target, names in matching.items() if not names] if wanted else ["nothing"]
    if unmatched:
        raise ValueError(
            f"targets: {', '.join(map(repr, unmatched))} matches no module of {type(model).__name__}. Its linear "
            f"operations are: {', '.join(map(repr, linear)) or 'none'}."
        )
    return {name: modules[name] for name in chosen}


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, Linear | GroupedLinear) and not isinstance(module, LowRankAdapter)


def _checked_target(name: str, module: nn.Module) -> Linear | GroupedLinear:
    kind = type(module)
    if isinstance(module, LowRankAdapter):
        raise RuntimeError(f"{name!r} has an adapter. Remove it with lora.unload(model), or leave it out of targets.")
    _refuse_computed(name, computed_names(module), or_else=", or name other targets")
    if kind not in ADAPTED or not isinstance(module, Linear | GroupedLinear):
        raise TypeError(
            f"{name!r} is a {kind.__name__}, but adapters are for ops.Linear and ops.GroupedLinear themselves, not for "
            "subclasses or sharded ones. Name such operations, and call lora.add before fully_shard."
        )
    _check_has_place(name, module)
    if module.parallel is not None:
        raise NotImplementedError(
            f"{name!r} is divided among ranks (tensor_parallel), which adapters are not. Leave it out of targets."
        )
    return module


def _check_has_place(name: str, module: nn.Module) -> None:
    if not name:
        kind = type(module).__name__
        raise ValueError(f"The model is the {kind} itself, in whose place nothing can be put. Give what holds it.")


def _check_whole(adapters: Mapping[str, LowRankAdapter]) -> None:
    sharded = [name for name, adapter in adapters.items() if isinstance(adapter.lora_A.weight, DTensor)]
    if sharded:
        raise NotImplementedError(
            f"Sharded by fully_shard: {', '.join(sharded)}. Do this before fully_shard; lora.state_dict(model) gives "
            "the whole adapters of a sharded model, to be loaded into one that is not."
        )


def _check_registered_weights(adapters: Mapping[str, LowRankAdapter]) -> None:
    for name, adapter in adapters.items():
        _refuse_computed(name, [own for own in computed_names(adapter) if own in adapter.weight_names])
        for own in adapter.weight_names:
            held_parameter(adapter, own)  # raises AttributeError if there is none


def _refuse_computed(name: str, computed: Sequence[str], or_else: str = "") -> None:
    if computed:
        raise NotImplementedError(
            f"{name!r} computes its {' and '.join(computed)} (a parametrization, or pruning), and adapters are for "
            "parameters. Remove that first (torch.nn.utils.parametrize.remove_parametrizations, prune.remove)"
            f"{or_else}."
        )


def _check_untied(model: nn.Module) -> None:
    for places in tied_parameters(model).values():
        if any(isinstance(module, LowRankAdapter) and name in module.weight_names for _, module, name in places):
            raise RuntimeError(
                f"{' and '.join(map(str, places))} are one parameter, so what is merged into it for one place would be "
                "added in the other, too. Untie them, by module.weight = nn.Parameter(module.weight.detach().clone(), "
                "requires_grad=False), or leave the adapters unmerged."
            )


def _adapters(model: nn.Module) -> dict[str, LowRankAdapter]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, LowRankAdapter)}
    if not found:
        raise RuntimeError(f"{type(model).__name__} has no adapters. Call lora.add(model, rank, targets) before.")
    return found


def _check_all(adapters: Mapping[str, LowRankAdapter], *, merged: bool, mend: str) -> None:
    wrong = [name for name, adapter in adapters.items() if adapter.merged != merged]
    if wrong:
        state = "not merged" if merged else "merged"
        raise RuntimeError(f"Adapters are {state}: {', '.join(wrong)}. {mend}")


def _mend_of_names(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """How to give the names that are missing, where these are unknown, as a sentence."""
    if missing and all(name.removeprefix(PREFIX) in unknown for name in missing):
        return "These are names of model.state_dict(): give them to model.load_state_dict(state, strict=False)."
    ends = (name.removesuffix(missing[0]) for name in unknown if missing and name.endswith(missing[0]))
    front = next((front for front in ends if all(front + name in unknown for name in missing)), None)
    if front is not None:
        return (
            f"All names have {front!r} in front: give {{name.removeprefix({front!r}): t for name, t in state.items()}}."
        )
    return "Give lora.add the targets that it was saved with."


def _key(name: str, factor: str) -> str:
    """The name of a factor in peft's files."""
    return PREFIX + ".".join(filter(None, (name, f"lora_{factor}", "weight")))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _replace(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    for parent, name, child in list(_places(model)):
        if child in others:
            setattr(parent, name, others[child].train(child.training))


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child
