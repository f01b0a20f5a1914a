"""The public interface: a model is a sequence of operations, which the framework fuses and runs with fast kernels."""

import fuser.own_packages  # noqa: F401 (first, so that nothing of another `ops` is imported)
import ops
import recipes
from fuser import graph, schedule, testing
from fuser.branch import Branch
from fuser.checkpoint import checkpoint
from fuser.constant_weights import constant_weights
from fuser.explain_model import explain
from fuser.graph import GraphedCallable as GraphedCallable
from fuser.graph import GraphedStep as GraphedStep
from fuser.graph import make_graphed_callables as make_graphed_callables
from fuser.graph import make_graphed_step as make_graphed_step
from fuser.master_weights import MasterWeights
from fuser.plan import Registration, register_fusion
from fuser.prepare import prepare
from fuser.quantized_model import dequantized_state_dict, quantized_model_init, to_quantized
from fuser.schedule import LayerMemory as LayerMemory
from fuser.schedule import Schedule as Schedule
from fuser.schedule import ScheduleError as ScheduleError
from fuser.schedule import explain_schedule as explain_schedule
from fuser.schedule import order_1f1b as order_1f1b
from fuser.schedule import order_interleaved as order_interleaved
from fuser.schedule import overlap_layers as overlap_layers
from fuser.schedule import plan_memory as plan_memory
from fuser.schedule import run_schedule as run_schedule
from fuser.sequential import Sequential
from fuser.version import __version__
from ops.kernels.grouped_gemm.measured_tiles import load_tiles
from ops.kernels.routing.symmetric_buffers import check_overflow
from ops.runner.operation import BasicOperation, FusedOperation, OperationContext, optional, several
from recipes.autocast import autocast
from recipes.cast_counts import count_casts
from recipes.quantize import quantize

__all__ = [
    "BasicOperation",
    "Branch",
    "FusedOperation",
    "MasterWeights",
    "OperationContext",
    "Registration",
    "Sequential",
    "__version__",
    "autocast",
    "check_overflow",
    "checkpoint",
    "constant_weights",
    "count_casts",
    "dequantized_state_dict",
    "explain",
    "graph",
    "load_tiles",
    "ops",
    "optional",
    "prepare",
    "quantize",
    "quantized_model_init",
    "recipes",
    "register_fusion",
    "schedule",
    "several",
    "testing",
    "to_quantized",
]
