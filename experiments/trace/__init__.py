"""One token's way: the experts that each layer sent it to, with their weights and what was dropped.

python -m experiments.trace runs/NAME --text "import os" [--html FILE]

__main__.py   the command: options in, the way shown
way.py        the values: what happened to each token at each layer; torch-free
follow.py     makes them, from a run and a text
visible.py    tokens as characters that can be seen
colours.py    a colour for each expert
legend.py     what a reader has to know, in sentences
terminal.py   the way as tables for a terminal, html.py as a page
"""
