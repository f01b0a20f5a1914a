"""Choosing experts from router logits, and moving tokens to their experts and back."""
