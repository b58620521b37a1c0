"""The experts on a CPU, in C++: compiled on first use, and never needed.

backend.py    the function that torch differentiates
build.py      compiling, once for a machine, and loading
experts.cpp   the operators, and the forward pass
backward.h    the backward pass
layer.h       their arguments, and how rows are cut into groups, parts, chunks and tiles
passes.h      dtypes, the order of operands, activations
"""
