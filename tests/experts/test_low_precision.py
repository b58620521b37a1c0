"""Matrices of experts are rounded to the nearest number of a format, and train as if they were not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_ffn import ConfigError, Decoder, DecoderConfig, build_ffn
from moe_ffn.experts.low_precision import (
    COMPRESSED,
    FORMATS,
    Format,
    fake_quantize,
    pack,
    quantize,
)
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.hf import export_transformers
from moe_ffn.hf.to_transformers import READ_BY_TRANSFORMERS
from moe_ffn.runs.config import TrainConfig

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""The positive numbers of FP4, in the order of their codes; those at even places have an even mantissa."""


def matrices(*, seed: int = 0) -> Tensor:
    """Rows of sizes from 1e-3 to 1e2, one block of zeros, and one block of ties."""
    generator = torch.Generator().manual_seed(seed)
    weight_EOI = torch.randn(3, 16, 64, generator=generator)
    weight_EOI *= torch.logspace(-3, 2, 16)[:, None]
    weight_EOI[0, 0, :32] = 0
    weight_EOI[1, 5, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)
    return weight_EOI


def nearest(numbers: list[float], x: float) -> float:
    """The nearest of some numbers, in the order of their codes; of two, the one at an even place."""
    return min(enumerate(numbers), key=lambda item: (abs(item[1] - abs(x)), item[0] % 2))[1]


def largest_power(x: float) -> int:
    """floor(log2 x), by counting."""
    exponent = 0
    while 2.0**exponent > x:
        exponent -= 1
    while 2.0 ** (exponent + 1) <= x:
        exponent += 1
    return exponent


E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [
    (1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)
]
GRIDS: dict[str, tuple[list[float], int]] = {"mxfp4": (E2M1, 2), "mxfp8": (E4M3, 8)}


@pytest.mark.parametrize("name", GRIDS)
def test_mx_takes_the_nearest_element_at_the_power_of_two_of_the_standard(name: Format) -> None:
    """OCP Microscaling Formats 1.0, section 6.3, number by number."""
    grid, largest_exponent = GRIDS[name]
    weight_EOI = matrices()[:2, ::5]
    wanted = torch.zeros_like(weight_EOI)
    blocks, found = weight_EOI.reshape(-1, 32).tolist(), wanted.view(-1, 32)
    for row, block in enumerate(blocks):
        if (largest := max(map(abs, block))) == 0:
            continue
        scale = 2.0 ** (largest_power(largest) - largest_exponent)
        sizes = [nearest(grid, x / scale) * scale for x in block]
        found[row] = torch.tensor([s if x >= 0 else -s for s, x in zip(sizes, block, strict=True)])
    assert torch.equal(fake_quantize(weight_EOI, name), wanted)


