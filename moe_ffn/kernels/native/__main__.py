"""`python -m moe_ffn.kernels.native` compiles the kernels, so that the first run need not."""

from __future__ import annotations

from moe_ffn.kernels.native.build import load

if __name__ == "__main__":
    reason = load()
    print("the CPU kernels are compiled" if reason is None else f"the C++ kernel {reason}")
