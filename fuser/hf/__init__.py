"""Hugging Face transformers: its models with the experts of this framework. Importing it registers nothing."""

from fuser.hf.blocks import MoEBlock, replace_moe_blocks
from fuser.hf.callback import RecipeCallback
from fuser.hf.convert import convert
from fuser.hf.experts import experts_layer
from fuser.hf.library import ALL_EXPERTS_FUNCTIONS as ALL_EXPERTS_FUNCTIONS
from fuser.hf.register import register

__all__ = ["MoEBlock", "RecipeCallback", "convert", "experts_layer", "register", "replace_moe_blocks"]
