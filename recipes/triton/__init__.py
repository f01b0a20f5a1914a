"""What kernels of every kind share: launching, replay, feature checks, rounding, random bits, rows of groups."""
