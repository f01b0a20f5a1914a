"""The basic operations, and the contract to write one's own."""

from ops.add_extra_input import AddExtraInput
from ops.bias import Bias
from ops.clamped_swiglu import ClampedSwiGLU
from ops.combine import Combine
from ops.dispatch import Dispatch
from ops.gated_activations import GEGLU, GLU, QGEGLU, ReGLU, SReGLU
from ops.grouped_linear import GroupedLinear
from ops.identity import Identity
from ops.linear import Linear
from ops.make_extra_output import MakeExtraOutput
from ops.operation import BasicOperation, FusedOperation, FusibleOperation, IndexTensor, OperationContext, optional
from ops.quantize import Quantize
from ops.rms_norm import RMSNorm
from ops.router import Router
from ops.scaled_clamped_qgeglu import ScaledClampedQGeGLU
from ops.scaled_situglu import ScaledSiTUGLU
from ops.scaled_srelu import ScaledSReLU
from ops.scaled_swiglu import ScaledSwiGLU
from ops.situglu import SiTUGLU
from ops.swiglu import SwiGLU
from ops.ungated_activations import GELU, QGELU, ReLU, SiLU, SReLU

__all__ = [
    "AddExtraInput",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "Combine",
    "Dispatch",
    "FusedOperation",
    "FusibleOperation",
    "GEGLU",
    "GELU",
    "GLU",
    "GroupedLinear",
    "Identity",
    "IndexTensor",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "QGEGLU",
    "QGELU",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Router",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "optional",
]
