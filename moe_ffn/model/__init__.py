"""A causal Transformer decoder that sees only FFNBlock."""
