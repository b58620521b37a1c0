from __future__ import annotations

from math import cos, sin
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moe_ffn.model.decoder import Decoder, DecoderConfig
from moe_ffn.model.positions import LearnedConfig, PositionsConfig, RotaryConfig, SinusoidalConfig

# The tables are float32 of size one; a sum over a head's few units keeps about six digits.
FLOAT32 = 1e-5


def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
    """A head's units (d,) as if they stood at `position`."""
    rotary = RotaryConfig().build(d_model=0, head_dim=x.shape[-1], max_seq_len=64)
    return rotary.rotate(x.expand(1, 1, 64, -1))[0, 0, position]


def test_rope_angles_by_hand() -> None:
    # Head width 4, base 10000: frequencies 1 and 10000^(-2/4) = 0.01. Llama pairs unit 0 with 2 and
    # unit 1 with 3. At position 3 the angles are 3 and 0.03.
    one, two = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0, 1.0, 0, 0])
    assert rotate(one, 3).tolist() == pytest.approx([cos(3), 0, sin(3), 0], abs=FLOAT32)
    assert rotate(two, 3).tolist() == pytest.approx([0, cos(0.03), 0, sin(0.03)], abs=FLOAT32)
    # and the second of a pair turns to (-sin, cos)
    assert rotate(one.roll(2), 3).tolist() == pytest.approx([-sin(3), 0, cos(3), 0], abs=FLOAT32)


def test_a_fraction_of_a_head_is_rotated() -> None:
    x = torch.randn(2, 1, 9, 8)
    half = RotaryConfig(fraction=0.5).build(d_model=0, head_dim=8, max_seq_len=9)
    whole = RotaryConfig().build(d_model=0, head_dim=4, max_seq_len=9)
    assert torch.equal(half.rotate(x)[..., :4], whole.rotate(x[..., :4]))
    assert torch.equal(half.rotate(x)[..., 4:], x[..., 4:])


