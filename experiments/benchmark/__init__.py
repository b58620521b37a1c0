"""How fast the layers and a training step are, beside the dense block and other libraries.

    python -m experiments.benchmark --help

Other libraries are timed where they are installed.

__main__.py   the command: options, the suites by name, what is written
suites.py     the layer timed: at published sizes, in sweeps, by load, decoding, beside plain ones, on a GPU
training.py   the suite of whole training steps
resources.py  the suites of bytes kept for backward, and of time by operator
session.py    one run: the rounds, rows and promises so far; tables, charts and CSV
layers.py     candidates: ours in every backend, the dense block, other libraries'; whether they agree
peers.py      the adapters of other libraries
timing.py     the stopwatch: candidates take turns
shapes.py     T, D, F, E, K and dtype of a layer
"""
