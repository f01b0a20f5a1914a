"""CUDA graphs of modules and of complete training steps."""

from fuser.graph.callables import GraphedCallable, make_graphed_callables
from fuser.graph.step import GraphedStep, make_graphed_step

__all__ = ["GraphedCallable", "GraphedStep", "make_graphed_callables", "make_graphed_step"]
