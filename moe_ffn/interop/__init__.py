"""Models outside of a run: folders with weights, config and tokenizer; our kernels in transformers."""
