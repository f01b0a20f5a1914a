"""What of Hugging Face transformers is used, and the error where it is not installed."""

from __future__ import annotations

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.trainer_callback import TrainerCallback
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "transformers":
        raise
    raise ImportError(
        "fuser.hf needs transformers 5, whose `transformers.integrations.moe` is not here. "
        "Install it with `pip install 'fuser-ops[hf]'`."
    ) from error

__all__ = ["ALL_EXPERTS_FUNCTIONS", "TrainerCallback"]
