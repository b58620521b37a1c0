"""HOW FAST: the experts' arithmetic on a plan; one signature, several backends.

base.py            the signature, the experts' weights, and what backends share
activations.py     activations, and the gates of gated blocks
select.py          the table of backends, and the one that `auto` picks
torch_products.py  `loop`, the reference on any device and in any dtype, and `grouped_mm`
cpu.py             the backend for CPUs: `native`, or `blocks` where nothing can be compiled
native/            the experts in C++, compiled on first use; top-k and sorting, too
blocks.py          the experts in torch's own products, one block of rows after another
autograd.py        how torch differentiates experts with a backward pass of their own
cpu_operator.py    the backend `cpu` as an operator of torch, for graphs and for tensors without data
gradient_memory.py memory for gradients of large weights
triton/            kernels for a GPU
"""
