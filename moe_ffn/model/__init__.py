"""The Transformer: attention, positions, norms, KV cache and generation."""
