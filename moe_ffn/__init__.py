"""Feed-forward blocks for Transformers, dense and sparse, behind one interface.

    from moe_ffn import build_ffn

    ffn = build_ffn({"type": "moe", "num_experts": 8}, d_model=512)
    output = ffn(x)  # output.hidden, output.routing

The public names are below. Each is imported when it is first asked for, so that reading a config
needs no torch and using a block needs neither lightning nor wandb.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ffn.balancing.bias_rules import (
        BiasRule,
    )
    from moe_ffn.balancing.config import (
        BiasRuleConfig,
        QuantileRuleConfig,
        SignRuleConfig,
        SparsityRuleConfig,
    )
    from moe_ffn.balancing.losses import (
        global_load_balancing_loss,
        importance_cv2_loss,
        load_balancing_loss,
        load_cv2_loss,
        pairs_per_expert,
        pooled_load_balancing_loss,
        relu_sparsity_loss,
        router_entropy_loss,
        router_z_loss,
        sequence_load_balancing_loss,
    )
    from moe_ffn.balancing.sparsity import (
        sparsity_weight_after,
    )
    from moe_ffn.config import (
        Config,
    )
    from moe_ffn.errors import (
        ConfigError,
    )
    from moe_ffn.experts.base import (
        Experts,
    )
    from moe_ffn.experts.config import (
        ClampedSwiGLUExpertsConfig,
        ExpertsConfig,
        GatedExpertsConfig,
        MLPExpertsConfig,
    )
    from moe_ffn.ffn.base import (
        FFNBlock,
    )
    from moe_ffn.ffn.combine import (
        Combine,
    )
    from moe_ffn.ffn.config import (
        CapacityConfig,
        CombineConfig,
        ConvConfig,
        DenseConfig,
        FFNConfig,
        GatedConfig,
        IdentityConfig,
        MixtureOfDepthsConfig,
        MoEConfig,
        SoftMoEConfig,
        ZeroComputationConfig,
        build_ffn,
    )
    from moe_ffn.model.config import (
        DecoderConfig,
    )
    from moe_ffn.model.decoder import (
        Decoder,
        DecoderOutput,
    )
    from moe_ffn.outputs import (
        FFNOutput,
        Routing,
        TokenContext,
    )
    from moe_ffn.routing.base import (
        LinearRouter,
        Router,
        routing_of_pairs,
    )
    from moe_ffn.routing.config import (
        BalancedAssignmentRouterConfig,
        ExpertChoiceRouterConfig,
        FixedKConfig,
        ForcedRouterConfig,
        GroupsConfig,
        HashRouterConfig,
        LinearRouterConfig,
        NoisyTopKRouterConfig,
        ReLURouterConfig,
        RouterConfig,
        SigmoidTopKRouterConfig,
        SinkhornRouterConfig,
        TopKRouterConfig,
        TopPRouterConfig,
    )

__version__ = "0.1.0"

_HOMES = {
    "balancing.bias_rules": ("BiasRule",),
    "balancing.config": (
        "BiasRuleConfig",
        "QuantileRuleConfig",
        "SignRuleConfig",
        "SparsityRuleConfig",
    ),
    "balancing.losses": (
        "global_load_balancing_loss",
        "importance_cv2_loss",
        "load_balancing_loss",
        "load_cv2_loss",
        "pairs_per_expert",
        "pooled_load_balancing_loss",
        "relu_sparsity_loss",
        "router_entropy_loss",
        "router_z_loss",
        "sequence_load_balancing_loss",
    ),
    "balancing.sparsity": ("sparsity_weight_after",),
    "config": ("Config",),
    "errors": ("ConfigError",),
    "experts.base": ("Experts",),
    "experts.config": (
        "ClampedSwiGLUExpertsConfig",
        "ExpertsConfig",
        "GatedExpertsConfig",
        "MLPExpertsConfig",
    ),
    "ffn.base": ("FFNBlock",),
    "ffn.combine": ("Combine",),
    "ffn.config": (
        "CapacityConfig",
        "CombineConfig",
        "ConvConfig",
        "DenseConfig",
        "FFNConfig",
        "GatedConfig",
        "IdentityConfig",
        "MixtureOfDepthsConfig",
        "MoEConfig",
        "SoftMoEConfig",
        "ZeroComputationConfig",
        "build_ffn",
    ),
    "model.config": ("DecoderConfig",),
    "model.decoder": (
        "Decoder",
        "DecoderOutput",
    ),
    "outputs": (
        "FFNOutput",
        "Routing",
        "TokenContext",
    ),
    "routing.base": (
        "LinearRouter",
        "Router",
        "routing_of_pairs",
    ),
    "routing.config": (
        "BalancedAssignmentRouterConfig",
        "ExpertChoiceRouterConfig",
        "FixedKConfig",
        "ForcedRouterConfig",
        "GroupsConfig",
        "HashRouterConfig",
        "LinearRouterConfig",
        "NoisyTopKRouterConfig",
        "ReLURouterConfig",
        "RouterConfig",
        "SigmoidTopKRouterConfig",
        "SinkhornRouterConfig",
        "TopKRouterConfig",
        "TopPRouterConfig",
    ),
}
"""Where each public name lives; the same lines as the imports above, which only type checkers run."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BalancedAssignmentRouterConfig",
    "BiasRule",
    "BiasRuleConfig",
    "CapacityConfig",
    "ClampedSwiGLUExpertsConfig",
    "Combine",
    "CombineConfig",
    "Config",
    "ConfigError",
    "ConvConfig",
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "DenseConfig",
    "ExpertChoiceRouterConfig",
    "Experts",
    "ExpertsConfig",
    "FFNBlock",
    "FFNConfig",
    "FFNOutput",
    "FixedKConfig",
    "ForcedRouterConfig",
    "GatedConfig",
    "GatedExpertsConfig",
    "GroupsConfig",
    "HashRouterConfig",
    "IdentityConfig",
    "LinearRouter",
    "LinearRouterConfig",
    "MLPExpertsConfig",
    "MixtureOfDepthsConfig",
    "MoEConfig",
    "NoisyTopKRouterConfig",
    "QuantileRuleConfig",
    "ReLURouterConfig",
    "Router",
    "RouterConfig",
    "Routing",
    "SigmoidTopKRouterConfig",
    "SignRuleConfig",
    "SinkhornRouterConfig",
    "SoftMoEConfig",
    "SparsityRuleConfig",
    "TokenContext",
    "TopKRouterConfig",
    "TopPRouterConfig",
    "ZeroComputationConfig",
    "build_ffn",
    "global_load_balancing_loss",
    "importance_cv2_loss",
    "load_balancing_loss",
    "load_cv2_loss",
    "pairs_per_expert",
    "pooled_load_balancing_loss",
    "relu_sparsity_loss",
    "router_entropy_loss",
    "router_z_loss",
    "routing_of_pairs",
    "sequence_load_balancing_loss",
    "sparsity_weight_after",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'moe_ffn' has no attribute '{name}'")
    return getattr(import_module(f"moe_ffn.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
