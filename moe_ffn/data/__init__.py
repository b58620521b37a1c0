"""Text to batches: the corpus, its tokenizer, the cached tokens, and windows over them."""

# The family of corpora is whole once any part of this package is imported.
from moe_ffn.data.corpus import CorpusConfig
from moe_ffn.data.hf_dataset import HFDatasetConfig
from moe_ffn.data.token_files import TokensConfig

__all__ = ["CorpusConfig", "HFDatasetConfig", "TokensConfig"]
