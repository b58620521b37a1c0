"""Share of a shared expert in the output."""

from __future__ import annotations

import pytest
import torch

from moe_ffn import TokenContext, build_ffn
from moe_ffn.ffn.moe import MoEFFN


def test_the_shared_share_is_of_the_norms_of_both_parts() -> None:
    config = {"type": "moe", "num_experts": 4, "shared_expert": "dense", "combine": "average"}
    moe = build_ffn(config, d_model=8)
    assert isinstance(moe, MoEFFN)
    assert moe.shared_expert is not None
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False

    output = moe(x, TokenContext(mask=mask))

    # `average` of two experts and a shared one: each third of the sum is one of them.
    shared_TD = (moe.shared_expert(x).hidden / 3)[mask]
    routed_TD = output.hidden[mask] - shared_TD
    shares_T = shared_TD.norm(dim=-1) / (shared_TD.norm(dim=-1) + routed_TD.norm(dim=-1))
    share = output.shared_shares["routing"]
    torch.testing.assert_close(share, shares_T.mean())
    assert not share.requires_grad


@pytest.mark.parametrize(
    ("around", "names"),
    [("mixture_of_depths", ["inner"]), ("chain_of_experts", ["routing", "round_2"])],
)
def test_a_share_inside_another_block_has_the_name_of_its_routing(
    around: str, names: list[str]
) -> None:
    moe = {"type": "moe", "num_experts": 4, "shared_expert": "dense"}
    block = build_ffn({"type": around, "ffn": moe}, d_model=8)
    output = block(torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)))
    assert list(output.shared_shares) == names
    assert all(0 < share < 1 for share in output.shared_shares.values())
