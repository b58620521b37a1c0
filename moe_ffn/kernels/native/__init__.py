"""The experts on a CPU, in C++: compiled on first use, and never needed.

backend.py    the function that torch differentiates
build.py      compiling, once for a machine, and loading
experts.cpp   the operators: tiles of rows, threads, forward and backward
passes.h      dtypes, the order of operands, activations
"""
