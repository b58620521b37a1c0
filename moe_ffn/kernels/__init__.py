"""Fast computation of experts on a plan: several backends with one signature.

base.py            signature of a backend, weights of experts, and helpers of all backends
activations.py     activations, and the gates of gated blocks
select.py          table of backends, and the choice of `auto`
torch_products.py  `loop`, the reference on any device and in any dtype, and `grouped_mm`
cpu.py             backend for CPUs: C++, or the loop without a compiler; its operator
native/            C++ of `cpu`, top-k and sorting, compiled on first use
autograd.py        autograd of operators with their own backward pass
memory.py          memory limit of this process
triton/            kernels for a GPU
"""
