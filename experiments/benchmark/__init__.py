"""The benchmark, `python -m experiments.benchmark`: see docs/performance.md.

__main__.py   the command: options, the suites by name
suites.py     the layer timed: at published sizes, with many experts, by load, decoding, on a GPU;
              bytes kept for backward
generation.py the suite of decoding: a cache of keys and values beside whole sequences
live_models.py the suite of generation by a sparse model of transformers
training.py   the suite of whole training steps
session.py    the stopwatch, by which candidates take turns; results, promises, tables and CSV
layers.py     what is timed: ours in every backend, the dense block, other libraries'; whether they agree
peers.py      the adapters of other libraries
shapes.py     T, D, F, E, K and dtype of a layer
"""
