"""HOW FAST: the experts' arithmetic on a plan; one signature, several backends.

base.py            the signature, the experts' weights, and what backends share
select.py          the table of backends, and the one that `auto` picks
torch_products.py  `loop`, the reference on any device and in any dtype, and `grouped_mm`
cpu.py             one autograd function for a CPU, in blocks of rows
triton/            kernels for a GPU
"""
