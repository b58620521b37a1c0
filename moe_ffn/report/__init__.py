"""Figures, tables and pages: functions of a run that `moe_ffn.runs.reader` read, or of several."""
