"""Optional C++ kernels for CPUs, compiled on first use.

build.py      compiles the kernels, once per machine, and loads them
routing.py    top-k and the sort of pairs by expert, compiled or not
experts.cpp   all operators, and the forward pass of the experts
backward.h    the backward pass
layer.h       arguments of both passes; division of rows among threads, and into chunks and tiles
passes.h      dtypes, layout of operands, products, activations, threads
routing.h     the C++ of routing.py
"""
