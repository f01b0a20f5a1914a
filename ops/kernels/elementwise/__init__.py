"""Activations, and chains of element-wise functions composed into one kernel."""
