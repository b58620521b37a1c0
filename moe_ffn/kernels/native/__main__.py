"""`python -m moe_ffn.kernels.native` compiles the kernels now, so that no first run waits for it."""

from __future__ import annotations

from moe_ffn.kernels.native.build import why_not

if __name__ == "__main__":
    reason = why_not()
    print("the CPU kernels are compiled" if reason is None else f"the compiled CPU kernel {reason}")
