"""`python -m moe_ffn.kernels.native` compiles the kernels now, so that no first run waits for it."""

from __future__ import annotations

from moe_ffn.kernels.native.build import load

if __name__ == "__main__":
    why = load()
    print("the CPU kernels are compiled" if why is None else f"the compiled CPU kernel {why}")
