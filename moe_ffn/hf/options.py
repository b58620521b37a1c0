"""Translation of options between transformers and our configs, in parts that describe an architecture.

Our options are flat here: dotted paths of a `DecoderConfig`. The block of sparse layers is under `sparse.`,
the block of dense layers under `dense.`, and `sparse_layers` lists the numbers of the sparse layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_ffn.config.errors import ConfigError, show
from moe_ffn.model.positions import yarn_mscale

Options = Mapping[str, Any]
"""Our options: dotted path -> value."""


GROUPS = {"num_groups": "n_group", "keep": "topk_group"}
"""Our option of a router's groups -> theirs."""


@dataclass(frozen=True)
class HFConfig:
    """The `config.json` of a model of transformers, with the library's defaults."""

    where: str
    """Name of the folder, model or block; messages begin with it."""
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of options that `values` lacks."""

    def __contains__(self, key: str) -> bool:
        return key in self.values or key in self.defaults

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise ConfigError(f"{self.where}: {key} is missing; take the config.json of this model")
        return self.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, self.defaults.get(key, default))

    def count(self, key: str, least: int = 1) -> int:
        value = self[key]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 10**9:
            raise ConfigError(
                f"{self.where}: {key} is {show(value)}; give a whole number from {least} to 10^9"
            )
        return value

    def layers(self) -> range:
        """Return the numbers of all layers."""
        count = self.count("num_hidden_layers")
        if count > 10_000:
            raise ConfigError(f"{self.where}: num_hidden_layers is {count}; give at most 10000")
        return range(count)

    def require(self, key: str, *supported: Any) -> None:
        """Raise ConfigError if the option has a value that our model does not support."""
        if key in self and self[key] not in supported:
            raise self.error(f"{key} is {show(self[key])}", " or ".join(map(show, supported)))

    def translate(self, key: str, values: Mapping[str, str]) -> str:
        """Return our name for the value of an option; ConfigError if `values` lacks it."""
        self.require(key, *values)
        return values[self[key]]

    def groups(self) -> dict[str, Any] | None:
        """Return the groups of experts in which a router chooses; None if it chooses among all experts."""
        if self["n_group"] is None or self["n_group"] == self["topk_group"] == 1:
            return None
        return {ours: self[theirs] for ours, theirs in GROUPS.items()}

    def error(self, problem: str, supported: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {problem}, which our model does not support; supported: {supported}"
        )


@dataclass(frozen=True)
class OptionMapping:
    """Translation of a group of options between `config.json` of transformers and our config."""

    read: Callable[[HFConfig], Options]
    """Returns our options for a `config.json`; raises ConfigError for an option that we do not support."""
    write: Callable[[Options], Mapping[str, Any]] = lambda options: {}
    """Returns the options of a `config.json` for ours; an export reads them back to check them."""


def jittered(block: Options) -> dict[str, Any]:
    """Return a block without its option `jitter`; inside a block that jitters its input, if that is not 0."""
    inner = dict(block)
    jitter = inner.pop("jitter", 0)
    return {"type": "jittered", "jitter": jitter, "ffn": inner} if jitter else inner


YARN_IN_GGUF = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
"""Values that llama.cpp always uses, except for a few architectures."""


@dataclass(frozen=True)
class LlamaCpp:
    """Limits of an architecture in llama.cpp, which reads fewer options than transformers."""

    architecture: str
    """Its name in GGUF files."""
    renormalizes: bool | None = None
    """True if the weights of the chosen experts are divided by their sum; None without experts, or if both
    are possible."""
    has_biases: bool = False
    """Attention can have biases."""
    has_head_dim: bool = True
    """Heads can have another width than d_model / num_heads."""
    has_groups: bool = True
    """Several query heads can share a key-value head."""
    is_same_in_mlx: bool = False
    """mlx-lm has the same limits."""
    has_windows: bool = False
    """Attention can have windows."""
    experts: Mapping[str, Any] = field(default_factory=lambda: {"type": "swiglu"})
    """Options of experts, or of the dense block, that llama.cpp always uses."""
    converter_eps: float | None = None
    """The only `norm.eps` that the converter of llama.cpp writes; None: it writes the model's."""

    def problem(self, options: Options) -> str | None:
        """Return the first requirement of llama.cpp that these options do not meet; None if they meet all."""
        block = "sparse.experts" if options["sparse_layers"] else "dense"
        dense = options["num_layers"] - len(options["sparse_layers"])
        heads = options["attention.num_heads"] * options["attention.head_dim"]
        scaling = options.get("positions.scaling.type")
        is_latent = "attention.latent.kv_rank" in options
        gates = {key: options[f"{block}.{key}"] for key in self.experts}
        problems = {
            f"silu gates (swiglu), as mlx-lm does, not {gates['type']},": (
                self.experts["type"] != gates["type"]
            ),
            "ffn.experts.alpha: 1.702 and limit: 7": gates != self.experts,
            f"sparse layers only, not {dense} dense (model.ffn_at),": self.renormalizes is not None
            and dense,
            f"ffn.router.renormalize: {str(self.renormalizes).lower()}": (
                self.renormalizes not in (None, options.get("sparse.router.renormalize"))
            ),
            "attention.bias: false": options["attention.bias"] and not self.has_biases,
            "heads of width d_model / num_heads": (
                heads != options["d_model"] and not self.has_head_dim
            ),
            "attention.num_kv_heads equal to num_heads": (
                options["attention.num_kv_heads"] != options["attention.num_heads"]
                and not self.has_groups
            ),
            "attention.window: null": "attention.window" in options and not self.has_windows,
            f"positions.scaling other than {scaling}": (
                (scaling == "llama3" and self.architecture != "llama")
                or (scaling == "linear" and is_latent)
            ),
            "positions.scaling.attention_factor: 1": (
                scaling == "yarn"
                and is_latent
                and options.get("positions.scaling.attention_factor") != 1
            ),
            "attention.latent.query_rank: null with 26 or 27 layers": (
                "attention.latent.query_rank" in options and options["num_layers"] in (26, 27)
            ),
            "positions.scaling with beta_fast: 32, beta_slow: 1 and truncate: true": (
                scaling == "yarn"
                and any(options[f"positions.scaling.{key}"] != v for key, v in YARN_IN_GGUF.items())
            ),
        }
        return next((problem for problem, applies in problems.items() if applies), None)


