"""Formats, splits into groups, quantized and grouped tensors, and the quantizers that make them."""
