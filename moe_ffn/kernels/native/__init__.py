"""C++ for a CPU: compiled on first use, and never needed.

build.py      compiling, once for a machine, and loading
routing.py    choosing experts and sorting pairs by them, compiled or not
experts.cpp   all operators, and the forward pass of the experts
backward.h    the backward pass
layer.h       their arguments, and how rows are divided among threads, and cut into chunks and tiles
passes.h      dtypes, the order of operands, activations, threads
routing.h     what is behind routing.py
"""
