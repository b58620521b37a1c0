"""HOW FAST: the experts' arithmetic on a plan; one signature, several backends.

base.py            the signature, the experts' weights, and what backends share
select.py          the table of backends, and the one that `auto` picks
torch_products.py  `loop`, the reference on any device and in any dtype, and `grouped_mm`
cpu.py             the backend for CPUs: `native`, or `blocks` where nothing can be compiled
native.py          the experts in C++ (`moe_ffn.native`), compiled on first use
blocks.py          one function in blocks of rows, of torch's own products
own_backward.py    how torch differentiates those two, and operators
cpu_operator.py    the same as an operator, for graphs and for tensors without numbers
gradient_memory.py memory for gradients of large weights
triton/            kernels for a GPU
"""
