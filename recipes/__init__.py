"""Number formats, quantized tensors, and recipes, which choose the number formats of a pipeline."""

from recipes.autocast import autocast
from recipes.current_scaling import Float8CurrentScaling
from recipes.custom import CustomRecipe
from recipes.delayed_scaling import DelayedScaling
from recipes.float8_block import Float8BlockScaling
from recipes.float8_rowwise import Float8RowwiseScaling
from recipes.mixed import MixedScaling
from recipes.mxfp4 import MXFP4BlockScaling
from recipes.mxfp8 import MXFP8BlockScaling
from recipes.nvfp4 import NVFP4BlockScaling
from recipes.quantize import quantize
from recipes.recipe import HighPrecision, Recipe, Role, Target
from recipes.registry import as_recipe
from recipes.request import Needs, PlanRequest
from recipes.stack import current_recipe
from recipes.tensors.formats import E4M3, E5M2, ElementFormat, Float8Format, Format, ScaleRule, ScaleSpec
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_handle import QuantizedHandle
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.scaled_codes import Operand, ScaledCodes
from recipes.tensors.spec_quantizer import FormatQuantizer
from recipes.tensors.splits import Splits

__all__ = [
    "E4M3",
    "CustomRecipe",
    "DelayedScaling",
    "E5M2",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "ElementFormat",
    "Float8Format",
    "Format",
    "FormatQuantizer",
    "GroupedTensor",
    "HighPrecision",
    "MXFP4BlockScaling",
    "MXFP8BlockScaling",
    "MixedScaling",
    "NVFP4BlockScaling",
    "Needs",
    "Operand",
    "PlanRequest",
    "QuantizedHandle",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "Role",
    "ScaleRule",
    "ScaleSpec",
    "ScaledCodes",
    "Splits",
    "Target",
    "as_recipe",
    "autocast",
    "current_recipe",
    "quantize",
]
