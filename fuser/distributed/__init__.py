"""Models on several ranks: checkpoints, the norm of gradients, overlapped transfers. Not imported by `import fuser`."""

from fuser.distributed.clip import clip_grad_norm_
from fuser.distributed.experts import expert_parameters
from fuser.distributed.linear_over_symmetric_memory import AllGatherLinear, LinearReduceScatter
from fuser.distributed.overlapped import Overlapped
from fuser.distributed.training_state import TrainingState

__all__ = [
    "AllGatherLinear",
    "LinearReduceScatter",
    "Overlapped",
    "TrainingState",
    "clip_grad_norm_",
    "expert_parameters",
]
