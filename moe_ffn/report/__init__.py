"""Figures, tables and pages of one or more runs, which `moe_ffn.runs.reader` reads.

A run         page.py, tables.py (terminal), run_summary.py (texts), figures.py, dashboard.py (wandb)
Many runs     studies/
A text        trace.py and trace_view.py (experts of each token), expert_tokens.py (tokens of each expert)
Units         inspect/
Shared        html.py and templates/, plots.py and drawing.py (plotly)
"""
