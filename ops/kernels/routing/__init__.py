"""From router logits to experts, and tokens to their experts and back."""
