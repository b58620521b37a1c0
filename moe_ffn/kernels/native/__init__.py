"""Optional C++ kernels for CPUs, compiled on first use.

build.py      compiles the kernels, once per machine, and loads them
routing.py    logits, top-k and the sort of pairs by expert, in C++ or in torch
experts.cpp   all operators, and the forward pass of the experts
backward.h    backward pass of the experts
layer.h       arguments of both passes; division of rows among threads, and into chunks and tiles
passes.h      dtypes, layout of operands, products, activations, threads
routing.h     C++ for routing.py
"""