def test_nvfp4_scales_blocks_in_e4m3_and_matrices_in_float32() -> None:
    weight_EOI = matrices()
    elements, scales, whole = quantize(weight_EOI, "nvfp4")
    assert whole is not None
    torch.testing.assert_close(whole.flatten(), weight_EOI.abs().amax((1, 2)) / (448 * 6))
    largest = weight_EOI.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    for found, exact in zip(scales.flatten(), (largest / 6 / whole).flatten(), strict=True):
        assert found == nearest(E4M3, max(exact.item(), 2.0**-6))  # the smallest normal number
    scaled = weight_EOI.unflatten(-1, (-1, 16)) * ((1 / whole) / scales)
    wanted = [nearest(E2M1, x) for x in scaled.flatten().tolist()]
    assert torch.equal(elements.abs().flatten(), torch.tensor(wanted))
    torch.testing.assert_close(
        fake_quantize(weight_EOI, "nvfp4"),
        (elements * scales * whole).flatten(-2),
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.parametrize(("name", "steps"), [("int4", 7.5), ("int8", 127.5)])
def test_integers_divide_the_largest_number_of_a_group_into_equal_steps(
    name: Format, steps: float
) -> None:
    weight_EOI = matrices()
    groups = weight_EOI.unflatten(-1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True) / steps
    wanted = (groups / step.clamp(min=1e-30)).round().clamp(-(steps + 0.5), steps - 0.5) * step
    torch.testing.assert_close(
        fake_quantize(weight_EOI, name), wanted.flatten(-2), rtol=1e-6, atol=0
    )


def test_fp8_scales_each_row_to_448() -> None:
    weight_EOI = matrices()
    elements, scales, _ = quantize(weight_EOI, "fp8")
    assert (elements.abs().amax((-1, -2)) == 448).all()
    assert {*elements.abs().unique().tolist()} <= {*E4M3}
    torch.testing.assert_close((elements * scales).flatten(-2), weight_EOI, rtol=2**-4, atol=1e-7)


# -- experts


def block(**options: Any) -> FFNBlock:
    torch.manual_seed(0)
    experts = {"type": "fake_quantized", "experts": {"type": "swiglu", "d_ff": 32}, **options}
    return build_ffn({"type": "moe", "num_experts": 4, "experts": experts}, 64)


def rounded(moe: Any, name: Format) -> dict[str, Tensor]:
    inner = moe.experts.experts
    names = ("gate_up", "down")
    return {f"experts.experts.{key}": fake_quantize(getattr(inner, key), name) for key in names}


@pytest.mark.parametrize("name", FORMATS)
def test_a_block_computes_with_its_rounded_matrices_and_trains_the_exact_ones(name: Format) -> None:
    moe, plain, x = block(format=name), block(format=None), torch.randn(2, 9, 64)
    exact = plain(x).hidden
    plain.load_state_dict(rounded(moe, name), strict=False)

    found, wanted = moe(x).hidden, plain(x).hidden
    for hidden in (found, wanted):
        hidden.square().sum().backward()

    assert torch.equal(found, wanted)
    assert not torch.equal(found, exact)
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(moe.get_parameter(key).grad, parameter.grad)


def test_inputs_are_rounded_token_by_token() -> None:
    moe, x = block(format=None, inputs="nvfp4"), torch.randn(1, 7, 64)
    together = moe(x).hidden
    larger = torch.cat([x[:, :3], 100 * x[:, 3:]], dim=1)
    assert torch.equal(moe(larger).hidden[:, :3], together[:, :3])
    assert not torch.equal(together, block(format=None)(x).hidden)


@pytest.mark.parametrize("name", FORMATS)
def test_quantization_keeps_infinities_visible(name: Format) -> None:
    weight_OI = matrices()[0]
    weight_OI[3, 40] = torch.inf
    assert not fake_quantize(weight_OI, name)[3].isfinite().all()


def test_inputs_of_narrower_experts_have_their_width() -> None:
    latent = {"type": "latent", "width": 32, "experts": {"type": "swiglu", "d_ff": 32}}
    experts = {"type": "fake_quantized", "inputs": "mxfp4", "format": "mxfp4", "experts": latent}
    moe = build_ffn({"type": "moe", "experts": experts}, 48)
    assert moe(torch.randn(1, 5, 48)).hidden.isfinite().all()


def test_a_format_of_null_can_be_replaced_later() -> None:
    assert block(format=None).state_dict().keys() == block(format="mxfp4").state_dict().keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"format": "mxfp4", "experts": {"type": "swiglu", "d_ff": 40}},
            r"experts.format \(mxfp4\) scales blocks of 32 numbers, but d_ff is 40; make it 32 or 64, or use",
        ),
        ({"format": "mxfp5"}, "experts.format: must be one of 'mxfp4', .*, got 'mxfp5'"),
        ({"experts": {"type": "fake_quantized"}}, "'fake_quantized' cannot be inside itself"),
        ({"experts": "value"}, "rounds matrices, but experts of type 'value' have none"),
    ],
)
def test_a_format_that_does_not_fit_the_experts_is_rejected(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        block(**options)


LATENT = {"type": "latent", "width": 40, "experts": {"type": "swiglu", "d_ff": 64}}
MATCHED = {
    "type": "swiglu",
    "d_ff": {"match": "active_params", "of": {"type": "dense", "d_ff": 90}},
}


@pytest.mark.parametrize(
    ("ffn", "said"),
    [
        (
            {"experts": {"format": None, "inputs": "mxfp4"}},
            r"model.ffn.experts.inputs \(mxfp4\) scales blocks of 32 numbers, but d_model is 48; make it",
        ),
        (
            {"experts": {"format": "nvfp4", "experts": LATENT}},
            r"model.ffn.experts.format \(nvfp4\) scales blocks of 16 numbers, but the inner width is 40;",
        ),
        (
            {"experts": {"format": "nvfp4", "experts": MATCHED}},
            r"model.ffn.experts.format \(nvfp4\) scales blocks of 16 numbers, but d_ff is 29; make it 16",
        ),
        (
            {"type": "biased", "ffn": {"type": "moe", "experts": {"format": "int8"}}},
            r"model.ffn.ffn.experts.format \(int8\) scales blocks of 32 numbers, but d_model is 48; make",
        ),
    ],
)
def test_a_format_that_widths_do_not_divide_is_rejected_before_a_module_is_built(
    ffn: dict[str, Any], said: str
) -> None:
    block = ffn.get("ffn", ffn)
    block["experts"]["type"] = "fake_quantized"
    model = {"d_model": 48, "ffn": {"type": "moe", **ffn}}
    with pytest.raises(ValueError, match=said):
        TrainConfig.model_validate({"model": model})


# -- stored tensors


def unpacked(stored: dict[str, Tensor], name: Format) -> Tensor:
    """The matrix that stored tensors hold, in float64: elements times scales."""
    scale = stored["weight_scale"]
    if name in ("mxfp4", "mxfp8"):
        scale = 2.0 ** (scale.double() - 127)
    if (whole := stored.get("weight_global_scale")) is not None:
        scale = scale.float() / whole
    if name in ("int4", "int8"):
        bits = int(name[-1])
        words = stored["weight_packed"].to(torch.int64) & 0xFFFFFFFF
        codes = (words.unsqueeze(-1) >> torch.arange(0, 32, bits)) & (2**bits - 1)
        elements = codes.flatten(-2) - 2 ** (bits - 1)
        assert elements.shape == tuple(stored["weight_shape"])
    elif "weight_packed" in stored:
        codes = torch.stack([stored["weight_packed"] & 15, stored["weight_packed"] >> 4], -1)
        code = codes.flatten(-2)
        elements = torch.tensor(E2M1)[(code & 7).long()] * (1 - 2.0 * (code >> 3))
    else:
        elements = stored["weight"]
    blocks = elements.double().unflatten(-1, (scale.shape[-1], -1))
    return (blocks * scale.double().unsqueeze(-1)).flatten(-2)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_tensors_hold_the_rounded_matrix(name: Format) -> None:
    weight_OI = matrices()[0]
    found = unpacked(pack(weight_OI, name), name)
    torch.testing.assert_close(found.float(), fake_quantize(weight_OI, name), rtol=1e-6, atol=0)


FAMILIES = {
    "mixtral": {"router": {"type": "top_k", "renormalize": True}},
    "qwen2_moe": {"shared_expert": {"type": "swiglu", "d_ff": 64}, "combine": "sigmoid_gate"},
}
"""Architecture in transformers -> options of its block."""


def rounded_block(name: Format | None, architecture: str) -> dict[str, Any]:
    experts = {"type": "fake_quantized", "format": name, "experts": {"type": "swiglu", "d_ff": 32}}
    return {"type": "moe", "num_experts": 3, "experts": experts, **FAMILIES[architecture]}


def rounded_model(name: Format | None, architecture: str, **options: Any) -> Decoder:
    given = {"d_model": 64, "num_layers": 2, "ffn": rounded_block(name, architecture), **options}
    torch.manual_seed(1)
    decoder = DecoderConfig.model_validate(given).build(97, 32).eval()
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return decoder


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param(name, family, marks=[pytest.mark.slow] * bool(format_number and number))
        for format_number, name in enumerate(FORMATS)
        for number, family in enumerate(FAMILIES)
    ],
)
def test_a_packed_folder_holds_the_rounded_experts_and_every_other_weight(
    name: Format, architecture: str, tmp_path: Path
) -> None:
    decoder = rounded_model(name, architecture)
    export_transformers(decoder, tmp_path / "rounded")
    export_transformers(decoder, tmp_path / "packed", packed=True)

    rounded = load_file(tmp_path / "rounded/model.safetensors")
    stored = load_file(tmp_path / "packed/model.safetensors")
    for key, weight in rounded.items():
        if ".experts." not in key:
            assert torch.equal(stored.pop(key), weight)
            continue
        stem = key.removesuffix("weight")
        packed = {n.removeprefix(stem): stored.pop(n) for n in [*stored] if n.startswith(stem)}
        torch.testing.assert_close(unpacked(packed, name).float(), weight, rtol=1e-6, atol=0)
    assert not stored

    config = json.loads((tmp_path / "packed/config.json").read_text())
    assert config["quantization_config"]["format"] == COMPRESSED[name][0]
    sizes = [(tmp_path / f"{f}/model.safetensors").stat().st_size for f in ("packed", "rounded")]
    assert sizes[0] < sizes[1]


