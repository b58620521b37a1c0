"""The FLOPs of a decoder as torch counts them, and as its config tells them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_ffn.ffn import FFNConfig, MixtureOfDepthsConfig, MoEConfig
from moe_ffn.ffn.mixture_of_depths import by_sequence
from moe_ffn.model.decoder import DecoderConfig, layer_name
from moe_ffn.outputs import Routing

Result = TypeVar("Result")


def counting(call: Callable[[], Result]) -> tuple[int, Result]:
    """Return the FLOPs that torch counts of a call, and its result; attention is not fused, so it counts."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        result = call()
    return counter.get_total_flops(), result


def told(
    model: DecoderConfig, vocab_size: int, routings: Mapping[str, Routing], shape: tuple[int, int]
) -> int:
    """Return the FLOPs that the config gives for a batch, corrected for its own routing."""
    num_tokens, seq_len = shape[0] * shape[1], shape[1]
    seen, square = (
        model.attention.flops_per_token(model.d_model, seq_len, causal)
        for causal in (model.causal, False)
    )
    per_token = model.flops_per_token(vocab_size, seq_len) + model.num_layers * (square - seen)
    layers = enumerate(model.layer_ffns())
    return num_tokens * per_token + sum(
        beyond_the_mean(ffn, routings[layer_name(layer)], model.d_model)
        for layer, ffn in layers
        if layer_name(layer) in routings
    )


def beyond_the_mean(ffn: FFNConfig, routing: Routing, d_model: int) -> int:
    """FLOPs of the pairs there were less those of the mean; 0 where the data do not decide their number."""
    seq_len, num_tokens = routing.sequence_length, routing.num_tokens
    if isinstance(ffn, MixtureOfDepthsConfig) and ffn.router.type == "relu":
        # All sequences are filled up to the one of which most tokens pass.
        rows = by_sequence(routing)[1].sum(dim=1).max().item() * (num_tokens // seq_len)
        return round((rows - ffn.share * num_tokens) * ffn.ffn.flops_per_token(d_model, seq_len))
    if not isinstance(ffn, MoEConfig) or not (
        ffn.router.type in ("relu", "top_p")
        or ffn.capacity.is_limited
        or ffn.zero_computation.total
    ):
        return 0
    pairs = (routing.computed_N & (routing.expert_ids_N < ffn.num_experts)).sum().item()
    pair = ffn.experts.flops_per_pair(d_model, ffn.experts_per_token)
    return round((pairs - num_tokens * ffn.experts_per_token) * pair)
