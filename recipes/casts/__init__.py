"""Quantize and dequantize kernels, each with its reference in plain torch."""
