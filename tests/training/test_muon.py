"""Muon: every expert's matrix is orthogonalised by itself, gate and up apart, and AdamW has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.training import optimizer as optimizers
from moe_ffn.training.optimizer import MuonConfig, orthogonalize

NUM_EXPERTS, D_MODEL, D_FF = 3, 8, 12
LAYER = "layers.0.ffn"


def build() -> nn.Module:
    """A sparse layer with a shared expert, and a gated one; every parameter has a different gradient."""
    torch.manual_seed(0)
    ffn = {
        "type": "moe",
        "num_experts": NUM_EXPERTS,
        "experts": {"type": "swiglu", "d_ff": D_FF, "bias": True},
        "shared_expert": {"type": "swiglu", "d_ff": 6},
    }
    options = {
        "d_model": D_MODEL,
        "num_layers": 1,
        "attention": {"num_heads": 2},
        "ffn": ffn,
        "tie_embeddings": False,
    }
    return DecoderConfig.model_validate(options).build(vocab_size=11, max_seq_len=4)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def matrices(name: str, value: Tensor) -> list[Tensor]:
    """The matrices that a hidden parameter holds, written out; gate and up of each expert apart."""
    if value.ndim == 2:
        return [value]
    if name == f"{LAYER}.experts.gate_up":
        return [half for expert in value for half in (expert[:D_FF], expert[D_FF:])]
    return list(value)


@pytest.mark.parametrize(
    ("adjust_lr_fn", "nesterov", "max_together"),
    [("original", True, 2**24), ("match_rms_adamw", False, 300)],
)
def test_it_is_torchs_muon_of_each_matrix_and_torchs_adamw_of_the_rest(
    adjust_lr_fn: str, nesterov: bool, max_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "MAX_TOGETHER", max_together)
    config = MuonConfig.model_validate(
        {
            "learning_rate": 0.02,
            "weight_decay": 0.5,
            "momentum": 0.8,
            "nesterov": nesterov,
            "ns_steps": 4,
            "adjust_lr_fn": adjust_lr_fn,
            "adamw_learning_rate": 0.003,
            "adamw_betas": (0.7, 0.8),
            "adamw_eps": 1e-4,
        }
    )
    ours, theirs = build(), build()
    optimizer = config.build(ours)
    hidden = {
        name: [nn.Parameter(m.clone()) for m in matrices(name, p.detach())]
        for name, p in theirs.named_parameters()
        if name.startswith("layers.")
        and name.endswith(("weight", "experts.gate_up", "experts.down"))
        if p.ndim > 1
    }
    assert len(hidden) == 4 + 1 + 2 + 3, "attention, router, experts, shared expert"
    rest = {name: p for name, p in theirs.named_parameters() if name not in hidden}
    muon = torch.optim.Muon(
        [m for stacked in hidden.values() for m in stacked],
        lr=0.02, weight_decay=0.5, momentum=0.8, nesterov=nesterov, ns_steps=4, adjust_lr_fn=adjust_lr_fn,
    )  # fmt: skip
    decayed = [p for name, p in rest.items() if name == "unembedding.weight"]
    kept = [p for name, p in rest.items() if name != "unembedding.weight"]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": kept, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.003, betas=(0.7, 0.8), eps=1e-4)

    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        gradients = {name: p.grad for name, p in theirs.named_parameters()}
        for name, stacked in hidden.items():
            gradient = gradients[name]
            assert gradient is not None
            for matrix, of_matrix in zip(stacked, matrices(name, gradient), strict=True):
                matrix.grad = of_matrix.clone()
        optimizer.step()
        muon.step()
        adamw.step()

    for name, parameter in ours.named_parameters():
        if name in rest:
            assert torch.equal(parameter, rest[name]), name
            continue
        pairs = zip(matrices(name, parameter.detach()), hidden[name], strict=True)
        for number, (matrix, expected) in enumerate(pairs):
            # Both are computed in bfloat16, whose last bit is 2 ** -8 of the largest step there was.
            largest = 3 * 0.02 * (0.2 * D_FF**0.5 if adjust_lr_fn == "match_rms_adamw" else 1.5)
            torch.testing.assert_close(
                matrix, expected.detach(), rtol=0, atol=largest * 2**-6, msg=f"{name} {number}"
            )


@pytest.mark.parametrize("shape", [(8, 8), (20, 6), (6, 20)], ids=["square", "tall", "wide"])
def test_every_matrix_of_a_stack_becomes_orthogonal(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    stack = torch.randn(5, *shape) * torch.logspace(-6, 3, 5).view(-1, 1, 1)

    values = torch.linalg.svdvals(orthogonalize(stack, num_steps=5).float())

    assert values.min() > 0.3
    assert values.max() < 1.4
    assert torch.equal(orthogonalize(torch.zeros(2, *shape), 5), torch.zeros(2, *shape).bfloat16())


@pytest.mark.skipif(unavailable_reason() is not None, reason="needs the compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [(0, 4, 4), (2, 1, 5), (3, 5, 1), (2, 7, 7), (3, 176, 128), (2, 130, 300), (1, 100, 530)],
    ids=str,
)
def test_the_compiled_iteration_is_as_exact_as_torch(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is the iteration in float64; torch rounds to bfloat16 at the same places."""
    torch.manual_seed(0)
    matrices_MOI = torch.randn(shape).to(dtype).mT.contiguous().mT  # rows need not lie together
    x = matrices_MOI.double()
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    compiled = torch.ops.moe_ffn_cpu.newton_schulz(
        matrices_MOI, 5, *optimizers._COEFFICIENTS, optimizers._EPS
    )
    torch.set_num_threads(3)
    try:
        by_three = torch.ops.moe_ffn_cpu.newton_schulz(
            matrices_MOI, 5, *optimizers._COEFFICIENTS, optimizers._EPS
        )
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(optimizers, "has_compiled_tiles", lambda *_: False)
    torchs = orthogonalize(matrices_MOI, 5)

    assert compiled.dtype == torchs.dtype
    assert torch.equal(compiled, by_three)
    error, allowed = ((y.double() - x).square().sum().sqrt() for y in (compiled, torchs))
    assert error <= 1.2 * allowed


def test_a_bfloat16_buffer_is_not_made_orthogonal_itself() -> None:
    parameter = nn.Parameter(torch.zeros(2, 4, 3, dtype=torch.bfloat16))
    config = MuonConfig(nesterov=False, momentum=0.5)
    model = nn.ModuleDict({"layers": nn.ParameterDict({"0": parameter})})
    parameter.grad = torch.ones_like(parameter)

    optimizer = config.build(model)
    optimizer.step()

    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], parameter.grad * 0.5)
