"""A fixed batch that is routed again and again, to see how many tokens change their experts.

T tokens, E experts
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ffn.metrics.functional import chosen_experts, churn
from moe_ffn.training.module import LanguageModel

PART_OF_BATCH = 1 / 4
"""A look at a quarter of a batch costs about a twelfth of a training step on all of it."""

MOST_TOKENS = 1024
"""More would not make the share of changed tokens much more exact, and checkpoints hold who chose whom."""


class RoutingProbe:
    """Routes the first sequences of the run's batch 0 (of rank 0's part), and remembers who chose whom."""

    def __init__(self) -> None:
        self.chosen: dict[str, Tensor] = {}
        """For each sparse layer, bool (T, E): `chosen_experts` at the last look."""

    @torch.no_grad()
    def look(self, module: LanguageModel) -> dict[str, Tensor]:
        """The churn of each sparse layer since the last look, on the CPU; empty at the first.

        Evaluates, so that nothing is random and no generator moves.
        """
        if module.batch_at is None or not module.decoder.routers():
            return {}
        input_ids = module.batch_at(0)["input_ids"]
        num_sequences = min(int(len(input_ids) * PART_OF_BATCH), MOST_TOKENS // input_ids.shape[1])
        input_ids = input_ids[: max(num_sequences, 1)].to(module.device)
        was_training = module.decoder.training
        module.decoder.eval()
        try:
            # Another shape than the batches', for which a compiled model is not compiled again.
            with torch.compiler.set_stance("force_eager"), module.precision_context():
                routings = module.decoder(input_ids).routings
        finally:
            module.decoder.train(was_training)
        before, self.chosen = self.chosen, {k: chosen_experts(r) for k, r in routings.items()}
        # A mixture of depths hands a number of tokens on that differs from look to look.
        return {
            layer: churn(before[layer].to(now_TE.device), now_TE).cpu()
            for layer, now_TE in self.chosen.items()
            if layer in before and before[layer].shape == now_TE.shape
        }
