"""The parameters of the suites: device, models, candidates ("ways") and passes.

On a machine with a CUDA device the models have their real size; elsewhere (or with CUDA_VISIBLE_DEVICES= ) they are
scaled down as `ExpertShape.tiny` says.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from bench.grouped_case import GroupedCase
from bench.models import EXPERT_SHAPES, TINY_SHAPES, ExpertShape
from bench.schedule import known_recipes
from bench.sqnr import require_sqnr, sqnr_floor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_NAMES = ("qwen3-30b-a3b", "deepseek-v3-ep8", "gpt-oss-120b", "olmoe-1b-7b", "mixtral-8x7b", "kimi-k2")
_TINY = {f"tiny-{name}": TINY_SHAPES[f"tiny-{name}"] for name in _NAMES}
# Kimi-K2's complete layer with its gradients fills a GPU: use one of 8 expert-parallel ranks.
_REAL = {name: EXPERT_SHAPES[name] for name in (*_NAMES[:-1], "kimi-k2-ep8")}
SUITE_SHAPES: dict[str, ExpertShape] = _REAL if DEVICE == "cuda" else _TINY

QUANTIZING = known_recipes()[1:]
# torch's own grouped products are compared with the recipes.
WAYS = ["torch", *known_recipes()]

PASS_IDS = ("forward", "forward_backward")  # names without blanks, in the order of PASSES

ROUNDS = {"cuda": 30, "cpu": 7}
WARMUP_ROUNDS = {"cuda": 5, "cpu": 2}


class Measure(Protocol):
    """The fixture `measure`: times a step that has already been checked."""

    def __call__(self, step: Callable[[], object], group: str, *, num_bytes: int, flop: int = 0) -> None: ...


def time_checked(case: GroupedCase, group: str, passes: str, way: str, measure: Measure) -> None:
    """Compare one step with fp32, and time it."""
    step = case.step(case.torchs() if way == "torch" else case.ours(way), passes)
    require_sqnr(way, case.sqnr(step()), sqnr_floor("bf16" if way == "torch" else way))
    measure(step, group, num_bytes=case.bytes_of(passes), flop=case.flop_of(passes))
