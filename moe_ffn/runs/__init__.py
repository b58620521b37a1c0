"""Runs and their folders: options, checks before training, files, reading and resuming."""