def renamed(hf_key: str, key: str, fallback: Any = None) -> OptionMapping:
    """Map an option with another name; write `fallback` if ours is missing or of another type."""

    def write(options: Options) -> dict[str, Any]:
        value = options.get(key, fallback)
        fits = fallback is None or isinstance(value, type(fallback))
        return {hf_key: value if fits else fallback}

    return OptionMapping(lambda hf: {key: hf[hf_key]}, write)


def constant(options: Options) -> OptionMapping:
    """Set options that every model of this architecture has, but its `config.json` does not name."""
    return OptionMapping(lambda hf: options)


def accept_only(hf_key: str, *supported: Any) -> OptionMapping:
    """Accept only these values of their option; write the first one."""

    def read(hf: HFConfig) -> Options:
        hf.require(hf_key, *supported)
        return {}

    return OptionMapping(read, lambda options: {hf_key: supported[0]})


ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu",
    "sigmoid": "glu",
    "linear": "bilinear",
}
"""Their activation of a gate -> the type of our gated block."""


def gated(*keys: str) -> OptionMapping:
    """Map `hidden_act`, which all blocks of a model share, to types of gated blocks."""

    def read(hf: HFConfig) -> Options:
        return dict.fromkeys(keys, hf.translate("hidden_act", ACTIVATIONS))

    def write(options: Options) -> dict[str, Any]:
        ours = options.get(keys[0])
        names = (name for name, block_type in ACTIVATIONS.items() if block_type == ours)
        return {"hidden_act": next(names, "silu")}

    return OptionMapping(read, write)


