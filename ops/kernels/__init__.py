"""Kernels of the basic operations: one file a family, each with its reference in plain torch."""
