"""Fused operations. `FUSIONS` holds the built-in ones, in the order in which they are tried."""

from fused.backward_add_rms_norm import BackwardAddRMSNorm
from fused.grouped_mlp import GroupedMLP

FUSIONS = (GroupedMLP, BackwardAddRMSNorm)

__all__ = ["FUSIONS", "BackwardAddRMSNorm", "GroupedMLP"]
