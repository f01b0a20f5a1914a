"""Fused operations. `FUSIONS` holds the built-in ones, in the order in which they are tried."""

from fused.elementwise_chain import ElementwiseChain
from fused.grouped_mlp import GroupedMLP

FUSIONS = (GroupedMLP, ElementwiseChain)

__all__ = ["FUSIONS", "ElementwiseChain", "GroupedMLP"]
