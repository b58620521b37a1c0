"""The Transformer: attention, positions, norms, KV cache, generation."""
