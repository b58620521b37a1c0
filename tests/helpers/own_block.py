"""A block of one's own whose `forward` does what it is told before it returns."""

OWN_BLOCK = """
import torch
from moe_ffn import FFNBlock, FFNConfig, FFNOutput
class Config(FFNConfig, frozen=True):
    def build(self, d_model): return Block()
    def num_params(self, d_model): return 0
    def flops_per_token(self, d_model, seq_len): return 0
class Block(FFNBlock):
    def forward(self, x, context=None):
        %s
        return FFNOutput(x)
"""
