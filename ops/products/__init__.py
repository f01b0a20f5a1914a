"""Products of linear layers: their operands, the two storage paths, quantized weights and where weight gradients go."""
