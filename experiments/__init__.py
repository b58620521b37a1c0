"""What a person runs: `python -m experiments.train`, and the rest."""
