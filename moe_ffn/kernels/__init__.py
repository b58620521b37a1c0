"""HOW FAST: the experts' arithmetic on a plan; one signature, several backends.

base.py        the signature, the experts' weights, and what backends share
select.py      the table of backends, and the one that `auto` picks
loop.py        expert by expert, on any device and in any dtype: the reference
grouped_mm.py  torch's own grouped product
cpu/           blocks that stay in the cache of a CPU
triton/        kernels for a GPU
"""
