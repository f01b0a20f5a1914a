"""The basic operations, and the base classes for user-defined ones."""

from ops.activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from ops.add_extra_input import AddExtraInput
from ops.bias import Bias
from ops.collectives import AllGather, AllReduce, Broadcast, Gather, ReduceScatter, Scatter
from ops.combine import Combine
from ops.constant_scale import ConstantScale
from ops.custom_router import CustomRouter
from ops.dispatch import Dispatch
from ops.dropout import Dropout
from ops.elementwise import ElementwiseOperation
from ops.grouped_linear import GroupedLinear
from ops.identity import Identity
from ops.kernels.elementwise.chain import Step
from ops.l2_normalization import L2Normalization
from ops.layer_norm import LayerNorm
from ops.linear import Linear
from ops.make_extra_output import MakeExtraOutput
from ops.quantize import Quantize
from ops.reshape import Reshape
from ops.rms_norm import RMSNorm
from ops.router import Router
from ops.runner.operation import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    IndexTensor,
    OperationContext,
    optional,
    several,
)
from ops.runner.shapes import check_features
from ops.torch_function import Torch

__all__ = [
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicOperation",
    "Bias",
    "Broadcast",
    "ClampedSwiGLU",
    "Combine",
    "ConstantScale",
    "CustomRouter",
    "Dispatch",
    "Dropout",
    "ElementwiseOperation",
    "FusedOperation",
    "FusibleOperation",
    "GEGLU",
    "GELU",
    "GLU",
    "Gather",
    "GroupedLinear",
    "Identity",
    "IndexTensor",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "QGEGLU",
    "QGELU",
    "Quantize",
    "RMSNorm",
    "ReduceScatter",
    "Reshape",
    "ReGLU",
    "ReLU",
    "Router",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Scatter",
    "SiLU",
    "SiTUGLU",
    "Step",
    "SwiGLU",
    "Torch",
    "check_features",
    "optional",
    "several",
]
