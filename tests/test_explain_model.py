"""fuser.explain: one table for all Sequentials of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fuser
from fuser import Sequential, ops

H, F, E = 32, 16, 4  # hidden size, features of an expert, experts


def model() -> nn.ModuleDict:
    moe = Sequential(
        ops.RMSNorm(H), ops.Router(H, E, topk=2), ops.Dispatch(E), ops.GroupedLinear(E, H, 2 * F, bias=False),
        ops.ScaledSwiGLU(), ops.GroupedLinear(E, F, H, bias=False), ops.Combine(), nn.Tanh(),
        ops.Linear(H, H).set_recipe("fp8_block"),
    )  # fmt: skip
    inner = Sequential(ops.Linear(H, 2 * F))
    return nn.ModuleDict(
        {
            "torch": nn.Linear(H, H),
            "moe": moe,
            "outer": Sequential(inner, ops.GroupedLinear(E, 2 * F, H, bias=False), path="split"),
            "head": ops.Linear(H, 8),
        }
    )


def cells(text: str) -> list[list[str]]:
    """The cells of each row, by where the columns of the header begin."""
    header, *rows = text.splitlines()
    begins = [header.index(name) for name in ("Sequential", "recipe", "path", "runs as", "not fused")]
    return [[row[b:e].strip() for b, e in zip(begins, [*begins[1:], None], strict=True)] for row in rows]


def test_every_stage_has_a_row_and_nested_ones_have_none_of_their_own():
    assert cells(fuser.explain(model(), recipe="mxfp8")) == [
        ["moe, stage 0", "mxfp8", "grouped", "RMSNorm, Router, Dispatch, GroupedMLP, Combine", ""],
        ["moe, stage 1", "", "", "Tanh", ""],
        ["moe, stage 2", "fp8_block", "grouped", "Linear", ""],
        ["outer", "mxfp8", "split", "Linear, GroupedLinear", ""],
        ["head", "mxfp8", "grouped", "Linear", ""],
    ]


def test_refusals_are_counted_and_hooked_operations_are_pipelines_of_one():
    layer = Sequential(
        ops.GroupedLinear(E, H, 2 * F).rename_extras(split_sizes="others"), ops.ScaledSwiGLU(),
        ops.GroupedLinear(E, F, H), ops.Linear(H, H),
    )  # fmt: skip
    layer[3].register_forward_hook(lambda *_: None)
    first, second = cells(fuser.explain(layer))
    assert first[0] == "(the model), stage 0" and first[3] == "GroupedLinear, ScaledSwiGLU, GroupedLinear"
    assert int(first[4]) == layer.explain().count("not fused: ")
    assert second[1:4] == ["high_precision", "grouped", "Linear"]


def test_the_surrounding_recipe_and_other_numbers_are_taken():
    with fuser.autocast("fp8_current"):
        assert "fp8_current" in fuser.explain(model())
    assert "split" in fuser.explain(model(), device="cuda", dtype=torch.float64).splitlines()[1]


def test_what_has_no_operation_is_refused():
    with pytest.raises(ValueError, match=r"explain got Linear, which contains no operation\. Give the model\."):
        fuser.explain(nn.Linear(2, 2))
