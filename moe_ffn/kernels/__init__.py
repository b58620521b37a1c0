"""Speed: the experts' arithmetic on a plan; one signature, several backends.

base.py            the signature, the experts' weights, and what backends share
activations.py     activations, and the gates of gated blocks
select.py          the table of backends, and the one that `auto` picks
torch_products.py  `loop`, the reference on any device and in any dtype, and `grouped_mm`
cpu.py             the backend for CPUs: C++, or the loop where nothing can be compiled; its operator
native/            the C++ of `cpu`, and of top-k and sorting, compiled on first use
autograd.py        derivatives of operators with a backward pass of their own
memory.py          memory of this process
triton/            kernels for a GPU
"""