YARN = {"type": "yarn", "factor": 4.0, "original_seq_len": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {"type": "llama3", "factor": 8.0, "original_seq_len": 64},
    "llama3-narrow": {
        "type": "llama3", "factor": 2.0, "original_seq_len": 16, "low_freq_factor": 0.5,
        "high_freq_factor": 2.0,
    },
    "yarn": YARN,
    "yarn-sharper": {**YARN, "attention_factor": 1.7, "beta_fast": 8, "beta_slow": 0.5},
    "yarn-not-rounded": {**YARN, "truncate": False, "original_seq_len": 4096},
    "yarn-short": {**YARN, "original_seq_len": 3},
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_scaled_angles_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    names = {"type": "rope_type", "original_seq_len": "original_max_position_embeddings"}
    given = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if "llama3" in scaling["type"] else {}
    given |= {names.get(key, key): value for key, value in scaling.items()}
    theirs: Any = LlamaConfig(head_dim=32, rope_parameters={**given, "rope_theta": 500.0})
    frequencies_F, magnitude = ROPE_INIT_FUNCTIONS[scaling["type"]](theirs)
    angles = torch.outer(torch.arange(9).float(), frequencies_F.repeat(2))

    ours: Any = RotaryConfig.model_validate({"base": 500.0, "scaling": scaling}).build(0, 32, 9)

    torch.testing.assert_close(ours.cos, angles.cos() * magnitude, rtol=0, atol=FLOAT32)
    torch.testing.assert_close(ours.sin, angles.sin() * magnitude, rtol=0, atol=FLOAT32)
    assert ours.score_factor == 1


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_earlier_training_was_shorter_by_the_factor(kind: str) -> None:
    def build(**scaling: Any) -> Decoder:
        positions = {"type": "rope", "scaling": {"type": kind, "factor": 4.0, **scaling}}
        return DecoderConfig.model_validate({"d_model": 8, "positions": positions}).build(5, 256)

    by_default, given = build(), build(original_seq_len=64)

    assert by_default.config == given.config, "an export writes the config of the decoder"
    assert torch.equal(by_default.get_buffer("positions.cos"), given.get_buffer("positions.cos"))


def test_sinusoidal_values_by_hand() -> None:
    # D = 4: frequencies 1 and 10000^(-2/4) = 0.01, sines and cosines interleaved.
    positions = SinusoidalConfig().build(d_model=4, head_dim=4, max_seq_len=8)
    table = positions.embed(torch.zeros(1, 6, 4))[0]
    assert table[0].tolist() == [0, 1, 0, 1]
    assert table[2].tolist() == pytest.approx([sin(2), cos(2), sin(0.02), cos(0.02)], abs=1e-6)
    assert table[5].tolist() == pytest.approx([sin(5), cos(5), sin(0.05), cos(0.05)], abs=1e-6)


def test_learned_positions_are_added_and_learn() -> None:
    torch.manual_seed(0)
    positions: Any = LearnedConfig().build(d_model=4, head_dim=4, max_seq_len=8)
    x = torch.ones(2, 3, 4)
    embedded = positions.embed(x)
    assert torch.equal(embedded, 1 + positions.table.weight[:3].expand(2, 3, 4))
    embedded.sum().backward()
    # Two sequences of three: gradient 2 for the positions used and 0 beyond.
    assert positions.table.weight.grad[:, 0].tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    # They begin as small as embeddings; the deviation of 8192 numbers is known to 1 in sqrt(2 * 8192).
    many: Any = LearnedConfig().build(d_model=64, head_dim=4, max_seq_len=128)
    assert many.table.weight.std().item() == pytest.approx(0.02, rel=0.04)


@pytest.mark.parametrize("member", PositionsConfig.members)
def test_every_member_either_embeds_or_rotates(member: str) -> None:
    torch.manual_seed(0)
    positions = PositionsConfig.model_validate(member).build(8, 8, 16)
    x = torch.randn(2, 3, 8)
    heads = torch.randn(2, 1, 3, 8)
    embeds = not torch.equal(positions.embed(x), x)
    rotates = not torch.equal(positions.rotate(heads), heads)
    assert embeds != rotates
    assert positions.rotate(heads.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("member", ["rope", "sinusoidal"])
def test_tables_do_not_keep_the_rounding_of_an_earlier_dtype(member: str) -> None:
    """`load_pretrained` reads a model in bfloat16; `.float()` then computes with exact angles."""
    built = PositionsConfig.model_validate(member).build(8, 8, 64)
    exact = {name: table.clone() for name, table in built.named_buffers()}
    for name, table in built.bfloat16().named_buffers():
        assert torch.equal(table, exact[name].bfloat16())
    for name, table in built.float().named_buffers():
        assert torch.equal(table, exact[name])
    for name, table in built.to_empty(device="cpu").named_buffers():
        assert torch.equal(table, exact[name])


@pytest.mark.parametrize("member", PositionsConfig.members)
def test_tables_are_in_no_checkpoint(member: str) -> None:
    config = PositionsConfig.model_validate(member)
    positions = config.build(8, 8, 16)
    saved = sum(value.numel() for value in positions.state_dict().values())
    assert saved == config.num_params(8, 16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"d_model": 12, "attention": {"num_heads": 4}},
            r"positions\.type 'rope' needs an even head width, got 3 \(attention\.head_dim, by default "
            r"d_model \(12\) / num_heads, or attention\.latent\.rotated_dim\)",
        ),
        (
            {
                "d_model": 24,
                "attention": {"num_heads": 4},
                "positions": {"type": "rope", "fraction": 0.5},
            },
            r"positions\.fraction \(0\.5\) of a head of width 6 must be an even number of units, got 3",
        ),
        (
            {"d_model": 9, "attention": {"num_heads": 1}, "positions": "sinusoidal"},
            r"positions\.type 'sinusoidal' needs an even d_model, got 9",
        ),
    ],
    ids=["rope", "fraction", "sinusoidal"],
)
def test_odd_widths_are_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig.model_validate(config)


def test_frequencies_of_llama3_in_the_wrong_order_are_rejected() -> None:
    scaling = {"type": "llama3", "factor": 8, "low_freq_factor": 4.0}
    message = r"low_freq_factor \(4\) must be less than high_freq_factor \(4\)"
    with pytest.raises(ValueError, match=message):
        PositionsConfig.model_validate({"type": "rope", "scaling": scaling})
