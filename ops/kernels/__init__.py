"""Kernels of the basic operations: one file for each family, with its reference in plain torch."""
