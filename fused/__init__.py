"""Fused operations. `FUSIONS` holds the built-in ones, in the order in which they are tried."""

from fused.backward_add_rms_norm import BackwardAddRMSNorm
from fused.elementwise_chain import ElementwiseChain
from fused.grouped_mlp import GroupedMLP

FUSIONS = (GroupedMLP, ElementwiseChain, BackwardAddRMSNorm)

__all__ = ["FUSIONS", "BackwardAddRMSNorm", "ElementwiseChain", "GroupedMLP"]
