"""What a run shows: figures, tables and pages, each a function of the run that `moe_ffn.runs.reader` read."""
