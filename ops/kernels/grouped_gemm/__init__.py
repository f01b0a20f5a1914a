"""The grouped GEMM: high-precision operands, float8 codes, and which tiles they run with."""
