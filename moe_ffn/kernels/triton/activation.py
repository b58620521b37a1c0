"""The activations of `moe_ffn.activations` and their slopes, in float32, inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """(value, slope) of the element-wise function; the compiler drops the one that nobody uses."""
    if ACTIVATION == "relu":
        # Compared this way round, a NaN stays one, as it does in torch.
        value = tl.where(x <= 0, 0.0, x)
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION == "relu_squared":
        positive = tl.where(x <= 0, 0.0, x)
        value = positive * positive
        slope = 2.0 * positive
    elif ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(x)
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "sigmoid":
        value = tl.sigmoid(x)
        slope = value * (1.0 - value)
    else:
        tl.static_assert(ACTIVATION == "identity")
        value = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return value, slope


@triton.jit
def hidden_units(
    gate, up, alpha, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr
):
    """(hidden, its slope in `gate`, its slope in `up`); without a gate, `gate` is not looked at."""
    if CLAMPED:
        # Where a value is clamped the slope is 0; at the limit itself it is not, as in torch.
        g = tl.where(gate > limit, limit, gate)
        u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        s = tl.sigmoid(alpha * g)
        hidden = (u + 1.0) * g * s
        gate_slope = tl.where(gate > limit, 0.0, (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s)))
        up_slope = tl.where((up > limit) | (up < -limit), 0.0, g * s)
    elif GATED:
        value, slope = activate(gate, ACTIVATION)
        hidden = value * up
        gate_slope = slope * up
        up_slope = value
    else:
        hidden, up_slope = activate(up, ACTIVATION)
        gate_slope = up_slope
    return hidden, gate_slope, up_slope
