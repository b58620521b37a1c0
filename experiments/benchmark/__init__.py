"""How fast the layers and a training step are, beside the dense block and other libraries.

    python -m experiments.benchmark --help

Needs what the layers need (torch, einops, pydantic) and times whichever other library is installed.

The suites, one file each:
    rows.py        layers at published sizes, and at sizes of one's own
    sweeps.py      over experts, tokens and width
    skew.py        over how unevenly the tokens are spread
    decoding.py    a few tokens, forward alone
    training.py    whole training steps
    memory.py      bytes kept for the backward pass
    blocks.py      the dense blocks beside plain linear layers
    profile.py     where the time of a layer goes
    gpu.py         the size of a large model

What they are made of:
    options.py     the command line, read without torch
    shapes.py      T, D, F, E, K and dtype of a layer
    layers.py      candidates: ours in every backend, the dense block, other libraries'
    peers.py       those other libraries, one adapter each
    equivalence.py whether two layers compute the same
    timing.py      the stopwatch: candidates take turns
    session.py     one run: what it was told, what it measured, what was promised
    report.py      tables and CSV; plot.py draws SVG, machine.py says where it was
"""