SCALING_NAMES = {
    "factor": "factor",
    "original_max_position_embeddings": "original_seq_len",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}
"""Their option of scaled rotary positions -> ours, under `positions.scaling.`."""

SCALING_NUMBERS = ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
"""Their options that are computed with before our config checks the result."""


def rope(*, has_fraction: bool = False, has_score_factor: bool = False) -> OptionMapping:
    """Map rotary positions, of a fraction of each head if `has_fraction`. With `has_score_factor` and YaRN,
    `mscale_all_dim` also multiplies attention scores.
    """

    def read(hf: HFConfig) -> Options:
        name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
        rope = hf.get(name) or {}
        if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
            raise hf.error(f"{name} is {show(rope)}", "one mapping for all layers")
        fraction = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
        if fraction not in (None, 1) and not has_fraction:
            raise hf.error(f"partial_rotary_factor is {show(fraction)}", "1.0")
        return {
            "positions.type": "rope",
            "positions.base": rope.get("rope_theta", hf.get("rope_theta", hf["default_theta"])),
            "positions.fraction": 1.0 if fraction is None else fraction,
            **_read_scaling(hf, name, rope, has_score_factor),
        }

    def write(options: Options) -> dict[str, Any]:
        base = options.get("positions.base", 10_000.0)
        scaling = _write_scaling(options, has_score_factor)
        rope = {"rope_type": "default", **scaling, "rope_theta": base}
        if has_fraction:
            rope["partial_rotary_factor"] = options.get("positions.fraction", 1.0)
        # Transformers before version 5 and other libraries read the keys outside `rope_parameters`.
        outside = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        return {"rope_parameters": rope, **outside, "rope_scaling": rope if scaling else None}

    return OptionMapping(read, write)


def _read_scaling(
    hf: HFConfig, name: str, rope: Mapping[str, Any], has_score_factor: bool
) -> Options:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    supported = ("linear", "llama3", "yarn")
    if kind not in supported:
        given = ", ".join(map(show, ("default", *supported)))
        raise hf.error(f"{name}.rope_type is {show(kind)}", given)
    for key in SCALING_NUMBERS:
        value = rope.get(key)
        if value is not None and not (type(value) in (int, float) and value >= 0):
            raise hf.error(f"{name}.{key} is {show(value)}", "a number of at least 0")
    scaling: dict[str, Any] = {"type": kind, "factor": rope.get("factor")}
    if kind != "linear":
        length = hf["max_position_embeddings"]
        scaling["original_seq_len"] = rope.get("original_max_position_embeddings") or length
        names = SCALING_NAMES.items()
        scaling |= {ours: rope[key] for key, ours in names if rope.get(key) is not None}
    if kind == "yarn":
        if scaling["factor"] is None:
            scaling["factor"] = hf["max_position_embeddings"] / scaling["original_seq_len"]
        mscale, of_all = (rope.get(key) or 0.0 for key in ("mscale", "mscale_all_dim"))
        if "attention_factor" not in scaling and mscale and of_all and scaling["factor"]:
            numerator, denominator = (yarn_mscale(scaling["factor"], m) for m in (mscale, of_all))
            scaling["attention_factor"] = numerator / denominator
        if has_score_factor:
            scaling["score_mscale"] = of_all
    return {f"positions.scaling.{key}": value for key, value in scaling.items()}


