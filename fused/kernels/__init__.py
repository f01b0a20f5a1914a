"""Kernels that only fused operations use: one file a family, each with its reference in plain torch."""
