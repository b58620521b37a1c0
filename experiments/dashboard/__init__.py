"""The wandb workspace of this project as code: `python -m experiments.dashboard --help`.

options.py reads the command line; panels.py has every panel, section by section; workspace.py puts
them together with the list of runs; saving.py talks to wandb; library.py imports wandb-workspaces.
"""