def _write_scaling(options: Options, has_score_factor: bool) -> dict[str, Any]:
    prefix = "positions.scaling."
    if f"{prefix}type" not in options:
        return {}
    names = SCALING_NAMES.items()
    written = {key: options[prefix + ours] for key, ours in names if prefix + ours in options}
    if has_score_factor and (mscale := options.get(f"{prefix}score_mscale")):
        written["mscale_all_dim"] = mscale
        if written.get("attention_factor") == 1:
            # DeepSeek-V3 writes equal coefficients for this, and other libraries read only these.
            written["mscale"] = mscale
            del written["attention_factor"]
    return {"rope_type": options[f"{prefix}type"], **written}


def _read_window(hf: HFConfig) -> Options:
    # Some architectures ignore `use_sliding_window`.
    is_on = not hf["has_window_switch"] or hf["use_sliding_window"]
    return {"attention.window": (is_on and hf["sliding_window"]) or None}


WINDOW = OptionMapping(
    _read_window,
    lambda options: {
        "sliding_window": options.get("attention.window"),
        "use_sliding_window": "attention.window" in options,
    },
)
"""The attention window of all layers."""


def layer_windows(
    is_windowed: Callable[[int, int], bool], otherwise: int | None = None
) -> OptionMapping:
    """Map the attention window of some layers; by default those for which `is_windowed` is true, given the
    layer's number and `max_window_layers`. If no layer has a window, `otherwise` is written.
    """

    def read(hf: HFConfig) -> Options:
        options = WINDOW.read(hf)
        types = hf.get("layer_types")
        if options["attention.window"] is None:
            return options
        if types is None:
            count = hf.count("max_window_layers", 0)
            windowed = [layer for layer in hf.layers() if is_windowed(layer, count)]
        elif (
            isinstance(types, list)
            and len(types) == len(hf.layers())
            and all(kind in ("full_attention", "sliding_attention") for kind in types)
        ):
            windowed = [n for n, kind in enumerate(types) if kind == "sliding_attention"]
        else:
            raise hf.error(
                f"layer_types is {show(types)}",
                f"a list of full_attention or sliding_attention for each of the {len(hf.layers())} layers",
            )
        if not windowed:
            return {"attention.window": None}
        return {**options, "attention.window_at": ",".join(map(str, windowed))}

    def write(options: Options) -> dict[str, Any]:
        windowed = options.get("attention.window_at", ())
        layers = range(options["num_layers"])
        kinds = ["sliding_attention" if n in windowed else "full_attention" for n in layers]
        window = options.get("attention.window", otherwise)
        return {**WINDOW.write(options), "sliding_window": window, "layer_types": kinds}

    return OptionMapping(read, write)


def read_whole_heads(hf: HFConfig) -> Options:
    width, heads = hf.count("hidden_size"), hf.count("num_attention_heads")
    if width % heads:
        raise hf.error(f"num_attention_heads is {heads}", f"a divisor of hidden_size ({width})")
    return {}


def read_equal_heads(hf: HFConfig) -> Options:
    """Require heads that divide the model width evenly: OLMoE's query and key norms have that width."""
    read_whole_heads(hf)
    hf.require("head_dim", None, hf["hidden_size"] // hf["num_attention_heads"])
    return {}


def require_kv_heads(hf: HFConfig) -> Options:
    """Require as many key-value heads as query heads, as in latent attention."""
    hf.require("num_key_value_heads", None, hf["num_attention_heads"])
    return {}


def read_qwen_layers(hf: HFConfig) -> Options:
    """Read Qwen's sparse layers: every `decoder_sparse_step`th layer except `mlp_only_layers`."""
    step = hf.count("decoder_sparse_step")
    dense = hf["mlp_only_layers"] or []
    if not isinstance(dense, list):
        raise hf.error(f"mlp_only_layers is {show(dense)}", "a list of layers")
    layers = hf.layers() if hf.count("num_experts", 0) else ()
    return {"sparse_layers": [n for n in layers if (n + 1) % step == 0 and n not in dense]}


def write_qwen_layers(options: Options) -> dict[str, Any]:
    layers = range(options["num_layers"])
    dense = [n for n in layers if n not in options["sparse_layers"]]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
