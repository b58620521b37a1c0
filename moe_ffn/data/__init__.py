"""Text to batches: corpus, tokenizer, cached tokens, and windows over them."""

# Importing any part of this package registers every type of corpus.
from moe_ffn.data.corpus import CorpusConfig
from moe_ffn.data.hf_dataset import HFDatasetConfig
from moe_ffn.data.token_files import TokensConfig

__all__ = ["CorpusConfig", "HFDatasetConfig", "TokensConfig"]
