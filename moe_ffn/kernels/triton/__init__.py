"""The experts on a GPU, in Triton: three kernels forward and three backward.

Nothing of this package is compiled at installation, and only `backend.py` is imported before the backend
first runs.

backend.py   the backend: (x_TD, plan, weights) -> y_TD, and whether it can
launch.py    the two operators that torch sees; tile sizes, buffers, grids and arguments of the kernels
forward.py   hidden units, products, a token's weighted sum; the device functions that kernels share
backward.py  gradients of hidden units and routing weights, of matrices, of biases
"""
