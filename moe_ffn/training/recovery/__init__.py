"""Surviving: checkpoints, steps that are skipped, and how a run ends before its last step."""
