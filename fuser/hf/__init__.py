"""Hugging Face transformers: its models with the experts of this framework. Importing it registers nothing."""

from fuser.hf.experts import experts_layer
from fuser.hf.library import ALL_EXPERTS_FUNCTIONS as ALL_EXPERTS_FUNCTIONS
from fuser.hf.register import register

__all__ = ["experts_layer", "register"]
