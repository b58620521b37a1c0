"""HOW FAST: the experts' arithmetic on a plan, one signature, several backends.

base.py        the signature, the weights, and what backends share
select.py      which backend runs, and which says no
dtypes.py      what is multiplied in which precision
loop.py        expert by expert: any device, any dtype; the reference
bmm.py         padded, for even loads
grouped_mm.py  torch's own grouped product
cpu/           what is fast on a CPU
triton/        what is fast on a GPU
"""
