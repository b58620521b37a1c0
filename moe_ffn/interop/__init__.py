"""Weights in and out: a folder of one model, and the layouts of other libraries."""
