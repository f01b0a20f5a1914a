"""torchao's FP8 rowwise grouped products, compiled, as a way of `bench recipes`, where torchao is installed.

Its products take groups of a multiple of 16 rows alone, so they run on a case whose groups were padded with zero rows
before anything is timed. The function is a prototype of torchao 0.18: under another name there, this way is left out.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from bench.case import Call
from bench.grouped_case import GroupedCase

TORCHAO = "torchao compiled"
ROWS = 16  # the multiple
_MODULE, _FUNCTION = "torchao.prototype.moe_training.fp8_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm"


def why_no_torchao(device: torch.device) -> str | None:
    """What is missing, as a sentence; None if nothing is."""
    if device.type != "cuda":
        return "torchao's FP8 rowwise products need a GPU."
    if find_spec("torchao") is None:
        return "torchao is not installed."
    if find_spec(_MODULE) is None or not hasattr(import_module(_MODULE), _FUNCTION):
        return f"this torchao has no {_MODULE}.{_FUNCTION}; 0.18 has."
    return None


def torchao_rowwise(case: GroupedCase) -> tuple[GroupedCase, Call]:
    """The case with padded groups, and the layer on it with torchao's products."""
    padded = case.padded(ROWS)
    ends = torch.tensor(padded.sizes, device=case.device).cumsum(0).int()
    tensors = (*padded.inputs.values(), *padded.weights)
    way, formula = _compiled(), padded.formula
    return padded, lambda: way(formula, ends, *tensors)


@cache
def _compiled() -> Any:
    grouped_mm = getattr(import_module(_MODULE), _FUNCTION)

    def way(formula: Any, ends: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return grouped_mm(x, w.mT, ends, pad_token_groups_for_grouped_mm=False)  # type: ignore[no-any-return]

        return formula(product, *tensors)  # type: ignore[no-any-return]

    return torch.compile(way, dynamic=False)
