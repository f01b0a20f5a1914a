"""Whether `Dispatch` sends a token's codes and scales in place of its values, and how these are laid out in a row.

    row of a token   its H codes, then its scales, as bytes: H + ceil(H / block) * bytes of a scale

The consumer multiplies the codes that arrive, so they must be those that it would make of the rows: their scales may
depend on the row alone. The recipe's spec says whether they do. Codes of the columnwise copy, for weight gradients,
share scales along the rows of an expert, so only the owner can make them, and needs the values for that.
"""
# T tokens, R rows for the experts of a rank, H features

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.grouped_linear import GroupedLinear
from recipes.casts.scale_rules import GivenScale
from recipes.recipe import Recipe
from recipes.tensors.formats import Float8Format, ScaleSpec
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.scaled_codes import ScaledCodes
from recipes.tensors.spec_quantizer import SpecQuantizer
from recipes.tensors.splits import Splits

SEND_CODES = ("exact", "never", "always")


def check_send_codes(send_codes: str, group: object) -> str:
    """Raise ValueError for another word, and for one other than the default without a group."""
    if send_codes not in SEND_CODES:
        raise ValueError(f"send_codes is {send_codes!r}, but must be one of {', '.join(map(repr, SEND_CODES))}.")
    if group is None and send_codes != "exact":
        raise ValueError(f"send_codes is {send_codes!r}, but there is no group to send tokens in. Give group as well.")
    return send_codes


class SentTokens(NamedTuple):
    """How tokens are sent.

    words: for `Sequential.explain()`. spec: of their codes; None for values
    values_for: the parameters behind; where one of them needs a gradient, on any rank, values are sent nevertheless
    """

    words: str
    spec: ScaleSpec | None = None
    values_for: tuple[str, ...] = ()


def choose_codes(receiver: Any, recipe: Recipe, send_codes: str) -> SentTokens:
    """receiver: the operation that takes the rows as they are, or None."""
    if send_codes == "never":
        return in_dtype_of_x("send_codes='never'")
    if not isinstance(receiver, GroupedLinear):
        return in_dtype_of_x("no GroupedLinear that takes codes follows in the pipeline")
    if receiver.has_adapter:
        return in_dtype_of_x(f"the adapter of {type(receiver).__name__} multiplies values")
    quantizer = receiver.input_quantizer(recipe)
    rowwise = None if quantizer is None else quantizer.of_copy(False)
    if quantizer is None or rowwise is None:
        return in_dtype_of_x(f"the recipe {recipe.name!r} does not quantize the input of fprop")
    spec = quantizer.copy_spec(False)
    if spec is None:
        return in_dtype_of_x(f"{type(quantizer).__name__} does not say by a ScaleSpec which values share a scale")
    reason = _why_not_codes_of(spec)
    if reason is not None:
        return in_dtype_of_x(reason)
    if not isinstance(rowwise, SpecQuantizer) or not _casts_alone_by_spec(rowwise):
        return in_dtype_of_x(f"{type(rowwise).__name__} quantizes rows otherwise than its spec says")
    each = f"{spec.block[1]} of them" if spec.block[1] else "row"
    words = f"tokens sent as {spec.element.name} codes with a scale for each {each}"
    if send_codes == "exact":
        words = f"{words}, in the dtype of x where the experts' weights need gradients"
        return SentTokens(words, spec, receiver.weight_names)
    if not isinstance(quantizer, SpecQuantizer):
        return in_dtype_of_x(f"{type(quantizer).__name__} makes its copies in two formats, for which 'always' is not")
    return SentTokens(f"{words}, from which the copy for the experts' weight gradients is made", spec)


def in_dtype_of_x(reason: str) -> SentTokens:
    return SentTokens(f"tokens sent in the dtype of x: {reason.removesuffix('.')}")


def pack(x: Tensor, quantizer: Quantizer, multiple: int = 1) -> tuple[Tensor, tuple[int, int]]:
    """The rows of bytes to send of tokens [T, H], and how many of them are codes and scales.

    multiple: of which the bytes of a row are one, by zeros at its end
    """
    copy = quantizer.quantize(x, rowwise=True).natural()
    parts = [_bytes(copy.codes), _bytes(copy.scale_inv)]
    widths = parts[0].shape[1], parts[1].shape[1]
    if sum(widths) % multiple:
        parts.append(parts[0].new_zeros(len(x), -sum(widths) % multiple))
    return torch.cat(parts, 1), widths


def unpack(codes: Tensor, scales: Tensor, spec: ScaleSpec, splits: Splits, dtype: torch.dtype) -> GroupedTensor:
    """The rowwise copy of the rows that arrived, as `quantize_grouped` makes it.

    codes, scales: the bytes of each row, contiguous, in memory of their own. dtype: the nominal one
    """
    scale_inv = scales.view(spec.scale_rule.dtype)
    if spec.columnwise == "transposed":
        scale_inv = scale_inv.mT.contiguous()
    rows = codes.view(spec.element.dtype)
    return GroupedTensor(None, splits, ScaledCodes(rows, scale_inv, spec, rows.shape), None, dtype)


def _bytes(part: Tensor) -> Tensor:
    """The bytes of each row. Scales [T, 1] pass for contiguous whatever lies between them, so they go by [T]."""
    row_bytes = part.shape[1] * part.itemsize
    return part.reshape(-1).contiguous().view(torch.uint8).view(len(part), row_bytes)


def _casts_alone_by_spec(quantizer: SpecQuantizer) -> bool:
    """Whether tokens are quantized alone, too, as the spec says: a subclass may replace it, or keep a state."""
    own = type(quantizer).quantize is not SpecQuantizer.quantize
    return quantizer.casts_by_spec() and not own and not quantizer.keeps_state


def _why_not_codes_of(spec: ScaleSpec) -> str | None:
    if isinstance(spec.scale_rule, GivenScale):
        return "each expert has a scale of its own, but a token is sent once for all experts of a rank"
    reason = spec.why_not_row_by_row()
    if reason is None and not isinstance(spec.element, Float8Format):
        return f"codes of {spec.element.name} are not sent, float8 ones alone"
    return reason
