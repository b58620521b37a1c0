"""Figures, tables and pages of several runs, which `moe_ffn.studies` compares.

Any runs      comparison_page.py, comparison_tables.py, arm_figures.py
A study       study_page.py, fits.py; leaderboard.py ranks the arms of all studies
Shared        markdown.py
"""
