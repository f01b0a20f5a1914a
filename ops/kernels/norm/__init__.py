"""RMSNorm, LayerNorm and L2Normalization."""
