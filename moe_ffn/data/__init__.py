"""Text to batches: the corpus, its tokenizer, the cached tokens, and windows over them."""