ROUNDED = rounded_block("int4", "mixtral")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ffn": "moe"}, "--packed stores rounded experts, but layer 0 has none; train with"),
        (
            {"ffn_at": {"1": ROUNDED | {"experts": {"type": "swiglu", "d_ff": 32}}}},
            "--packed stores rounded experts, but layer 1 has none; train with",
        ),
        (
            {"ffn_at": {"1": rounded_block("mxfp4", "mixtral")}},
            "--packed stores one format, but the experts of layer 0 are int4 and those of layer 1 mxfp4",
        ),
        (
            {"ffn": ROUNDED | {"router": {"type": "top_k", "renormalize": True, "scale": 2.5}}},
            r"model.ffn.router.scale \(2.5\) multiplies the rounded down projections of mixtral",
        ),
    ],
)
def test_a_model_that_cannot_be_packed_is_rejected(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        export_transformers(
            rounded_model("int4", "mixtral", **options), tmp_path / "m", packed=True
        )
    assert not (tmp_path / "m").exists()


# -- libraries, which `make clients` installs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("mxfp4", "float4_e2m1fn_x2"), ("mxfp8", "float8_e4m3fn")]
)
def test_mx_equals_torchao_to_the_bit(name: Format, dtype: str) -> None:
    theirs = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    weight_RI = matrices().flatten(0, 1)
    element = getattr(torch, dtype)
    scale, data = theirs.to_mx(weight_RI, element, 32)
    wanted = theirs.to_dtype(data, scale, element, 32, torch.float32)
    assert torch.equal(fake_quantize(weight_RI, name), wanted)


