"""A model as a sequence of operations, for which the framework finds the fast kernels. The user's one door."""

import ops
import recipes
from fuser import testing
from fuser.checkpoint import checkpoint
from fuser.graph import GraphedCallable, make_graphed_callables
from fuser.graph_step import GraphedStep, make_graphed_step
from fuser.plan import Registration, register_fusion
from fuser.prepare import prepare
from fuser.schedule import Schedule, ScheduleError
from fuser.schedule_explain import explain_schedule
from fuser.schedule_make import order_1f1b, order_interleaved, overlap_layers
from fuser.schedule_memory import LayerMemory, plan_memory
from fuser.schedule_run import run_schedule
from fuser.sequential import Sequential
from ops.constant_weights import constant_weights
from ops.kernels.tiles import load_tiles
from ops.operation import BasicOperation, FusedOperation, OperationContext, optional, several
from recipes.autocast import autocast
from recipes.cast_counts import count_casts

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "GraphedCallable",
    "GraphedStep",
    "LayerMemory",
    "OperationContext",
    "Registration",
    "Schedule",
    "ScheduleError",
    "Sequential",
    "autocast",
    "checkpoint",
    "constant_weights",
    "count_casts",
    "explain_schedule",
    "load_tiles",
    "make_graphed_callables",
    "make_graphed_step",
    "ops",
    "optional",
    "order_1f1b",
    "order_interleaved",
    "overlap_layers",
    "plan_memory",
    "prepare",
    "recipes",
    "register_fusion",
    "run_schedule",
    "several",
    "testing",
]
