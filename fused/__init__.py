"""Fused operations. `FUSIONS` holds the built-in ones, in the order in which they are tried."""

from fused.grouped_mlp import GroupedMLP

FUSIONS = (GroupedMLP,)

__all__ = ["FUSIONS", "GroupedMLP"]
