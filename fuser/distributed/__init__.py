"""Models on several ranks: checkpoints and the norm of gradients. `import fuser` does not import it."""

from fuser.distributed.clip import clip_grad_norm_
from fuser.distributed.experts import expert_parameters
from fuser.distributed.training_state import TrainingState

__all__ = ["TrainingState", "clip_grad_norm_", "expert_parameters"]