@pytest.mark.slow
def test_nvfp4_equals_torchao_to_the_bit() -> None:
    theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    generator = torch.Generator().manual_seed(0)
    # Of bfloat16 numbers many lie between two elements: there a quotient by the scale rounds otherwise.
    ties = torch.randn(4, 128, 512, generator=generator).bfloat16().float()
    for weight_OI in (*matrices(), *ties):
        whole = theirs.per_tensor_amax_to_scale(weight_OI.abs().max())
        scale, packed = theirs.nvfp4_quantize(weight_OI, 16, whole)
        ours = pack(weight_OI, "nvfp4")
        assert torch.equal(ours["weight_packed"], packed)
        assert torch.equal(ours["weight_scale"].float(), scale.float())
        assert torch.equal(ours["weight_global_scale"], 1 / whole[None])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_integers_and_fp8_equal_compressed_tensors_to_the_bit(name: Format) -> None:
    theirs = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = theirs.QuantizationArgs.model_validate({**COMPRESSED[name][1], "symmetric": True})
    for weight_OI in matrices():
        blocks = weight_OI.unflatten(-1, (-1, FORMATS[name].block or 64))
        scale, zero = theirs.utils.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
        wanted = forward.fake_quantize(weight_OI, scale, zero, args)
        assert torch.equal(fake_quantize(weight_OI, name), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_packed_tensors_are_read_by_compressed_tensors(name: Format) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    kind, arguments = COMPRESSED[name]
    args = quantization.QuantizationArgs.model_validate({**arguments, "symmetric": True})
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = compressors.BaseCompressor.get_value_from_registry(kind)
    weight_OI = matrices()[0]

    read = compressor.decompress(pack(weight_OI, name), scheme)["weight"]

    rtol = 2**-8 if name == "nvfp4" else 1e-6  # there it multiplies in bfloat16
    torch.testing.assert_close(read.float(), fake_quantize(weight_OI, name), rtol=rtol, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_compressed_tensors_reads_a_packed_folder(
    name: Format, architecture: str, tmp_path: Path
) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    decoder = rounded_model(name, architecture)
    export_transformers(decoder, tmp_path / "rounded")
    export_transformers(decoder, tmp_path / "packed", packed=True)
    options = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(options)
    (scheme,) = config.config_groups.values()
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)

    stored = load_file(tmp_path / "packed/model.safetensors")
    experts = 0
    for key, weight in load_file(tmp_path / "rounded/model.safetensors").items():
        module = key.removesuffix(".weight")
        if re.match(scheme.targets[0].removeprefix("re:"), module):
            experts += 1
            names = [n for n in stored if n.startswith(f"{module}.")]
            packed = {n.removeprefix(f"{module}."): stored[n] for n in names}
            read = compressor.decompress(packed, scheme)["weight"].float()
            rtol = 2**-8 if name == "nvfp4" else 1e-6  # there it multiplies in bfloat16
            torch.testing.assert_close(read, weight, rtol=rtol, atol=0)
    assert experts == 2 * 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("name", sorted(READ_BY_TRANSFORMERS))
def test_transformers_reads_a_packed_folder(
    name: Format, architecture: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    decoder, exact = rounded_model(name, architecture), rounded_model(None, architecture)
    export_transformers(decoder, tmp_path / "m", packed=True)
    ids_BS = torch.arange(20)[None]
    with torch.no_grad():
        wanted = decoder(ids_BS).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
        # It decompresses MXFP4 to bfloat16, which holds the numbers exactly.
        torch.testing.assert_close(theirs.float()(ids_BS).logits, wanted, atol=1e-4, rtol=0)
        assert (exact(ids_BS).logits - wanted).abs().max() > 0.02
