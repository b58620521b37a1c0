"""Backends that compute the experts of a plan, all with one signature.

base.py            signature of a backend, weights of experts, and functions that backends share
activations.py     activations, and the gates of gated blocks
select.py          table of backends, and the choice of `auto`
torch_products.py  `loop`, the reference on any device and in any dtype, and `grouped_mm`
cpu.py             `cpu`: C++, or the loop without a compiler; its torch operator
routing.py         logits, top-k and the sort by expert: C++, or torch without a compiler
native/            C++ for `cpu` and `routing.py`, compiled on first use
autograd.py        autograd of operators with a hand-written backward pass
triton/            `triton`, for GPUs
"""
