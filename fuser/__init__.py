"""A model as a sequence of operations, for which the framework finds the fast kernels. The user's one door."""

import ops
import recipes
from fuser import testing
from fuser.checkpoint import checkpoint
from fuser.plan import Registration, register_fusion
from fuser.sequential import Sequential
from ops.operation import BasicOperation, FusedOperation, OperationContext, optional, several
from recipes.autocast import autocast
from recipes.cast_counts import count_casts

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "OperationContext",
    "Registration",
    "Sequential",
    "autocast",
    "checkpoint",
    "count_casts",
    "ops",
    "optional",
    "recipes",
    "register_fusion",
    "several",
    "testing",
]
