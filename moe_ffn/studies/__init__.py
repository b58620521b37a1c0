"""Studies: a question, the runs that answer it, and their statistics.

Plan       config.py (the file of a study)
Train      sweep.py (several runs at a time), timing.py (speed of the arms, in turns), which.py (a search)
Read       gather.py (folders), result.py (one run as a value), differences.py (whether losses are comparable)
Compare    comparison.py (arms), statistics.py (intervals and p-values)
Fit        scaling_laws.py, isoflop.py, curves.py
"""
