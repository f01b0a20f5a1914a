"""Fused operations. `FUSIONS` holds the built-in ones, in the order in which they are tried."""

from fused.backward_activation_bias import BackwardActivationBias
from fused.backward_add_rms_norm import BackwardAddRMSNorm
from fused.backward_linear_add import BackwardLinearAdd
from fused.backward_linear_scale import BackwardLinearScale
from fused.elementwise_chain import ElementwiseChain
from fused.forward_linear_bias_activation import ForwardLinearBiasActivation
from fused.forward_linear_bias_add import ForwardLinearBiasAdd
from fused.grouped_mlp import GroupedMLP
from fused.linear_scale_add import LinearScaleAdd

FUSIONS = (
    GroupedMLP,
    LinearScaleAdd,  # before the chain, which would take its last two operations
    ElementwiseChain,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    BackwardLinearScale,
    BackwardActivationBias,
    BackwardLinearAdd,
    BackwardAddRMSNorm,
)

__all__ = [
    "FUSIONS",
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ElementwiseChain",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "GroupedMLP",
    "LinearScaleAdd",
]
