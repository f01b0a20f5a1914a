"""Number formats, group splits, quantized and grouped tensors, and the quantizers that create them."""
