"""Speed: the experts' arithmetic on a plan; one signature, several backends.

base.py            the signature, the experts' weights, and what backends share
activations.py     activations, and the gates of gated blocks
select.py          the table of backends, and the one that `auto` picks
torch_products.py  `loop`, the reference on any device and in any dtype, and `grouped_mm`
cpu.py             the backend for CPUs: `native`, or the loop where nothing can be compiled; its operator
native/            the experts in C++, compiled on first use; top-k and sorting, too
autograd.py        derivatives of experts with a backward pass of their own
memory.py          memory of this process
torch_modes.py     state of torch around a call
triton/            kernels for a GPU
"""
