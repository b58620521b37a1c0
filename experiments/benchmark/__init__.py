"""The benchmark, `python -m experiments.benchmark`: see docs/howto/benchmark.md.

__main__.py     options, and suites by name
suites.py       a layer: at published sizes, with many experts, by load, decoding, saved bytes
models.py       whole models: training steps, decoding, a sparse model of transformers
session.py      timing in turns, tables and targets
layers.py       layers to time, and the check that they compute the same
peers.py        adapters for layers of other libraries
shapes.py       T, D, F, E, K and dtype of a layer
new_gpu.py      first checks on a kind of GPU, and the page about it
tiles.py        times of every kernel with every tile, for that page
"""
