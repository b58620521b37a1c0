"""Experts on a GPU in Triton: three forward and three backward kernels.

Nothing is compiled at installation, and only `backend.py` is imported before the first run.

backend.py   the backend, (x_TD, plan, weights) -> y_TD, and the reasons why it cannot run
launch.py    both torch operators; tile sizes, buffers, grids and arguments of the kernels
forward.py   hidden units, products, weighted sums per token; device functions of all kernels
backward.py  gradients of hidden units, routing weights, matrices and biases
"""
